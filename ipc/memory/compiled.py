"""Compilation with numba, and an on-disk cache of machine code that is invalidated by any change of its sources.

numba invalidates a function's cached code when the function's own file changes, but not when a file with inlined
functions changes. Here the code is bound to all sources of the folders that it may be compiled from. If neither the
source folders, nor the user's cache, nor NUMBA_CACHE_DIR is writable, every process compiles for itself.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiler_for(*folders: Path) -> Callable[..., Any]:
    """Return a decorator that compiles a function at its first call, without the GIL.

    The code is cached on disk if possible, until a source in `folders` changes.

    Arrays are views of memory owned elsewhere, so their references are not counted, which would take some hundred calls
    in a round of the pool's loop. Compiled functions must not allocate arrays; those that return a view need
    `returns_array`, which enables reference counting.
    """
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    stamp = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()

    def compiled(function: Any, nogil: bool = True, returns_array: bool = False) -> Any:
        dispatcher = njit(nogil=nogil, error_model="numpy", _nrt=returns_array)(function)
        file: Any = getattr(dispatcher._cache, "_cache_file", None) if enable_cache(dispatcher) else None
        if hasattr(file, "_source_stamp"):  # numba's own name for what it compares
            file._source_stamp = stamp
        return dispatcher

    return compiled


def enable_cache(dispatcher: Any) -> bool:
    """Enable numba's on-disk cache, before the first compilation. Return whether a cache location is writable."""
    try:
        dispatcher.enable_caching()
    except RuntimeError:  # numba's "no locator available"
        return False
    return True


def can_cache() -> bool:
    """Return whether compiled code of this package can be cached on disk."""
    return enable_cache(njit(_example))


def _example() -> None:
    """A function for which numba locates a cache folder."""


PACKAGE = Path(__file__).parent.parent
compiled = compiler_for(PACKAGE)


def entry_point(signature: str, *, nogil: bool = False) -> Callable[[F], F]:
    """Return a decorator that compiles a function at once, for one signature, into its machine code's entry point.

    A call bypasses numba's dispatcher and its overload resolution, and takes 80 ns instead of 350.
    """

    def compile_(function: F) -> F:
        dispatcher = compiled(function, nogil)
        dispatcher.compile(signature)
        _dispatchers.append(dispatcher)
        (overload,) = dispatcher.overloads.values()
        return cast(F, overload.entry_point)

    return compile_


_dispatchers: list[Any] = []  # own the machine code
