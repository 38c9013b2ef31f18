"""numba's passes without those for what our functions do not contain, which take a twentieth of a compilation."""

from typing import Any

from numba.core.compiler import Compiler

NEEDLESS = {
    "with_lifting",
    "inline_closure_likes",
    "make_function_op_code_to_jit_function",
    "inline_inlinables",
    "find_literally",
    "literal_unroll",
    "LiteralPropagation",
}
"""Names of passes for `with` blocks, closures and comprehensions, functions to inline, and literal arguments."""
OF_ARRAYS = {"nopython_rewrites"}
"""Those that join expressions of whole arrays: what must not allocate arrays has none."""


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
