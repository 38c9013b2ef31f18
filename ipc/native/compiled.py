"""Compilation with numba, and an on-disk cache of machine code that is invalidated by any change of its sources.

numba invalidates a function's cached code when the function's own file changes, but not when a file with inlined
functions changes. Here the code is bound to all sources of the folders that it may be compiled from. It is cached where
`ipc.native.machine_code` says.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from ipc.native.dispatcher import Dispatcher
from ipc.native.machine_code import MachineCode

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


class Compiler(Protocol):
    """A decorator that compiles a function, which keeps its types: see `compiler_for`."""

    def __call__(
        self, function: Callable[P, R], /, *, nogil: bool = True, returns_array: bool = False
    ) -> Dispatcher[P, R]: ...


def compiler_for(*folders: Path) -> Compiler:
    """Return a decorator that compiles a function at its first call, without the GIL.

    The code is cached on disk if possible, until a source in `folders` changes.

    Arrays are views of memory owned elsewhere, so their references are not counted, which would take some hundred calls
    in a round of the pool's loop. Compiled functions must not allocate arrays; those that return a view need
    `returns_array`, which enables reference counting.
    """
    stamp = stamp_of(*folders)

    def compiled(function: Callable[P, R], /, *, nogil: bool = True, returns_array: bool = False) -> Dispatcher[P, R]:
        return Dispatcher(function, {"nogil": nogil, "error_model": "numpy", "_nrt": returns_array}, stamp)

    return compiled


def stamp_of(*folders: Path) -> str:
    """Return a digest of all sources below these folders."""
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def can_cache() -> bool:
    """Return whether compiled code of this package can be cached on disk by this process."""
    try:
        MachineCode(_example, "", "")
    except RuntimeError:
        return False
    return True


def _example() -> None:
    """A function for which numba locates a cache folder."""


NATIVE = Path(__file__).parent
PACKAGE = NATIVE.parent
compiled = compiler_for(PACKAGE)


def entry_point(signature: str, *, nogil: bool = False) -> Callable[[F], F]:
    """Return a decorator that compiles a function at once, for one signature, into its machine code's entry point.

    A call bypasses numba's dispatcher and its overload resolution, and takes 80 ns instead of 350.
    """

    def compile_(function: F) -> F:
        dispatcher = compiled(function, nogil=nogil)
        dispatcher.compile(signature)
        _dispatchers.append(dispatcher)
        (overload,) = dispatcher.overloads.values()
        return cast(F, overload.entry_point)

    return compile_


_dispatchers: list[Any] = []  # own the machine code
