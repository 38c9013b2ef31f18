"""Acquire loads, release stores and full fences on 64-bit words of shared memory, and the loops built of them.

Words are named by their address (int64), so that a call from Python costs about 0.1 µs: boxing an array would cost
more than the work. The instructions come from LLVM (`load atomic … acquire` and so on), so they are right on x86-64 and
on aarch64. An address must stay mapped during the call: `ring.py` takes care of that, nobody else calls the loops.

Everything compiled lives in this one file because numba's on-disk cache is invalidated by a change of the file that
holds the function, not of the files that it uses.

The loops read a *watch table*, int64 [rings, 5], one row per ring that a process consumes, in its private memory:
address of slot 0, stride in bytes, slots, position (slots consumed so far), address of the sleeping word.
A row whose `slots` is 0 is skipped.

What sends works on a *producer's end*, int64 [6], in private memory too: address of slot 0, stride in bytes, slots,
address of the ring, position (slots sent so far), and the reader position that was seen last.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

WATCH_COLUMNS = 5
WATCH_BASE, WATCH_STRIDE, WATCH_SLOTS, WATCH_POSITION, WATCH_SLEEPING = range(WATCH_COLUMNS)
_ROW_BYTES = 8 * WATCH_COLUMNS

WRITER, READER, SLEEPING, CONSUMER_STATE = 64, 128, 192, 256
"""Where a ring has these words, from its first byte on: see `ring.py`."""

END_COLUMNS = 6
END_BASE, END_STRIDE, END_SLOTS, END_WORDS, END_POSITION, END_READER = range(END_COLUMNS)
FULL, NOT_OPEN, TOO_LARGE, IMPOSSIBLE_READER = -1, -2, -3, -4
_LOOKS_PER_YIELD = 32

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


def _intrinsic(function: F) -> F:
    return cast(F, intrinsic(function))


_dispatchers: list[Any] = []  # they own the machine code


def _compiled(signature: str, *, nogil: bool = False) -> Callable[[F], F]:
    """Compile (once per machine, cached on disk) and return the compiled function itself.

    Calling it without numba's dispatcher, which would look for an overload each time, takes 80 ns instead of 350.
    """

    def compile_(function: F) -> F:
        dispatcher = numba.njit(signature, cache=True, nogil=nogil)(function)
        _dispatchers.append(dispatcher)
        (overload,) = dispatcher.overloads.values()
        return cast(F, overload.entry_point)

    return compile_


def _helper(function: F) -> F:
    return cast(F, numba.njit(function))  # compiled into its callers


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@_intrinsic
def _load_acquire(_typing: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8, typ=_I64)

    return types.int64(types.int64), generate


@_intrinsic
def _store_release(_typing: Any, _address: Any, _value: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def _store(_typing: Any, _address: Any, _value: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def _copy(_typing: Any, _target: Any, _source: Any, _count: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        numba.core.cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_intrinsic
def _exchange(_typing: Any, _address: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def _fence(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def _sched_yield(_typing: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        function = numba.core.cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        return builder.call(function, [])

    return types.int32(), generate


@_intrinsic
def _monotonic_ns(_typing: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        timespec = ir.ArrayType(_I64, 2)
        kind = ir.FunctionType(_I32, [_I32, timespec.as_pointer()])
        function = numba.core.cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        place = numba.core.cgutils.alloca_once(builder, timespec)
        builder.call(function, [ir.Constant(_I32, 1), place])  # 1: CLOCK_MONOTONIC
        seconds = builder.extract_value(builder.load(place), 0)
        nanoseconds = builder.extract_value(builder.load(place), 1)
        return builder.add(builder.mul(seconds, ir.Constant(_I64, 1_000_000_000)), nanoseconds)

    return types.int64(), generate


@_compiled("int64(int64)")
def load_acquire(address: int) -> int:
    """The word at `address`; what its writer stored before a release store of it is visible afterwards."""
    return _load_acquire(address)  # type: ignore[call-arg,no-any-return]


@_compiled("void(int64, int64)")
def store_release(address: int, value: int) -> None:
    """Store a word after everything this thread stored before."""
    _store_release(address, value)  # type: ignore[call-arg]


@_compiled("int64(int64, int64)")
def exchange(address: int, value: int) -> int:
    """Swap a word in one step, sequentially consistent; returns what was there."""
    return _exchange(address, value)  # type: ignore[call-arg,no-any-return]


@_compiled("void()")
def fence() -> None:
    """A full fence: no load or store moves over it in either direction."""
    _fence()  # type: ignore[call-arg]


@_helper
def _publish(base: int, stride: int, slots: int, words: int, position: int, count: int) -> int:
    for i in range(position, position + count):
        # SYNC POINT: slot sequence. The release pairs with the acquire in `ready` and `_has_news`.
        _store_release(base + (i % slots) * stride, i + 1)  # type: ignore[call-arg]
    _store_release(words + WRITER, position + count)  # type: ignore[call-arg]
    # SYNC POINT: sleeping. Publish, fence, look at the flag; `arm` sets the flag, fences, looks at the slot. Without
    # both fences each side may miss the other and the consumer sleeps over a full slot.
    _fence()  # type: ignore[call-arg]
    if _load_acquire(words + SLEEPING) == 0:  # type: ignore[call-arg]
        return 0
    return _exchange(words + SLEEPING, 0)  # type: ignore[call-arg,no-any-return]


@_compiled("int64(int64[::1], int64)")
def publish(end: Any, count: int) -> int:
    """Make the next `count` slots, filled by the caller, visible in order. 1: the consumer sleeps and must be rung.

    The sleeping word is taken back here, so only one of many sends rings.
    """
    position = end[END_POSITION]
    end[END_POSITION] = position + count
    return _publish(end[END_BASE], end[END_STRIDE], end[END_SLOTS], end[END_WORDS], position, count)


@_helper
def _refusal(end: Any, count: int, payload_bytes: int) -> int:
    """Why `count` slots with so large payloads cannot be sent now, or 0."""
    if 64 + payload_bytes > end[END_STRIDE]:
        return TOO_LARGE
    if _load_acquire(end[END_WORDS] + CONSUMER_STATE) != 0:  # type: ignore[call-arg]
        return NOT_OPEN
    if end[END_POSITION] + count - end[END_READER] <= end[END_SLOTS]:
        return 0
    # SYNC POINT: reader position, see `RingProducer.free`.
    reader = _load_acquire(end[END_WORDS] + READER)  # type: ignore[call-arg]
    if reader < end[END_READER] or reader > end[END_POSITION]:
        return IMPOSSIBLE_READER
    end[END_READER] = reader
    return 0 if end[END_POSITION] + count - reader <= end[END_SLOTS] else FULL


@_helper
def _fill(slot: int, a: int, b: int, c: int, d: int, e: int, f: int, source: int, count: int) -> None:
    for i, word in enumerate((a, b, c, d, e, f)):
        _store(slot + 8 + 8 * i, word)  # type: ignore[call-arg]
    _copy(slot + 64, source, count)  # type: ignore[call-arg]


@_compiled(f"int64(int64[::1], float32[::1], {'int64, ' * 5}int64)")
def send_row(end: Any, row: Any, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """Fill the next slot with the header words a … f and the payload `row`, and `publish` it; or a refusal below 0."""
    refusal = _refusal(end, 1, 4 * row.size)
    if refusal < 0:
        return refusal
    base, stride, slots, position = end[END_BASE], end[END_STRIDE], end[END_SLOTS], end[END_POSITION]
    _fill(base + (position % slots) * stride, a, b, c, d, e, f, row.ctypes.data, 4 * row.size)
    end[END_POSITION] = position + 1
    return _publish(base, stride, slots, end[END_WORDS], position, 1)


@_compiled(f"int64(int64[::1], float32[:, ::1], {'int64, ' * 5}int64)")
def send_rows(end: Any, rows: Any, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """`send_row` for each of `rows`, published together. Word a rises by one from slot to slot."""
    count, row_bytes = rows.shape[0], 4 * rows.shape[1]
    refusal = _refusal(end, count, row_bytes)
    if refusal < 0:
        return refusal
    base, stride, slots, position = end[END_BASE], end[END_STRIDE], end[END_SLOTS], end[END_POSITION]
    for i in range(count):
        slot = base + ((position + i) % slots) * stride
        _fill(slot, a + i, b, c, d, e, f, rows.ctypes.data + i * row_bytes, row_bytes)
    end[END_POSITION] = position + count
    return _publish(base, stride, slots, end[END_WORDS], position, count)


@_compiled(f"int64(int64[::1], int64, int64[::1], float32[::1], {'int64, ' * 4}int64)")
def send_pairs(end: Any, most: int, ids: Any, values: Any, a: int, b: int, c: int, d: int, e: int) -> int:
    """As `send_row`, with two payloads: `ids` and, from byte 8·most on, `values`, of one length up to `most`.

    The low half of word c becomes that length, the sixth word the time.
    """
    count = len(ids)
    if count != len(values) or count > most:
        return TOO_LARGE
    refusal = _refusal(end, 1, 12 * most)
    if refusal < 0:
        return refusal
    base, stride, slots, position = end[END_BASE], end[END_STRIDE], end[END_SLOTS], end[END_POSITION]
    slot = base + (position % slots) * stride
    now = _monotonic_ns()  # type: ignore[call-arg]
    _fill(slot, a, b, c | count, d, e, now, ids.ctypes.data, 8 * count)
    _copy(slot + 64 + 8 * most, values.ctypes.data, 4 * count)  # type: ignore[call-arg]
    end[END_POSITION] = position + 1
    return _publish(base, stride, slots, end[END_WORDS], position, 1)


@_compiled("void(int64, int64, int64, int64, int64[::1], float32[::1])")
def take_pairs(base: int, stride: int, most: int, slot: int, ids: Any, values: Any) -> None:
    """Copy what `send_pairs` put into `slot` as far as `ids` and `values`, of one length up to `most`, have room."""
    payload = base + slot * stride + 64
    _copy(ids.ctypes.data, payload, 8 * len(ids))  # type: ignore[call-arg]
    _copy(values.ctypes.data, payload + 8 * most, 4 * len(ids))  # type: ignore[call-arg]


@_compiled("int64(int64, int64, int64, int64, int64)")
def ready(base: int, stride: int, slots: int, position: int, limit: int) -> int:
    """How many slots from `position` on are published: at most `limit`, and none beyond the end of the slot array."""
    limit = min(limit, slots - position % slots)
    address = base + (position % slots) * stride
    count = 0
    # SYNC POINT: slot sequence, see `publish`.
    while count < limit and _load_acquire(address + count * stride) == position + count + 1:  # type: ignore[call-arg]
        count += 1
    return count


@_helper
def _has_news(row: int) -> bool:
    slots = _load_acquire(row + 16)  # type: ignore[call-arg]
    if slots == 0:
        return False
    position = _load_acquire(row + 24)  # type: ignore[call-arg]
    slot = _load_acquire(row) + (position % slots) * _load_acquire(row + 8)  # type: ignore[call-arg]
    # SYNC POINT: slot sequence, see `publish`.
    return _load_acquire(slot) == position + 1  # type: ignore[call-arg,no-any-return]


@_compiled("int64(int64, int64, int64)")
def look(table: int, rows: int, start: int) -> int:
    """The first watched ring with news, from row `start` on and around, or -1."""
    for i in range(rows):
        row = (start + i) % rows
        if _has_news(table + row * _ROW_BYTES):
            return row
    return -1


@_compiled("int64(int64, int64, int64)", nogil=True)
def spin(table: int, rows: int, spin_ns: int) -> int:
    """Look at all watched rings for up to `spin_ns`. Returns the ns until there was news, or -1.

    The core is yielded every few looks: without that the ZeroMQ threads of both processes starve where cores are few.
    (Yielding every 10 µs only was tried: where producer and consumer share a core, round trips took 4 times as long.)
    """
    start = _monotonic_ns()  # type: ignore[call-arg]
    while True:
        for _ in range(_LOOKS_PER_YIELD):
            for row in range(rows):
                if _has_news(table + row * _ROW_BYTES):
                    return _monotonic_ns() - start  # type: ignore[call-arg,no-any-return]
        if _monotonic_ns() - start >= spin_ns:  # type: ignore[call-arg]
            return -1
        _sched_yield()  # type: ignore[call-arg]


@_compiled("int64(int64, int64)")
def arm(table: int, rows: int) -> int:
    """Announce sleep on all watched rings, then look once more: a row with news, or -1 when sleep is safe."""
    for row in range(rows):
        if _load_acquire(table + row * _ROW_BYTES + 16) != 0:  # type: ignore[call-arg]
            _store_release(_load_acquire(table + row * _ROW_BYTES + 32), 1)  # type: ignore[call-arg]
    # SYNC POINT: sleeping, see `publish`.
    _fence()  # type: ignore[call-arg]
    for row in range(rows):
        if _has_news(table + row * _ROW_BYTES):
            return row
    return -1


@_compiled("void(int64, int64)")
def disarm(table: int, rows: int) -> None:
    """Awake again: no need to ring."""
    for row in range(rows):
        if _load_acquire(table + row * _ROW_BYTES + 16) != 0:  # type: ignore[call-arg]
            _store_release(_load_acquire(table + row * _ROW_BYTES + 32), 0)  # type: ignore[call-arg]
