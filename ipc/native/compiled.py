"""Compilation with numba, and an on-disk cache of machine code that is invalidated by any change of its sources.

numba invalidates a function's cached code when the function's own file changes, but not when a file with inlined
functions changes. Here the code is bound to all sources of the folders that it may be compiled from. It is cached where
`ipc.native.machine_code` says.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, ParamSpec, Protocol, TypeVar

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


class EntryPoints:
    """Functions of a module that Python calls, compiled into the entry points of their machine code.

    A call bypasses numba's dispatcher and its overload resolution, and takes 80 ns instead of 350. The functions are
    declared with an instance as decorator, and are replaced in the module's `names` by `compile`, at its end.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._declared: list[tuple[Callable[..., Any], str, bool]] = []
        self._dispatchers: list[Any] = []  # own the machine code

    def __call__(self, signature: str, *, nogil: bool = False) -> Callable[[F], F]:
        """Return a decorator that declares a function, to be compiled for one signature."""

        def declare(function: F) -> F:
            self._declared.append((function, signature, nogil))
            return function

        return declare

    def compile(self) -> None:
        """Compile the functions, or load them from the cache.

        Processes that start together on an empty cache begin with different ones, and so share the work.
        """
        for function, signature, nogil in Random().sample(self._declared, len(self._declared)):
            dispatcher = compiled(function, nogil=nogil)
            dispatcher.compile(signature)
            (overload,) = dispatcher.overloads.values()
            self._dispatchers.append(dispatcher)
            self._names[function.__name__] = overload.entry_point
