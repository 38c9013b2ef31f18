"""numba intrinsics: words at an address, fences, the clock, libc's `write` and `poll`, and calls by address.

They are usable in compiled functions only, where each becomes one instruction or one call. Addresses and words are
int64. The atomic ones come from LLVM (`load atomic … acquire` and so on), so they are right on x86-64
and on aarch64. An address must stay mapped while it is used.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ipc.native.arrays import float32_at, float64_at, int64_at
from ipc.native.emitted import emits

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


def _pointer(builder: Any, address: Any, pointee: Any = _I64) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _libc(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Emit a call of a function of libc."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@emits(types.int64, types.int64)
def load_acquire(builder: Any, address: Any) -> Any:
    """Load a word with acquire semantics: the writer's stores before its release store are visible afterwards."""
    return builder.load_atomic(_pointer(builder, address), "acquire", 8, typ=_I64)


@emits(types.void, types.int64, types.int64)
def store_release(builder: Any, address: Any, value: Any) -> None:
    """Store a word with release semantics: after all earlier stores of this thread."""
    builder.store_atomic(value, _pointer(builder, address), "release", 8)


@emits(types.void, types.int64, types.int64, types.int64)
def copy(builder: Any, target: Any, source: Any, count: Any) -> None:
    """Copy `count` bytes from `source` to `target`."""
    byte = ir.IntType(8)
    cgutils.raw_memcpy(builder, _pointer(builder, target, byte), _pointer(builder, source, byte), count, 1)


@emits(types.int64, types.int64, types.int64)
def exchange(builder: Any, address: Any, value: Any) -> Any:
    """Atomically swap a word, sequentially consistent. Return its previous value."""
    return builder.atomic_rmw("xchg", _pointer(builder, address), value, "seq_cst")


@emits(types.void)
def fence(builder: Any) -> None:
    """Full memory fence."""
    builder.fence("seq_cst")


@emits(types.int32)
def sched_yield(builder: Any) -> Any:
    """Yield the core to another thread."""
    return _libc(builder, "sched_yield", _I32)


@emits(types.int64)
def monotonic_ns(builder: Any) -> Any:
    """Return `time.monotonic_ns()`."""
    pointer = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))  # struct timespec
    _libc(builder, "clock_gettime", _I32, ir.Constant(_I32, 1), pointer)  # 1: CLOCK_MONOTONIC
    seconds, nanoseconds = (builder.extract_value(builder.load(pointer), i) for i in range(2))
    return builder.add(builder.mul(seconds, ir.Constant(_I64, 1_000_000_000)), nanoseconds)


@emits(types.int64, types.int64, types.int64)
def write_word(builder: Any, descriptor: Any, value: Any) -> Any:
    """Write one word to a descriptor, such as an eventfd, by libc's `write`. Return 8, or -1."""
    pointer = cgutils.alloca_once(builder, _I64)
    builder.store(value, pointer)
    return _libc(builder, "write", _I64, builder.trunc(descriptor, _I32), pointer, ir.Constant(_I64, 8))


@emits(types.int64, types.int64)
def read_word(builder: Any, descriptor: Any) -> Any:
    """Read and discard one word by libc's `read`, which resets an eventfd. Return 8, or -1."""
    pointer = cgutils.alloca_once(builder, _I64)
    return _libc(builder, "read", _I64, builder.trunc(descriptor, _I32), pointer, ir.Constant(_I64, 8))


@emits(types.int64, types.int64, types.int64)
def wait_readable(builder: Any, descriptor: Any, timeout_ms: Any) -> Any:
    """Wait for a descriptor to become readable by libc's `poll`. Return 1, 0 after the timeout, -1 after a signal."""
    pointer = cgutils.alloca_once(builder, _I64)
    descriptor = builder.and_(descriptor, ir.Constant(_I64, 0xFFFFFFFF))
    builder.store(builder.or_(descriptor, ir.Constant(_I64, 1 << 32)), pointer)  # struct pollfd; 1: POLLIN
    ready = _libc(builder, "poll", _I32, pointer, ir.Constant(_I64, 1), builder.trunc(timeout_ms, _I32))
    return builder.sext(ready, _I64)


def _call(_typing: Any, _address: Any, _arguments: Any) -> Any:
    """Call the C function at an address with a tuple of int64. Return its int64."""
    count = len(_arguments)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = _pointer(builder, args[0], ir.FunctionType(_I64, [_I64] * count))
        return builder.call(function, [builder.extract_value(args[1], i) for i in range(count)])

    return types.int64(types.int64, types.UniTuple(types.int64, count)), generate


call = cast(Callable[[int, tuple[int, ...]], int], intrinsic(_call))


def _call_int(_typing: Any, _address: Any, _arguments: Any) -> Any:
    """Call the C function at an address, which returns an int, with a tuple of integers of its declared widths."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in _arguments]
        function = _pointer(builder, args[0], ir.FunctionType(_I32, kinds))
        values = [builder.extract_value(args[1], i) for i in range(len(kinds))]
        return builder.sext(builder.call(function, values), _I64)

    return types.int64(types.int64, _arguments), generate


call_int = cast(Callable[[int, tuple[Any, ...]], int], intrinsic(_call_int))

words, floats, floats32 = int64_at, float64_at, float32_at
"""Views of int64, float64 and float32: `words(address, shape)`."""
