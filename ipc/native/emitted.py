"""Functions of compiled code that are written as LLVM IR."""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, cast

from numba import types
from numba.extending import intrinsic


def emits(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function `(builder, *values)` one of compiled code, with these numba types.

    It emits its instructions and returns its result's value: None for `types.void`, a list for a tuple.
    """
    signature = result(*arguments)

    def declare(emit: Callable[..., Any]) -> Callable[..., Any]:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            made = emit(builder, *values)
            if made is None:
                return context.get_dummy_value()
            return context.make_tuple(builder, result, made) if isinstance(result, types.BaseTuple) else made

        def typed(_typing: Any, *_arguments: Any) -> Any:
            return signature, generate

        names = ("context", *(f"argument_{number}" for number in range(len(arguments))))
        typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])  # type: ignore[attr-defined]
        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        return cast(Callable[..., Any], intrinsic(typed))

    return declare
