"""Filter slots of a session: a client writes each filter once, and its requests refer to the slot.

```
slot        q generation | q bytes of the filter | the filter: FILTER_SLOT_BYTES - 16 bytes at most
```
The filter slots follow the result ring in the session's memory. A slot is overwritten only after the pool has read
every request that refers to it, and gets another generation then. So the pool reads a filter once and caches it by slot
and generation. A client that corrupts its slots affects its own queries only.
"""

import numpy as np

from ipc.errors import InvalidArgument, ProtocolViolation, RingFull
from ipc.native import atomics

FILTER_SLOTS = 32
FILTER_SLOT_BYTES = 1 << 14
MAX_FILTER_BYTES = FILTER_SLOT_BYTES - 16
FILTERS_BYTES = FILTER_SLOTS * FILTER_SLOT_BYTES


class FilterWriter:
    """A client's end of the filter slots. `view` is the memory of all of them."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._array = np.frombuffer(view, np.uint8)  # keeps the mapping alive for the address
        self._address = int(self._array.ctypes.data)
        self._generation = 0
        self._slots: dict[bytes, int] = {}  # slot numbers, from 1 on; least recently used first
        self._used: dict[int, int] = {}  # by slot: the ring position after the last request that refers to it

    def slot_of(self, encoded: bytes, position: int, read: int) -> int:
        """Return the slot of a filter for requests before `position`, writing it if needed.

        `read`: the pool has read all requests before this position. Raises `InvalidArgument` for a filter that is too
        long, `RingFull` if unread requests refer to every slot.
        """
        number = self._slots.pop(encoded, 0) or self._write(encoded, read)
        self._slots[encoded] = number
        self._used[number] = position
        return number

    def _write(self, encoded: bytes, read: int) -> int:
        if len(encoded) > MAX_FILTER_BYTES:
            raise InvalidArgument(f"the filter has {len(encoded)} bytes; the limit is {MAX_FILTER_BYTES}")
        number = len(self._slots) + 1
        if number > FILTER_SLOTS:
            oldest = next((other for other, slot in self._slots.items() if self._used[slot] <= read), None)
            if oldest is None:
                raise RingFull(f"all {FILTER_SLOTS} filter slots are in use by requests that the pool has not read yet")
            number = self._slots.pop(oldest)
        start = (number - 1) * FILTER_SLOT_BYTES
        self._generation += 1
        self.view[start + 8 : start + 16] = len(encoded).to_bytes(8, "little")
        self.view[start + 16 : start + 16 + len(encoded)] = encoded
        # SYNC POINT: a filter's generation. The pool acquires it before it reads the bytes.
        atomics.store_release(self._address + start, self._generation)
        return number


def read_filter(view: memoryview, number: int) -> bytes:
    """Return a copy of the filter in a slot, numbered from 1 on. Raises `ProtocolViolation` for an invalid length."""
    start = (number - 1) * FILTER_SLOT_BYTES
    size = int.from_bytes(view[start + 8 : start + 16], "little", signed=True)
    if not 0 <= size <= MAX_FILTER_BYTES:
        raise ProtocolViolation(f"a filter of {size} bytes; the limit is {MAX_FILTER_BYTES}")
    return bytes(view[start + 16 : start + 16 + size])
