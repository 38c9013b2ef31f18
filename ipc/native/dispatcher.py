"""A numba function that compiles in less time.

numba gives every function wrappers for calls from Python and from C, and compiles it anew for each literal argument.
Here what compiled code calls has no wrappers, and one version for all values of an integer.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from numba import types
from numba.core.registry import CPUDispatcher

from ipc.native.linked import LinkedCompiler
from ipc.native.machine_code import machine_code
from ipc.native.passes import ShortCompiler

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
_NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class _Cached(CPUDispatcher):  # type: ignore[misc]
    """A dispatcher with a `MachineCode` cache, which is opened at the first compilation: most functions need none."""

    compiler: type[ShortCompiler] = ShortCompiler

    def __init__(self, function: Any, options: dict[str, Any], stamp: str, kind: str) -> None:
        super().__init__(function, targetoptions={**options, "nopython": True}, pipeline_class=self.compiler)
        self._stamp, self._kind = stamp, kind

    @cached_property
    def machine_code(self) -> Any:
        """The cache; None if there is no directory for it."""
        cache = machine_code(self.py_func, self._stamp, self._kind)
        if cache is not None:
            self._cache = cache
        return cache

    def compile(self, signature: Any) -> Any:
        """See numba."""
        cache = self.machine_code
        try:
            return super().compile(signature)
        finally:
            if cache is not None:
                cache.compiled()


class _Linked(_Cached):
    """What compiled code calls."""

    compiler = LinkedCompiler

    def add_overload(self, result: Any) -> None:
        """See numba. Python calls none of it."""
        self.overloads[tuple(result.signature.args)] = result


class Dispatcher(_Cached, Generic[P, R]):
    """A function that is compiled at its first call, and cached on disk if possible until `stamp` changes.

    Calls from Python compile this object, calls from compiled code another one, because a call from Python into code
    without a wrapper would crash.
    """

    def __init__(self, function: Callable[P, R], options: dict[str, Any], stamp: str) -> None:
        super().__init__(function, {**options, "no_cfunc_wrapper": True}, stamp, "outer")
        self._options = options

    if TYPE_CHECKING:  # a call that bypasses numba's would take longer

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @cached_property
    def _inner(self) -> _Linked:
        return _Linked(self.py_func, {**self._options, **_NO_WRAPPERS}, self._stamp, "inner")

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """numba's hook for typing a call from compiled code."""
        plain = {name: types.unliteral(kind) for name, kind in kws.items()}
        return self._inner.get_call_template(tuple(map(types.unliteral, args)), plain)

    def get_overload(self, signature: Any) -> Any:
        """numba's hook for the code of such a call."""
        return self._inner.get_overload(signature)

    def compile_inner(self, *arguments: Any) -> None:
        """Compile, or load from the cache, what compiled code calls with arguments of these types."""
        self._inner.compile(arguments)

    def is_cached(self, *arguments: Any) -> bool:
        """Whether the code for a call from Python with these types is in the cache."""
        return self.machine_code is not None and self.machine_code.has(arguments, self.targetctx.codegen())
