"""Acquire loads, release stores and full fences on 64-bit words of shared memory, and the loops built of them.

Words are named by their address (int64), so that a call from Python costs about 0.1 µs: boxing an array would cost
more than the work. An address must stay mapped during the call: that is for `ring.py` and `exchange.py` to see to.

The loops read a *watch table*, int64 [rings, 5], one row per ring that a process consumes, in its private memory:
address of slot 0, stride in bytes, slots, position (slots consumed so far), address of the sleeping word.
A row whose `slots` is 0 is skipped.

What sends works on a *producer's end*, int64 [8], in private memory too: address of slot 0, stride in bytes, slots,
address of the ring, position (slots sent so far), the reader position that was seen last, the eventfd that wakes the
consumer (-1: only Python can wake it), and how often it was woken.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

from ipc.memory import intrinsics
from ipc.memory.compiled import entry_point

F = TypeVar("F", bound=Callable[..., Any])

WATCH_COLUMNS = 5
WATCH_BASE, WATCH_STRIDE, WATCH_SLOTS, WATCH_POSITION, WATCH_SLEEPING = range(WATCH_COLUMNS)
_ROW_BYTES = 8 * WATCH_COLUMNS

WRITER, READER, SLEEPING, CONSUMER_STATE = 64, 128, 192, 256
"""Where a ring has these words, from its first byte on: see `ring.py`."""

END_COLUMNS = 8
END_BASE, END_STRIDE, END_SLOTS, END_WORDS, END_POSITION, END_READER, END_BELL, END_RUNG = range(END_COLUMNS)
FULL, NOT_OPEN, TOO_LARGE, IMPOSSIBLE_READER = -1, -2, -3, -4
_LOOKS_PER_YIELD = 32


def _helper(function: F) -> F:
    return cast(F, numba.njit(error_model="numpy", _nrt=False)(function))  # compiled into its callers


@entry_point("int64(int64)")
def load_acquire(address: int) -> int:
    """The word at `address`; what its writer stored before a release store of it is visible afterwards."""
    return intrinsics.load_acquire(address)


@entry_point("void(int64, int64)")
def store_release(address: int, value: int) -> None:
    """Store a word after everything this thread stored before."""
    intrinsics.store_release(address, value)


@entry_point("void()")
def fence() -> None:
    """A full fence: no load or store moves over it in either direction."""
    intrinsics.fence()


@_helper
def publish_slots(end: Any, count: int) -> int:
    """Make the next `count` slots visible, and ring a consumer that sleeps. 1: it must be rung, which Python alone can.

    The sleeping word is taken back here, so only one of many sends rings.
    """
    base, stride, slots, words, position = (
        end[END_BASE], end[END_STRIDE], end[END_SLOTS], end[END_WORDS], end[END_POSITION],
    )  # fmt: skip
    end[END_POSITION] = position + count
    for i in range(position, position + count):
        # SYNC POINT: slot sequence. The release pairs with the acquire in `ready` and `has_news`.
        intrinsics.store_release(base + (i % slots) * stride, i + 1)
    intrinsics.store_release(words + WRITER, position + count)
    # SYNC POINT: sleeping. Publish, fence, look at the flag; `arm` sets the flag, fences, looks at the slot. Without
    # both fences each side may miss the other and the consumer sleeps over a full slot.
    intrinsics.fence()
    if intrinsics.load_acquire(words + SLEEPING) == 0 or intrinsics.exchange(words + SLEEPING, 0) == 0:
        return 0
    end[END_RUNG] += 1
    if end[END_BELL] < 0:
        return 1
    intrinsics.write_word(end[END_BELL], 1)  # if the counter is full, it rings already
    return 0


@entry_point("int64(int64[::1])")
def room(end: Any) -> int:
    """At least so many slots are free, by the reader position that was seen last."""
    return int(end[END_SLOTS] - end[END_POSITION] + end[END_READER])


@entry_point("int64(int64[::1], int64)")
def publish(end: Any, count: int) -> int:
    """Make the next `count` slots, filled by the caller, visible in order. 1: see `publish_slots`."""
    return publish_slots(end, count)


@_helper
def send_error(end: Any, count: int, payload_bytes: int) -> int:
    """Why `count` slots with so large payloads cannot be sent now, or 0."""
    if 64 + payload_bytes > end[END_STRIDE]:
        return TOO_LARGE
    if intrinsics.load_acquire(end[END_WORDS] + CONSUMER_STATE) != 0:
        return NOT_OPEN
    if end[END_POSITION] + count - end[END_READER] <= end[END_SLOTS]:
        return 0
    # SYNC POINT: reader position, see `RingProducer.free`.
    reader = intrinsics.load_acquire(end[END_WORDS] + READER)
    if reader < end[END_READER] or reader > end[END_POSITION]:
        return IMPOSSIBLE_READER
    end[END_READER] = reader
    return 0 if end[END_POSITION] + count - reader <= end[END_SLOTS] else FULL


@_helper
def _fill(slot: int, a: int, b: int, c: int, d: int, e: int, f: int, source: int, count: int) -> None:
    for i, word in enumerate((a, b, c, d, e, f)):
        intrinsics.store(slot + 8 + 8 * i, word)
    intrinsics.copy(slot + 64, source, count)


@entry_point(f"int64(int64[::1], float32[::1], {'int64, ' * 5}int64)")
def send_row(end: Any, row: Any, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """Fill the next slot with the header words a … f and the payload `row`, and `publish` it; or a refusal below 0."""
    error = send_error(end, 1, 4 * row.size)
    if error < 0:
        return error
    base, stride, slots, position = end[END_BASE], end[END_STRIDE], end[END_SLOTS], end[END_POSITION]
    _fill(base + (position % slots) * stride, a, b, c, d, e, f, row.ctypes.data, 4 * row.size)
    return publish_slots(end, 1)


@entry_point(f"int64(int64[::1], float32[:, ::1], {'int64, ' * 5}int64)")
def send_rows(end: Any, rows: Any, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """`send_row` for each of `rows`, published together. Word a rises by one from slot to slot."""
    count, row_bytes = rows.shape[0], 4 * rows.shape[1]
    error = send_error(end, count, row_bytes)
    if error < 0:
        return error
    base, stride, slots, position = end[END_BASE], end[END_STRIDE], end[END_SLOTS], end[END_POSITION]
    for i in range(count):
        slot = base + ((position + i) % slots) * stride
        _fill(slot, a + i, b, c, d, e, f, rows.ctypes.data + i * row_bytes, row_bytes)
    return publish_slots(end, count)


@entry_point("void(int64, int64, int64, int64, int64[::1], float32[::1])")
def take_pairs(base: int, stride: int, most: int, slot: int, ids: Any, values: Any) -> None:
    """Copy the ids and, from byte 8·most of its payload on, the values out of `slot`.

    As many as `ids` and `values`, of one length up to `most`, have room for.
    """
    payload = base + slot * stride + 64
    intrinsics.copy(ids.ctypes.data, payload, 8 * len(ids))
    intrinsics.copy(values.ctypes.data, payload + 8 * most, 4 * len(ids))


@entry_point("int64(int64, int64, int64, int64, int64)")
def ready(base: int, stride: int, slots: int, position: int, limit: int) -> int:
    """How many slots from `position` on are published: at most `limit`, and none beyond the end of the slot array."""
    limit = min(limit, slots - position % slots)
    address = base + (position % slots) * stride
    count = 0
    # SYNC POINT: slot sequence, see `publish`.
    while count < limit and intrinsics.load_acquire(address + count * stride) == position + count + 1:
        count += 1
    return count


@_helper
def has_message(row: int) -> bool:
    slots = intrinsics.load_acquire(row + 16)
    if slots == 0:
        return False
    position = intrinsics.load_acquire(row + 24)
    slot = intrinsics.load_acquire(row) + (position % slots) * intrinsics.load_acquire(row + 8)
    # SYNC POINT: slot sequence, see `publish`.
    return intrinsics.load_acquire(slot) == position + 1


@_helper
def _first_ready(table: int, rows: int, start: int) -> int:
    for i in range(rows):
        row = (start + i) % rows
        if has_message(table + row * _ROW_BYTES):
            return row
    return -1


@entry_point("int64(int64, int64, int64)")
def poll(table: int, rows: int, start: int) -> int:
    """The first watched ring with news, from row `start` on and around, or -1."""
    return _first_ready(table, rows, start)


@entry_point("int64(int64, int64, int64)", nogil=True)
def spin(table: int, rows: int, spin_ns: int) -> int:
    """Look at all watched rings for up to `spin_ns`. Returns the ns until there was news, or -1.

    The core is yielded every few looks: without that the ZeroMQ threads of both processes starve where cores are few.
    (Yielding every 10 µs only was tried: where producer and consumer share a core, round trips took 4 times as long.)
    """
    start = intrinsics.monotonic_ns()
    while True:
        for _ in range(_LOOKS_PER_YIELD):
            for row in range(rows):
                if has_message(table + row * _ROW_BYTES):
                    return intrinsics.monotonic_ns() - start
        if intrinsics.monotonic_ns() - start >= spin_ns:
            return -1
        intrinsics.sched_yield()


@_helper
def _arm(table: int, rows: int) -> int:
    for row in range(rows):
        if intrinsics.load_acquire(table + row * _ROW_BYTES + 16) != 0:
            intrinsics.store_release(intrinsics.load_acquire(table + row * _ROW_BYTES + 32), 1)
    # SYNC POINT: sleeping, see `publish`.
    intrinsics.fence()
    return _first_ready(table, rows, 0)


@_helper
def _disarm(table: int, rows: int) -> None:
    for row in range(rows):
        if intrinsics.load_acquire(table + row * _ROW_BYTES + 16) != 0:
            intrinsics.store_release(intrinsics.load_acquire(table + row * _ROW_BYTES + 32), 0)


@entry_point("int64(int64, int64)")
def arm(table: int, rows: int) -> int:
    """Announce sleep on all watched rings, then look once more: a row with news, or -1 when sleep is safe."""
    return _arm(table, rows)


@entry_point("void(int64, int64)")
def disarm(table: int, rows: int) -> None:
    """Awake again: no need to ring."""
    _disarm(table, rows)


@_helper
def sleep_on(table: int, rows: int, descriptor: int, timeout_ms: int) -> int:
    """Sleep until a watched ring has news, or `descriptor`, which its producer makes readable, or the time is over.

    The first ring with news, or -1; also after a signal, so that Python can look at it.
    """
    if _arm(table, rows) < 0:
        intrinsics.wait_readable(descriptor, timeout_ms)
    _disarm(table, rows)
    return _first_ready(table, rows, 0)


@entry_point("int64(int64, int64, int64, int64)", nogil=True)
def sleep(table: int, rows: int, descriptor: int, timeout_ms: int) -> int:
    """See `sleep_on`. One call, so that whoever is woken has no Python between the doorbell and the news."""
    return sleep_on(table, rows, descriptor, timeout_ms)
