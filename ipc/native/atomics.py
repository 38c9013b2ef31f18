"""Acquire loads, release stores and full fences on 64-bit words of shared memory, and ring operations built on them.

Python passes addresses: a call costs about 0.1 µs, and boxing an array would cost more than the work. An address must
stay mapped during the call, which `ring.py` and `exchange.py` ensure.
"""

from typing import Annotated, Any

from ipc.native import intrinsics
from ipc.native.compiled import EntryPoints, compiled
from ipc.native.records import (
    Array,
    Record,
    Shared,
    address,
    array_at,
    offset_of,
    record,
    record_at,
    sizeof,
)

FULL, NOT_OPEN, TOO_LARGE, IMPOSSIBLE_READER = -1, -2, -3, -4
_POLLS_PER_YIELD = 32


@record
class RingHeader(Record):
    """The words in front of a ring's slots, see `ring.py`. Each side writes to cache lines of its own."""

    magic: int
    version: int
    slots: int
    stride: int
    payload_bytes: int
    epoch: int
    _unused: Annotated[Array[int], 10]
    reader: Shared  # slots that the consumer has released
    _consumer: Annotated[Array[int], 7]
    sleeping: Shared  # 1 while the consumer sleeps and waits for a doorbell
    _sleeper: Annotated[Array[int], 7]
    consumer_state: Shared
    _state: Annotated[Array[int], 7]
    producer_state: Shared
    _producer: Annotated[Array[int], 7]
    joined: Shared  # 1 once the consumer has opened its end
    _last: Annotated[Array[int], 15]


HEADER_BYTES = sizeof(RingHeader)
SLOT_HEADER_BYTES = 64


@record
class Slot(Record):
    """A slot's words before its payload."""

    sequence: Shared  # position + 1 once the slot is published
    header: Annotated[Array[int], 7]


@record
class WatchRow(Record):
    """A ring that a process consumes, in its private memory. Rows of one table are polled together."""

    slot: int  # address of slot 0
    stride: int  # bytes from slot to slot
    slots: Shared  # 0: the row is skipped
    position: Shared  # slots released so far
    ring: Array[RingHeader]


@record
class ProducerEnd(Record):
    """A ring that a process sends through, in its private memory."""

    slot: int  # address of slot 0
    stride: int
    slots: int
    position: int  # slots sent so far
    reader: int  # the reader position that was read last
    bell: int  # the eventfd that wakes the consumer; -1: it can be woken from Python only
    rung: int  # how often it was woken
    ring: Array[RingHeader]


entry_point = EntryPoints(globals())
_end_at, _slot_at, _rows_at = record_at(ProducerEnd), record_at(Slot), array_at(WatchRow)
_SLEEPING = offset_of(RingHeader, "sleeping")


@entry_point("int64(int64)")
def load_acquire(address: int) -> int:
    """Load a word with acquire semantics: the writer's stores before its release store are visible afterwards."""
    word: int = intrinsics.load_acquire(address)
    return word


@entry_point("void(int64, int64)")
def store_release(address: int, value: int) -> None:
    """Store a word with release semantics: after all earlier stores of this thread."""
    intrinsics.store_release(address, value)


@entry_point("void()")
def fence() -> None:
    """Full memory fence."""
    intrinsics.fence()


@compiled
def next_slot(end: ProducerEnd) -> int:
    """Return the address of the slot to fill next."""
    return end.slot + (end.position % end.slots) * end.stride


@compiled
def publish_slots(end: ProducerEnd, count: int) -> int:
    """Publish the next `count` slots, and ring a sleeping consumer. Return 1 if the caller must ring it from Python.

    The sleeping word is cleared here, so only one of many sends rings.
    """
    for _ in range(count):
        # SYNC POINT: slot sequence. The release pairs with the acquire in `ready` and `has_message`.
        _slot_at(next_slot(end)).sequence = end.position + 1
        end.position += 1
    # SYNC POINT: sleeping. Publish, fence, read the flag; `arm` sets the flag, fences, reads the slot. Without both
    # fences each side may miss the other's store, and the consumer would sleep with a published slot.
    intrinsics.fence()
    ring = end.ring[0]
    if ring.sleeping == 0 or intrinsics.exchange(address(ring) + _SLEEPING, 0) == 0:
        return 0
    end.rung += 1
    if end.bell < 0:
        return 1
    intrinsics.write_word(end.bell, 1)  # if the counter is full, the bell already rings
    return 0


@entry_point("int64(int64)")
def room(end: int) -> int:
    """Return a lower bound of free slots, by the reader position read last."""
    own = _end_at(end)
    return own.slots - own.position + own.reader


@entry_point("int64(int64, int64)")
def publish(end: int, count: int) -> int:
    """Publish the next `count` slots, filled by the caller. Return as `publish_slots`."""
    return publish_slots(_end_at(end), count)


@compiled
def send_error(end: ProducerEnd, payload_bytes: int) -> int:
    """Return why a slot with a payload of this size cannot be sent now, or 0."""
    if SLOT_HEADER_BYTES + payload_bytes > end.stride:
        return TOO_LARGE
    if end.ring[0].consumer_state != 0:
        return NOT_OPEN
    if end.position - end.reader < end.slots:
        return 0
    if not read_position(end):
        return IMPOSSIBLE_READER
    return 0 if end.position - end.reader < end.slots else FULL


