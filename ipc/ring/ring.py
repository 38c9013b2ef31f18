"""A single-producer single-consumer ring of fixed slots in shared memory.

```
byte    0  magic | version | slots | stride | payload bytes | epoch | 0 | 0     written once by the creator
       64  unused
      128  reader position                                                      consumer: slots released
      192  sleeping: 1 while the consumer sleeps and waits for a doorbell       consumer sets, producer clears
      256  consumer state: OPEN, DRAINING, CLOSED, EVICTED                      consumer
      320  producer state: OPEN, CLOSED                                         producer
      384  joined: 1 once the consumer has opened its end                       consumer
      512  slot 0:  sequence (8) | header (56) | payload (a multiple of 64)
           slot 1 …
```
All words are little-endian int64. Positions count slots since the creation and never wrap; the slot of position p is
p mod slots. A slot's sequence is p + 1 once p is published in it, stored last with release; the consumer trusts nothing
else. Each side keeps its own position in private memory: a peer that writes to words of the other side harms only
itself, and a reader position out of bounds is a `ProtocolViolation`.

When full, `loan` raises `RingFull` and nothing is overwritten.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ipc.errors import Draining, InvalidArgument, IpcError, ProtocolViolation, RingFull
from ipc.native import atomics
from ipc.native.atomics import HEADER_BYTES, SLOT_HEADER_BYTES, ProducerEnd, RingHeader, WatchRow
from ipc.native.records import Array, address_of, array_from, new_array, offset_of

MAGIC = 0x31474E4952495254  # "TRIRING1"
VERSION = 1
_PAIR_BYTES = 12  # an id and a value

OPEN, DRAINING, CLOSED, EVICTED = range(4)

MAX_SLOTS = 1 << 20
MAX_PAYLOAD_BYTES = 1 << 24
MAX_EPOCH = (1 << 32) - 1


class RingLayout(msgspec.Struct, frozen=True):
    """Number of slots and payload bytes of each. Raises `InvalidArgument` out of bounds, also when decoded."""

    slots: int
    payload_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS:
            raise InvalidArgument(f"slots must be within 1..{MAX_SLOTS}, got {self.slots}")
        if not 0 <= self.payload_bytes <= MAX_PAYLOAD_BYTES:
            raise InvalidArgument(f"payload must be within 0..{MAX_PAYLOAD_BYTES} bytes, got {self.payload_bytes}")

    @property
    def stride(self) -> int:
        """Bytes from slot to slot."""
        return SLOT_HEADER_BYTES + -(-self.payload_bytes // 64) * 64

    @property
    def size(self) -> int:
        """Bytes of the whole ring."""
        return HEADER_BYTES + self.slots * self.stride


def format_ring(view: memoryview, layout: RingLayout, epoch: int) -> None:
    """Format zeroed memory (`layout.size` bytes) as an empty ring. Once, by the creator, before a peer attaches."""
    if not 0 <= epoch <= MAX_EPOCH:
        raise InvalidArgument(f"epoch must be within 0..{MAX_EPOCH}, got {epoch}")
    words = view[:64].cast("q")
    for i, word in enumerate((MAGIC, VERSION, layout.slots, layout.stride, layout.payload_bytes, epoch)):
        words[i] = word


class _End:
    """Base of both ends: the validated header, addresses, and arrays over the payload."""

    def __init__(self, view: memoryview, layout: RingLayout, epoch: int) -> None:
        if len(view) != layout.size:
            raise ProtocolViolation(f"a ring of this layout has {layout.size} bytes, the memory {len(view)}")
        expected = [MAGIC, VERSION, layout.slots, layout.stride, layout.payload_bytes, epoch, 0, 0]
        header = view[:64].cast("q").tolist()
        if header != expected:
            raise ProtocolViolation(f"foreign ring header: {header}, expected {expected}")
        self.layout = layout
        self.epoch = epoch
        self.view = view
        self._array: npt.NDArray[np.uint8] = np.frombuffer(view, np.uint8)  # keeps the mapping alive for the addresses
        self._address = int(self._array.ctypes.data)
        self._header = array_from(RingHeader, self._address)
        self._base = self._address + HEADER_BYTES
        self._stride = layout.stride
        self._slots = layout.slots
        self.header_offsets = [HEADER_BYTES + slot * layout.stride + 8 for slot in range(layout.slots)]
        """Offsets in `view` of each slot's 56 header bytes."""

    def _address_of(self, word: str) -> int:
        return self._address + offset_of(RingHeader, word)

    def payload(self, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
        """Return all payloads as one array [slots, count] of `dtype`, from byte `offset` of each payload on."""
        kind = np.dtype(dtype)
        if offset < 0 or count < 0 or offset + count * kind.itemsize > self.layout.payload_bytes:
            raise InvalidArgument(
                f"{count} of {kind} at byte {offset} do not fit into {self.layout.payload_bytes} payload bytes"
            )
        start = HEADER_BYTES + SLOT_HEADER_BYTES + offset
        array: npt.NDArray[Any] = np.ndarray(
            (self._slots, count), kind, self.view, start, (self._stride, kind.itemsize)
        )
        return array

    @property
    def consumer_state(self) -> int:
        """The consumer's state: OPEN, DRAINING, CLOSED or EVICTED. Raises `ProtocolViolation` for any other value."""
        return self._state("consumer_state", EVICTED)

    @property
    def producer_state(self) -> int:
        """The producer's state: OPEN or CLOSED. Raises `ProtocolViolation` for any other value."""
        return self._state("producer_state", CLOSED)

    def _state(self, word: str, largest: int) -> int:
        state = atomics.load_acquire(self._address_of(word))
        if not OPEN <= state <= largest:
            raise ProtocolViolation(f"ring state {state} is not within {OPEN}..{largest}")
        return state


class RingProducer(_End):
    """Writing end of a ring: `loan` a slot, fill header and payload in place, `send` it.

    One thread of one process. Raises `ProtocolViolation` if the memory is not an empty ring of this layout and epoch.
    """

    def __init__(self, view: memoryview, layout: RingLayout, epoch: int) -> None:
        super().__init__(view, layout, epoch)
        self.end = ProducerEnd(slot=self._base, stride=self._stride, slots=self._slots, ring=self._header, bell=-1)
        """For compiled functions."""
        end = address_of(self.end)
        self._reader_address = self._address_of("reader")
        # Bound once: attribute lookups would cost more than the calls.
        self._publish = partial(atomics.publish, end)
        self.room: Callable[[], int] = partial(atomics.room, end)
        """room(): lower bound of free slots, by the last read reader position. Cheap; `free` reads it again."""
        self.send_row: Callable[..., int] = partial(atomics.send_row, end)
        """send_row(row, a, b, c, d, e, f): fill the next slot, the first 48 header bytes with six integers and the
        payload with a C-contiguous float32 array, and send it. 1: see `send`; below 0: see `send_error`."""

    def ring_with(self, eventfd: int) -> None:
        """Ring the consumer with this eventfd from now on; -1: the caller rings its doorbell."""
        self.end.bell = eventfd

    @property
    def position(self) -> int:
        """Number of slots sent so far."""
        return self.end.position

    @property
    def rung(self) -> int:
        """Number of times that the consumer was woken."""
        return self.end.rung

    def free(self) -> int:
        """Return the number of slots that can be loaned now."""
        # SYNC POINT: reader position. The acquire pairs with the release in `RingConsumer.release`: a slot must
        # not be overwritten before the consumer has read it.
        reader = atomics.load_acquire(self._reader_address)
        if not self.end.reader <= reader <= self.position:
            raise self.send_error(atomics.IMPOSSIBLE_READER)
        self.end.reader = reader
        return self.room()

    def loan(self) -> int:
        """Return the slot to fill next. Raises `RingFull`. Repeated calls without `send` return the same slot."""
        if self.room() <= 0 and self.free() <= 0:
            raise self.send_error(atomics.FULL)
        return self.position % self._slots

    def send(self, count: int = 1) -> bool:
        """Publish the loaned slot (or `count` slots from it on, within `free()`), and wake the consumer if it sleeps.

        True: the caller must ring its doorbell, see `ring_with`.
        """
        return self._publish(count) != 0

    def send_error(self, code: int) -> IpcError:
        """Return the error for a negative result of `send_row`. Nothing was sent."""
        match code:
            case atomics.FULL:
                return RingFull(f"all {self._slots} slots of the ring are taken")
            case atomics.NOT_OPEN:
                return Draining(f"the consumer's state is {self.consumer_state}")
            case atomics.TOO_LARGE:
                return InvalidArgument(f"more than the {self.layout.payload_bytes} bytes of a payload")
            case _:
                reader = self._header[0].reader
                return ProtocolViolation(f"reader position {reader} is not within {self.end.reader}..{self.position}")

    def close(self) -> None:
        """Set the producer's state to CLOSED. (Ring the consumer to make it read the state.)"""
        atomics.store_release(self._address_of("producer_state"), CLOSED)

    @property
    def joined(self) -> bool:
        """Whether the consumer has opened its end."""
        return self._header[0].joined != 0


class RingConsumer(_End):
    """Reading end of a ring: read the headers and payloads of `ready` slots in place, then `release` them.

    One thread of one process. `ready` never counts beyond the end of the slot array, so ready slots are always the
    contiguous run `first, first + 1, …`.
    """

    def __init__(self, view: memoryview, layout: RingLayout, epoch: int) -> None:
        super().__init__(view, layout, epoch)
        self._row = WatchRow()  # replaced by a row of a `Watch`
        self.watch_in(self._row)
        self._ready = partial(atomics.ready, self._base, self._stride, self._slots)
        self.take_pairs: Callable[[int, npt.NDArray[np.int64], npt.NDArray[np.float32]], None] = partial(
            atomics.take_pairs, self._base, self._stride, layout.payload_bytes // _PAIR_BYTES
        )
        """take_pairs(slot, ids, values): copy results out of a ready slot into C-contiguous arrays of equal length, at
        most a slot's capacity."""
        self._publish_position = partial(atomics.store_release, self._address_of("reader"))

    def watch_in(self, row: WatchRow) -> None:
        """Keep this ring's position in a row of a `Watch` from now on."""
        row.slot, row.stride, row.slots, row.ring = self._base, self._stride, self._slots, self._header
        row.position = self.position
        self._row = row

    @property
    def position(self) -> int:
        """Number of slots released so far."""
        return self._row.position

    @property
    def first(self) -> int:
        """Slot of the first unread position."""
        return self.position % self._slots

    def resume(self) -> None:
        """Show this ring's messages to the `Watch` again; the exchange hides them without room for results."""
        self._row.slots = self._slots

    def ready(self, limit: int) -> int:
        """Return how many published slots, at most `limit`, can be read from `first` on."""
        return self._ready(self.position, limit)

    def release(self, count: int) -> None:
        """Release the first `count` ready slots to the producer; their views must not be read any more."""
        self._row.position = position = self.position + count
        # SYNC POINT: reader position, see `RingProducer.free`.
        self._publish_position(position)

    def set_state(self, state: int) -> None:
        """Set the consumer's state: OPEN, DRAINING, CLOSED or EVICTED. (The producer reads it when rung.)"""
        atomics.store_release(self._address_of("consumer_state"), state)

    def join(self) -> None:
        """Report to the producer that this end is open."""
        atomics.store_release(self._address_of("joined"), 1)


class Watch:
    """Poll set of all rings that a process consumes. It replaces any earlier `Watch` over the same rings.

    A ring is identified by its index in `rings`; None leaves an index unused. `table`: for compiled functions.
    """

    def __init__(self, rings: Sequence[RingConsumer | None]) -> None:
        self._rings = list(rings)  # keeps the memory at the addresses mapped
        self._rows = len(self._rings)
        self.table: Array[WatchRow] = new_array(WatchRow, max(self._rows, 1))
        self._address = address_of(self.table)
        for i, ring in enumerate(self._rings):
            if ring is not None:
                ring.watch_in(self.table[i])
        self.spin: Callable[[int], int] = partial(atomics.spin, self._address, self._rows)
        """spin(ns): poll for up to `ns` without the GIL, yielding the core. Returns the ns until a message, or -1."""

    def arm(self) -> bool:
        """Request doorbells from the producers. False: a message is already there, do not sleep."""
        return bool(atomics.arm(self._address, self._rows))

    def sleep(self, descriptor: int, timeout_ns: int) -> bool:
        """Arm, sleep until `descriptor` is readable, disarm. Return whether a message is there. Without the GIL."""
        return bool(atomics.sleep(self._address, self._rows, descriptor, -(-timeout_ns // 1_000_000)))

    def disarm(self) -> None:
        """Cancel the doorbell requests."""
        atomics.disarm(self._address, self._rows)
