"""Functions of compiled code alone: linked into what calls them, and optimised and translated only there.

numba optimises each function, with all that it calls, and translates it to machine code; and then its caller, with all
that it calls. Code between two levels of calls is so translated once per level, though Python calls only the top one:

    numba     a ─▶ machine code;   b(a) ─▶ machine code;   c(b(a)) ─▶ machine code
    here      a ─▶ IR;             b(a) ─▶ IR;             c(b(a)) ─▶ machine code
"""

from typing import Any, Self

import llvmlite.binding as llvm
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import compile_result
from numba.core.runtime import rtsys

from ipc.native.passes import ShortCompiler

_Files: Any = FunctionCache._impl_class
_LINKED = "linked"
_KEPT = ("fndesc", "environment", "signature", "objectmode", "lifted", "reload_init")


class LinkedLibrary(JITCodeLibrary):  # type: ignore[misc]
    """The IR of a function and of all that it calls."""

    @classmethod
    def from_bitcode(cls, codegen: Any, name: str, bitcode: bytes) -> Self:
        library = cls(codegen, name)
        library._final_module = llvm.parse_bitcode(bitcode)
        library._finalized = True
        return library

    def as_bitcode(self) -> bytes:
        self._ensure_finalized()
        return bytes(self._final_module.as_bitcode())

    def add_linking_library(self, library: Any) -> None:
        """See numba. Its own functions are linked into the caller anyway."""
        if library is not rtsys.library:
            super().add_linking_library(library)

    def _optimize_final_module(self) -> None:
        """In the caller."""

    def _finalize_final_module(self) -> None:
        """See numba. Nothing of it is executed."""
        self._finalize_dynamic_globals()
        self._finalized = True


class LinkedCompiler(ShortCompiler):
    """Compiles a function into a `LinkedLibrary`."""

    def __init__(self, typing: Any, target: Any, library: Any, arguments: Any, returns: Any, flags: Any, *rest: Any):
        flags.no_compile = True
        library = library or LinkedLibrary(target.codegen(), "linked")
        super().__init__(typing, target, library, arguments, returns, flags, *rest)

    def compile_extra(self, function: Any) -> Any:
        """See numba. The entry point is what finds the function, as an address would be."""
        result = super().compile_extra(function)._replace(entry_point=object())
        result.target_context.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return result


class Files(_Files):  # type: ignore[misc]
    """numba's interface of a cache's content, how a compiled function is written and read, for linked ones too."""

    def reduce(self, result: Any) -> Any:
        if not isinstance(result.library, LinkedLibrary):
            return super().reduce(result)
        result.fndesc.typemap = result.fndesc.calltypes = None  # large, and of the compilation alone
        kept = {name: getattr(result, name) for name in _KEPT}
        return _LINKED, result.library.name, result.library.as_bitcode(), kept

    def rebuild(self, context: Any, written: Any) -> Any:
        if written[0] != _LINKED:
            return super().rebuild(context, written)
        _, name, bitcode, kept = written
        for reload in kept["reload_init"]:
            reload()
        return compile_result(
            typing_context=context.typing_context,
            target_context=context,
            library=LinkedLibrary.from_bitcode(context.codegen(), name, bitcode),
            entry_point=object(),
            **kept,
        )
