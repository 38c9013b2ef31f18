"""Compilation with numba, with an on-disk cache that is invalidated when any source of `gpu` changes.

numba invalidates a function's cached code when the function's own file changes, but not when the file of an inlined
function changes. Here the cache key covers all sources of `gpu`. If neither the source directory, nor the user's cache
directory, nor NUMBA_CACHE_DIR is writable, every process compiles for itself.
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
    """Compile a function at its first call, to run without the GIL, and cache the code on disk if possible."""
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    _enable_cache(dispatcher)
    return dispatcher


def c_function(signature: str) -> Callable[[Callable[..., Any]], int]:
    """Return a decorator that compiles a C function of this signature immediately and returns its address (int)."""

    def compile_(function: Callable[..., Any]) -> int:
        made = CFunc(function, normalize_signature(signature), locals={}, options={"error_model": "numpy"})
        _enable_cache(made)
        made.compile()
        _functions.append(made)
        return int(made.address)

    return compile_


def _enable_cache(function: Any) -> None:
    """Enable numba's disk cache for a function if a cache directory is writable."""
    try:
        function.enable_caching()
    except RuntimeError:  # numba's "no locator available"
        return
    file: Any = getattr(function._cache, "_cache_file", None)
    if hasattr(file, "_source_stamp"):  # numba's own attribute for the cache key
        file._source_stamp = _STAMP


_functions: list[Any] = []  # keeps the machine code alive
