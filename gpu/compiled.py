"""Compilation with numba, with an on-disk cache that is invalidated when any source of `gpu` changes.

numba invalidates a function's cached code when the function's own file changes, but not when the file of an inlined
function changes. Here the cache key covers all sources of `gpu`. Where it is cached: `ipc.native.machine_code`.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from ipc.native.dispatcher import Dispatcher
from ipc.native.machine_code import machine_code


def _digest() -> str:
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


_STAMP = _digest()


def compiled(function: Any) -> Any:
    """Compile a function at its first call, to run without the GIL, and cache the code on disk if possible."""
    return Dispatcher(function, {"nogil": True, "error_model": "numpy"}, _STAMP)


def c_function(signature: str) -> Callable[[Callable[..., Any]], int]:
    """Return a decorator that compiles a C function of this signature immediately and returns its address (int)."""

    def compile_(function: Callable[..., Any]) -> int:
        made = CFunc(function, normalize_signature(signature), locals={}, options={"error_model": "numpy"})
        if (cache := machine_code(function, _STAMP, "c")) is not None:
            made._cache = cache
        made.compile()
        _functions.append(made)
        return int(made.address)

    return compile_


_functions: list[Any] = []  # keeps the machine code alive
