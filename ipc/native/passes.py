"""numba's compiler without what our functions do not need: a third of the time of its parts in Python.

- passes for what they do not contain, a twelfth;
- the type of an operator or a built-in function, which numba looks up anew for each use, a quarter.
"""

from typing import Any

from numba import types
from numba.core.compiler import Compiler

NEEDLESS = {
    "with_lifting",
    "inline_closure_likes",
    "make_function_op_code_to_jit_function",
    "inline_inlinables",
    "inline_overloads",
    "find_literally",
    "literal_unroll",
    "LiteralPropagation",
}
"""Names of passes for `with` blocks, closures and comprehensions, functions to inline, and literal arguments."""
OF_ARRAYS = {"nopython_rewrites", "ir_legalization"}
"""Those that join expressions of whole arrays, and that mark where a variable's reference ends: what must not allocate
arrays has none."""


class ShortCompiler(Compiler):  # type: ignore[misc]
    """numba's compiler with fewer passes."""

    def define_pipelines(self) -> Any:
        """See numba."""
        needless = NEEDLESS if self.state.flags.nrt else NEEDLESS | OF_ARRAYS
        pipelines = super().define_pipelines()
        for passes in pipelines:
            passes.passes = [(kind, what) for kind, what in passes.passes if kind.name() not in needless]
            passes.finalize()
        return pipelines

    def _compile_core(self) -> Any:
        before = types.Function.get_call_type  # functions that others compile in this process have numba's own
        types.Function.get_call_type = _call_type
        try:
            return super()._compile_core()
        finally:
            types.Function.get_call_type = before


_look_up = types.Function.get_call_type
_known: dict[tuple[Any, ...], Any] = {}


def _call_type(function: Any, context: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """numba's hook for the signature of a built-in function's call: of `a + b` it tries up to thirty templates."""
    call = (function, tuple(args), tuple(keywords.items()))
    if (known := _known.get(call)) is None:
        known = _known[call] = _look_up(function, context, args, keywords)
    return known
