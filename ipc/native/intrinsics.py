"""numba intrinsics: words at an address, fences, the clock, libc's `write` and `poll`, and calls by address.

They are usable in compiled functions only, where each becomes one instruction or one call. Addresses and words are
int64. The atomic ones come from LLVM (`load atomic … acquire` and so on), so they are right on x86-64
and on aarch64. An address must stay mapped while it is used.
"""

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ipc.native.arrays import float32_at, float64_at, int64_at

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


def _intrinsic(function: Any) -> Callable[..., int]:
    return cast(Callable[..., int], intrinsic(function))  # callers pass the arguments after the first


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@_intrinsic
def load_acquire(_typing: Any, _address: Any) -> Any:
    """Load a word with acquire semantics: the writer's stores before its release store are visible afterwards."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8, typ=_I64)

    return types.int64(types.int64), generate


@_intrinsic
def store_release(_typing: Any, _address: Any, _value: Any) -> Any:
    """Store a word with release semantics: after all earlier stores of this thread."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def copy(_typing: Any, _target: Any, _source: Any, _count: Any) -> Any:
    """Copy `count` bytes from `source` to `target`."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        numba.core.cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_intrinsic
def exchange(_typing: Any, _address: Any, _value: Any) -> Any:
    """Atomically swap a word, sequentially consistent. Return its previous value."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def fence(_typing: Any) -> Any:
    """Full memory fence."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def sched_yield(_typing: Any) -> Any:
    """Yield the core to another thread."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        function = numba.core.cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        return builder.call(function, [])

    return types.int32(), generate


@_intrinsic
def monotonic_ns(_typing: Any) -> Any:
    """Return `time.monotonic_ns()`."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        timespec = ir.ArrayType(_I64, 2)
        kind = ir.FunctionType(_I32, [_I32, timespec.as_pointer()])
        function = numba.core.cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        pointer = numba.core.cgutils.alloca_once(builder, timespec)
        builder.call(function, [ir.Constant(_I32, 1), pointer])  # 1: CLOCK_MONOTONIC
        seconds = builder.extract_value(builder.load(pointer), 0)
        nanoseconds = builder.extract_value(builder.load(pointer), 1)
        return builder.add(builder.mul(seconds, ir.Constant(_I64, 1_000_000_000)), nanoseconds)

    return types.int64(), generate


@_intrinsic
def write_word(_typing: Any, _descriptor: Any, _value: Any) -> Any:
    """Write one word to a descriptor, such as an eventfd, by libc's `write`. Return 8, or -1."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I32, _I64.as_pointer(), _I64])
        function = numba.core.cgutils.get_or_insert_function(builder.module, kind, "write")
        pointer = numba.core.cgutils.alloca_once(builder, _I64)
        builder.store(args[1], pointer)
        return builder.call(function, [builder.trunc(args[0], _I32), pointer, ir.Constant(_I64, 8)])

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def read_word(_typing: Any, _descriptor: Any) -> Any:
    """Read and discard one word by libc's `read`, which resets an eventfd. Return 8, or -1."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I32, _I64.as_pointer(), _I64])
        function = numba.core.cgutils.get_or_insert_function(builder.module, kind, "read")
        pointer = numba.core.cgutils.alloca_once(builder, _I64)
        return builder.call(function, [builder.trunc(args[0], _I32), pointer, ir.Constant(_I64, 8)])

    return types.int64(types.int64), generate


@_intrinsic
def wait_readable(_typing: Any, _descriptor: Any, _timeout_ms: Any) -> Any:
    """Wait for a descriptor to become readable by libc's `poll`. Return 1, 0 after the timeout, -1 after a signal."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I64.as_pointer(), _I64, _I32])
        function = numba.core.cgutils.get_or_insert_function(builder.module, kind, "poll")
        pointer = numba.core.cgutils.alloca_once(builder, _I64)
        descriptor = builder.and_(args[0], ir.Constant(_I64, 0xFFFFFFFF))
        builder.store(builder.or_(descriptor, ir.Constant(_I64, 1 << 32)), pointer)  # struct pollfd; 1: POLLIN
        ready = builder.call(function, [pointer, ir.Constant(_I64, 1), builder.trunc(args[1], _I32)])
        return builder.sext(ready, _I64)

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def call(_typing: Any, _address: Any, _arguments: Any) -> Any:
    """Call the C function at an address with a tuple of int64. Return its int64."""
    count = len(_arguments)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64] * count)
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(function, [builder.extract_value(args[1], i) for i in range(count)])

    return types.int64(types.int64, types.UniTuple(types.int64, count)), generate


# ---- 32-bit words, which a device shares, and functions that return an int


@_intrinsic
def load_acquire_u32(_typing: Any, _address: Any) -> Any:
    """As `load_acquire`, of a uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = builder.load_atomic(builder.inttoptr(args[0], _I32.as_pointer()), "acquire", 4, typ=_I32)
        return builder.zext(word, _I64)

    return types.int64(types.int64), generate


@_intrinsic
def store_release_u32(_typing: Any, _address: Any, _value: Any) -> Any:
    """As `store_release`, of a uint32."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = builder.trunc(args[1], _I32)
        builder.store_atomic(word, builder.inttoptr(args[0], _I32.as_pointer()), "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def call_int(_typing: Any, _address: Any, _arguments: Any) -> Any:
    """Call the C function at an address, which returns an int, with a tuple of integers of its declared widths."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in _arguments]
        function = builder.inttoptr(args[0], ir.FunctionType(_I32, kinds).as_pointer())
        values = [builder.extract_value(args[1], i) for i in range(len(kinds))]
        return builder.sext(builder.call(function, values), _I64)

    return types.int64(types.int64, _arguments), generate


words, floats, floats32 = int64_at, float64_at, float32_at
"""Views of int64, float64 and float32: `words(address, shape)`."""