@compiled
def read_position(end: ProducerEnd) -> bool:
    """Read the reader position. Return False if it is impossible: the consumer has corrupted the ring."""
    # SYNC POINT: reader position, see `RingProducer.free`.
    reader = end.ring[0].reader
    if reader < end.reader or reader > end.position:
        return False
    end.reader = reader
    return True


@compiled
def _fill(slot: int, a: int, b: int, c: int, d: int, e: int, f: int, source: int, count: int) -> None:
    header = _slot_at(slot).header
    header[0], header[1], header[2], header[3], header[4], header[5] = a, b, c, d, e, f
    intrinsics.copy(slot + SLOT_HEADER_BYTES, source, count)


@entry_point(f"int64(int64, float32[::1], {'int64, ' * 5}int64)")
def send_row(end: int, row: Any, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """Fill the next slot with the header words a … f and the payload `row`, and publish it. Below 0: an error."""
    own = _end_at(end)
    error = send_error(own, 4 * row.size)
    if error < 0:
        return error
    _fill(next_slot(own), a, b, c, d, e, f, row.ctypes.data, 4 * row.size)
    return publish_slots(own, 1)


@entry_point("void(int64, int64, int64, int64, int64[::1], float32[::1])")
def take_pairs(base: int, stride: int, most: int, slot: int, ids: Any, values: Any) -> None:
    """Copy the ids and, from byte 8·most of its payload on, the values out of `slot`.

    `ids` and `values` have equal lengths, up to `most`, and are filled.
    """
    payload = base + slot * stride + SLOT_HEADER_BYTES
    intrinsics.copy(ids.ctypes.data, payload, 8 * len(ids))
    intrinsics.copy(values.ctypes.data, payload + 8 * most, 4 * len(ids))


@entry_point("int64(int64, int64, int64, int64, int64)")
def ready(base: int, stride: int, slots: int, position: int, limit: int) -> int:
    """Return how many slots from `position` on are published: at most `limit`, up to the end of the slot array."""
    limit = min(limit, slots - position % slots)
    address = base + (position % slots) * stride
    count = 0
    # SYNC POINT: slot sequence, see `publish_slots`.
    while count < limit and intrinsics.load_acquire(address + count * stride) == position + count + 1:
        count += 1
    return count


@compiled
def has_message(row: WatchRow) -> bool:
    """Return whether a ring's next slot is published."""
    slots = row.slots
    if slots == 0:
        return False
    position = row.position
    # SYNC POINT: slot sequence, see `publish_slots`.
    return _slot_at(row.slot + (position % slots) * row.stride).sequence == position + 1


@compiled
def any_ready(table: Array[WatchRow], rows: int) -> bool:
    """Return whether any of the watched rings has a message."""
    for row in range(rows):  # noqa: SIM110
        if has_message(table[row]):
            return True
    return False


@entry_point("int64(int64, int64, int64)", nogil=True)
def spin(table: int, rows: int, spin_ns: int) -> int:
    """Poll all watched rings for up to `spin_ns`. Return the ns until a message, or -1.

    The core is yielded every few polls: otherwise the ZeroMQ threads of both processes starve on few cores. (Yielding
    every 10 µs was measured: with producer and consumer on one core, round trips took 4 times as long.)
    """
    watched = _rows_at(table)
    start: int = intrinsics.monotonic_ns()
    while True:
        for _ in range(_POLLS_PER_YIELD):
            if any_ready(watched, rows):
                return int(intrinsics.monotonic_ns()) - start
        if intrinsics.monotonic_ns() - start >= spin_ns:
            return -1
        intrinsics.sched_yield()


@compiled
def _arm(table: Array[WatchRow], rows: int) -> bool:
    _set_sleeping(table, rows, 1)
    # SYNC POINT: sleeping, see `publish_slots`.
    intrinsics.fence()
    return not any_ready(table, rows)


@compiled
def _set_sleeping(table: Array[WatchRow], rows: int, sleeping: int) -> None:
    for row in range(rows):
        if table[row].slots != 0:
            table[row].ring[0].sleeping = sleeping


@entry_point("int64(int64, int64)")
def arm(table: int, rows: int) -> int:
    """Set the sleeping words of all watched rings, then poll. Return 1 if there is no message: sleep is safe."""
    return _arm(_rows_at(table), rows)


@entry_point("void(int64, int64)")
def disarm(table: int, rows: int) -> None:
    """Clear the sleeping word of all watched rings."""
    _set_sleeping(_rows_at(table), rows, 0)


@compiled
def sleep_on(table: Array[WatchRow], rows: int, descriptor: int, timeout_ms: int) -> bool:
    """Sleep until `descriptor`, which producers make readable, is readable, or until the timeout.

    Return whether any ring has a message; also after a signal, which Python then handles.
    """
    if _arm(table, rows):
        intrinsics.wait_readable(descriptor, timeout_ms)
    _set_sleeping(table, rows, 0)
    return any_ready(table, rows)


@entry_point("int64(int64, int64, int64, int64)", nogil=True)
def sleep(table: int, rows: int, descriptor: int, timeout_ms: int) -> int:
    """`sleep_on` as one call from Python: no Python runs between the doorbell and the poll."""
    return sleep_on(_rows_at(table), rows, descriptor, timeout_ms)


entry_point.compile()
