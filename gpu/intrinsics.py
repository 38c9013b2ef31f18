"""numba intrinsics to drive a device from compiled code: calls by address, atomic loads and stores, the clock.

Only compiled functions can call them. Addresses are int64, words uint32 in an int64. The atomics are LLVM's, so they
are correct on x86-64 and on aarch64.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gpu.compiled import compiled
from ipc.native.arrays import int64_at

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_MONOTONIC = 1
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))


def _intrinsic(function: Any) -> Callable[..., int]:
    return cast(Callable[..., int], intrinsic(function))  # callers omit the typing context, the first argument


@_intrinsic
def call(_typing: Any, _address: Any, _arguments: Any) -> Any:
    """Call the C function at an address, which returns an int, with a tuple of integers of its declared widths."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in _arguments]
        function = builder.inttoptr(args[0], ir.FunctionType(_I32, kinds).as_pointer())
        values = [builder.extract_value(args[1], i) for i in range(len(kinds))]
        return builder.sext(builder.call(function, values), _I64)

    return types.int64(types.int64, _arguments), generate


@_intrinsic
def load_acquire(_typing: Any, _address: Any) -> Any:
    """Load a word with acquire semantics: stores before the writer's release store are visible afterwards."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = builder.load_atomic(builder.inttoptr(args[0], _I32.as_pointer()), "acquire", 4, typ=_I32)
        return builder.zext(word, _I64)

    return types.int64(types.int64), generate


@_intrinsic
def store_release(_typing: Any, _address: Any, _value: Any) -> Any:
    """Store a word with release semantics, after all earlier stores of this thread."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = builder.trunc(args[1], _I32)
        builder.store_atomic(word, builder.inttoptr(args[0], _I32.as_pointer()), "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


words_at = int64_at


@compiled
def monotonic_ns(scratch: int) -> Any:
    """Return `time.monotonic_ns()`; `scratch` is the address of two int64."""
    _clock_gettime(_MONOTONIC, scratch)
    time = words_at(scratch, 2)
    return time[0] * 1_000_000_000 + time[1]
