"""Compilation of the engines, whose machine code depends on the sources of `gpu` and of the native layer."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from ipc.native.compiled import NATIVE, compiler_for, stamp_of
from ipc.native.dispatcher import Dispatcher
from ipc.native.machine_code import machine_code
from ipc.native.passes import ShortCompiler

P = ParamSpec("P")
R = TypeVar("R")
Integer: TypeAlias = int | np.integer[Any]
"""An integer of any width, where a compiled function converts it."""
Float: TypeAlias = float | np.floating[Any]
_FOLDERS = (Path(__file__).parent, NATIVE)
_STAMP = stamp_of(*_FOLDERS)

compiled = compiler_for(*_FOLDERS)


def counted(function: Callable[P, R]) -> Dispatcher[P, R]:
    """As `compiled`, for a function that allocates or returns arrays."""
    return compiled(function, returns_array=True)


class CFunction:
    """A C function, compiled when its address is first asked for: an engine uses some of a module's functions."""

    def __init__(self, function: Any, signature: str) -> None:
        self._function, self._signature = function, signature
        self._made: CFunc | None = None  # owns the machine code

    @property
    def address(self) -> int:
        """The address of its machine code."""
        if self._made is None:
            signature = normalize_signature(self._signature)
            options = {"error_model": "numpy", "_nrt": False}
            made = CFunc(self._function, signature, locals={}, options=options, pipeline_class=ShortCompiler)
            if (cache := machine_code(self._function, _STAMP, "c")) is not None:
                made._cache = cache
            try:
                made.compile()
            finally:
                if cache is not None:
                    cache.compiled()
            self._made = made
        return int(self._made.address)


def c_function(signature: str) -> Callable[[Callable[..., Any]], CFunction]:
    """Return a decorator that makes a function a C function of this signature."""
    return lambda function: CFunction(function, signature)


def compile_c_functions(*modules: ModuleType) -> None:
    """Compile all C functions of modules, or find them in the cache."""
    for module in modules:
        for function in vars(module).values():
            if isinstance(function, CFunction):
                _ = function.address
