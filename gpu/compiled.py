"""Compiling with numba, and keeping the machine code for the next process without ever keeping it too long.

numba drops a function's cached code when the function's own file changes, but not when a file changes whose functions
it has inlined. Here the code of every function is bound to all sources of `gpu`.
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
    """`function`, compiled at its first call, without the interpreter's lock, and cached on disk."""
    dispatcher = njit(nogil=True, cache=True, error_model="numpy")(function)
    file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):  # numba's own name for what it compares
        file._source_stamp = _STAMP
    return dispatcher


def c_function(signature: str) -> Callable[[Callable[..., Any]], int]:
    """A decorator: the address (int) of a C function of this signature, compiled at once; see `compiled`."""

    def compile_(function: Callable[..., Any]) -> int:
        made = CFunc(function, normalize_signature(signature), locals={}, options={"error_model": "numpy"})
        made.enable_caching()
        file: Any = getattr(getattr(made, "_cache", None), "_cache_file", None)
        if hasattr(file, "_source_stamp"):
            file._source_stamp = _STAMP
        made.compile()
        _functions.append(made)
        return int(made.address)

    return compile_


_functions: list[Any] = []  # they own the machine code
