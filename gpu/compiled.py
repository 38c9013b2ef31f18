"""Compiling with numba, and keeping the machine code for the next process without ever keeping it too long.

numba drops a function's cached code when the function's own file changes, but not when a file changes whose functions
it has inlined. Here the code of every function is bound to all sources of `gpu`. Where the user can write neither
beside the sources, nor to their cache, nor to NUMBA_CACHE_DIR, every process compiles for itself.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature


def _digest() -> str:
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


_STAMP = _digest()


def compiled(function: Any) -> Any:
    """`function`, compiled at its first call, without the interpreter's lock, and cached on disk, if that can be."""
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    _keep(dispatcher)
    return dispatcher


def c_function(signature: str) -> Callable[[Callable[..., Any]], int]:
    """A decorator: the address (int) of a C function of this signature, compiled at once; see `compiled`."""

    def compile_(function: Callable[..., Any]) -> int:
        made = CFunc(function, normalize_signature(signature), locals={}, options={"error_model": "numpy"})
        _keep(made)
        made.compile()
        _functions.append(made)
        return int(made.address)

    return compile_


def _keep(function: Any) -> None:
    """Have numba cache what it compiles of this, if there is a place for it."""
    try:
        function.enable_caching()
    except RuntimeError:  # numba's "no locator available"
        return
    file: Any = getattr(function._cache, "_cache_file", None)
    if hasattr(file, "_source_stamp"):  # numba's own name for what it compares
        file._source_stamp = _STAMP


_functions: list[Any] = []  # they own the machine code
