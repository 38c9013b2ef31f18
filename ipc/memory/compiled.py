"""Compiling with numba, and keeping the machine code for the next process without ever keeping it too long.

numba drops a function's cached code when the function's own file changes, but not when a file changes whose functions
it has inlined. Here the code is bound to all sources of the folders that it may be built of. Where the user can write
neither beside the sources, nor to their cache, nor to NUMBA_CACHE_DIR, every process compiles for itself.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiler_for(*folders: Path) -> Callable[..., Any]:
    """A decorator: `function`, compiled at its first call, without the interpreter's lock, and cached on disk, where
    that is possible, for as long as no source in `folders` changes.

    Arrays lie over memory that others own, so their references are not counted: a round of the pool's loop would
    make some hundred calls for it. None may be made; a function that returns one (`returns_array`) is as numba has it.
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
    """Have numba cache what it compiles; whether there is a place for that. To be called before anything is."""
    try:
        dispatcher.enable_caching()
    except RuntimeError:  # numba's "no locator available"
        return False
    return True


def can_cache() -> bool:
    """Whether this user's processes can keep compiled code for the next ones."""
    return enable_cache(njit(_example))


def _example() -> None:
    """A function beside whose source numba looks for a place."""


PACKAGE = Path(__file__).parent.parent
compiled = compiler_for(PACKAGE)


def entry_point(signature: str, *, nogil: bool = False) -> Callable[[F], F]:
    """As `compiled`, at once and for one signature; the machine code's own entry.

    Calling it without numba's dispatcher, which would look for an overload each time, takes 80 ns instead of 350.
    """

    def compile_(function: F) -> F:
        dispatcher = compiled(function, nogil)
        dispatcher.compile(signature)
        _dispatchers.append(dispatcher)
        (overload,) = dispatcher.overloads.values()
        return cast(F, overload.entry_point)

    return compile_


_dispatchers: list[Any] = []  # they own the machine code
