"""Acquire loads, release stores and full fences on 64-bit words of shared memory, and ring operations built on them.

Words are passed by address (int64): a call from Python costs about 0.1 µs, and boxing an array would cost more than the
work. An address must stay mapped during the call, which `ring.py` and `exchange.py` ensure.

Polling reads a *watch table*, int64 [rings, 5], one row per ring that a process consumes, in its private memory:
address of slot 0, stride in bytes, slots, position (slots consumed so far), address of the sleeping word.
A row whose `slots` is 0 is skipped.

Sending uses a *producer's end*, int64 [8], also in private memory: address of slot 0, stride in bytes, slots, address
of the ring, position (slots sent so far), the reader position read last, the eventfd that wakes the consumer (-1: it
can be woken from Python only), and how often it was woken.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from ipc.memory import intrinsics
from ipc.memory.compiled import compiled, entry_point

F = TypeVar("F", bound=Callable[..., Any])

WATCH_COLUMNS = 5
WATCH_BASE, WATCH_STRIDE, WATCH_SLOTS, WATCH_POSITION, WATCH_SLEEPING = range(WATCH_COLUMNS)
_ROW_BYTES = 8 * WATCH_COLUMNS

READER, SLEEPING, CONSUMER_STATE = 128, 192, 256
"""Byte offsets of these words in a ring, see `ring.py`."""

END_COLUMNS = 8
END_BASE, END_STRIDE, END_SLOTS, END_WORDS, END_POSITION, END_READER, END_BELL, END_RUNG = range(END_COLUMNS)
FULL, NOT_OPEN, TOO_LARGE, IMPOSSIBLE_READER = -1, -2, -3, -4
_POLLS_PER_YIELD = 32


def _helper(function: F) -> F:
    return cast(F, compiled(function))  # inlined into its callers


@entry_point("int64(int64)")
def load_acquire(address: int) -> int:
    """Load a word with acquire semantics: the writer's stores before its release store are visible afterwards."""
    return intrinsics.load_acquire(address)


@entry_point("void(int64, int64)")
def store_release(address: int, value: int) -> None:
    """Store a word with release semantics: after all earlier stores of this thread."""
    intrinsics.store_release(address, value)


@entry_point("void()")
def fence() -> None:
    """Full memory fence."""
    intrinsics.fence()


@_helper
def publish_slots(end: Any, count: int) -> int:
    """Publish the next `count` slots, and ring a sleeping consumer. Return 1 if the caller must ring it from Python.

    The sleeping word is cleared here, so only one of many sends rings.
    """
    base, stride, slots, words, position = (
        end[END_BASE], end[END_STRIDE], end[END_SLOTS], end[END_WORDS], end[END_POSITION],
    )  # fmt: skip
    end[END_POSITION] = position + count
    for i in range(position, position + count):
        # SYNC POINT: slot sequence. The release pairs with the acquire in `ready` and `has_message`.
        intrinsics.store_release(base + (i % slots) * stride, i + 1)
    # SYNC POINT: sleeping. Publish, fence, read the flag; `arm` sets the flag, fences, reads the slot. Without both
    # fences each side may miss the other's store, and the consumer would sleep with a published slot.
    intrinsics.fence()
    if intrinsics.load_acquire(words + SLEEPING) == 0 or intrinsics.exchange(words + SLEEPING, 0) == 0:
        return 0
    end[END_RUNG] += 1
    if end[END_BELL] < 0:
        return 1
    intrinsics.write_word(end[END_BELL], 1)  # if the counter is full, the bell already rings
    return 0


@entry_point("int64(int64[::1])")
def room(end: Any) -> int:
    """Return a lower bound of free slots, by the reader position read last."""
    return int(end[END_SLOTS] - end[END_POSITION] + end[END_READER])


@entry_point("int64(int64[::1], int64)")
def publish(end: Any, count: int) -> int:
    """Publish the next `count` slots, filled by the caller. Return as `publish_slots`."""
    return publish_slots(end, count)


@_helper
def send_error(end: Any, count: int, payload_bytes: int) -> int:
    """Return why `count` slots with payloads of this size cannot be sent now, or 0."""
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
    """Fill the next slot with the header words a … f and the payload `row`, and publish it. Below 0: an error."""
    error = send_error(end, 1, 4 * row.size)
    if error < 0:
        return error
    base, stride, slots, position = end[END_BASE], end[END_STRIDE], end[END_SLOTS], end[END_POSITION]
    _fill(base + (position % slots) * stride, a, b, c, d, e, f, row.ctypes.data, 4 * row.size)
    return publish_slots(end, 1)


@entry_point(f"int64(int64[::1], float32[:, ::1], {'int64, ' * 5}int64)")
def send_rows(end: Any, rows: Any, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """Send each of `rows`, published together; word a rises by one from slot to slot. Return as `send_row`."""
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

    `ids` and `values` have equal lengths, up to `most`, and are filled.
    """
    payload = base + slot * stride + 64
    intrinsics.copy(ids.ctypes.data, payload, 8 * len(ids))
    intrinsics.copy(values.ctypes.data, payload + 8 * most, 4 * len(ids))


@entry_point("int64(int64, int64, int64, int64, int64)")
def ready(base: int, stride: int, slots: int, position: int, limit: int) -> int:
    """Return how many slots from `position` on are published: at most `limit`, up to the end of the slot array."""
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
    """Return the first watched ring with a message, from row `start` on and around, or -1."""
    return _first_ready(table, rows, start)


@entry_point("int64(int64, int64, int64)", nogil=True)
def spin(table: int, rows: int, spin_ns: int) -> int:
    """Poll all watched rings for up to `spin_ns`. Return the ns until a message, or -1.

    The core is yielded every few polls: otherwise the ZeroMQ threads of both processes starve on few cores. (Yielding
    every 10 µs was measured: with producer and consumer on one core, round trips took 4 times as long.)
    """
    start = intrinsics.monotonic_ns()
    while True:
        for _ in range(_POLLS_PER_YIELD):
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
    """Set the sleeping words of all watched rings, then poll. Return a row with a message, or -1: sleep is safe."""
    return _arm(table, rows)


@entry_point("void(int64, int64)")
def disarm(table: int, rows: int) -> None:
    """Clear the sleeping word of all watched rings."""
    _disarm(table, rows)


@_helper
def sleep_on(table: int, rows: int, descriptor: int, timeout_ms: int) -> int:
    """Sleep until `descriptor`, which producers make readable, is readable, or until the timeout.

    Return the first ring with a message, or -1; also after a signal, which Python then handles.
    """
    if _arm(table, rows) < 0:
        intrinsics.wait_readable(descriptor, timeout_ms)
    _disarm(table, rows)
    return _first_ready(table, rows, 0)


@entry_point("int64(int64, int64, int64, int64)", nogil=True)
def sleep(table: int, rows: int, descriptor: int, timeout_ms: int) -> int:
    """`sleep_on` as one call from Python: no Python runs between the doorbell and the poll."""
    return sleep_on(table, rows, descriptor, timeout_ms)
