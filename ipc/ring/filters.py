"""Filters beside a session's rings: a client writes each into a place once, and its requests name the place.

```
place       q generation | q bytes of the filter | the filter: PLACE_BYTES - 16 bytes at most
```
The places follow the result ring in the session's memory. A place is written anew only when the pool has read every
request that named it, and has another generation then; so the pool looks at a filter once, and knows it by place and
generation from then on. What a hostile client scribbles there can confuse its own queries only.
"""

import numpy as np

from ipc.errors import InvalidArgument, ProtocolViolation, RingFull
from ipc.memory import atomics

PLACES = 32
PLACE_BYTES = 1 << 14
MAX_FILTER_BYTES = PLACE_BYTES - 16
FILTERS_BYTES = PLACES * PLACE_BYTES


class FilterWriter:
    """A client's side. `view` is the memory of all places."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._array = np.frombuffer(view, np.uint8)  # keeps the mapping alive for the address
        self._address = int(self._array.ctypes.data)
        self._generation = 0
        self._places: dict[bytes, int] = {}  # numbers from 1 on, those used longest ago first
        self._used: dict[int, int] = {}  # the position in the ring of the last request that named each

    def place(self, wanted: bytes, position: int, read: int) -> int:
        """The place of a filter that requests before `position` name; the pool has read the requests before `read`.

        Raises `InvalidArgument` for one that is too long, `RingFull` if every place is named by what was not read yet.
        """
        number = self._places.pop(wanted, 0) or self._write(wanted, read)
        self._places[wanted] = number
        self._used[number] = position
        return number

    def _write(self, wanted: bytes, read: int) -> int:
        if len(wanted) > MAX_FILTER_BYTES:
            raise InvalidArgument(f"the filter has {len(wanted)} bytes; the limit is {MAX_FILTER_BYTES}")
        number = len(self._places) + 1
        if number > PLACES:
            oldest = next((known for known, at in self._places.items() if self._used[at] <= read), None)
            if oldest is None:
                raise RingFull(f"{PLACES} other filters are on their way to the pool")
            number = self._places.pop(oldest)
        start = (number - 1) * PLACE_BYTES
        self._generation += 1
        self.view[start + 8 : start + 16] = len(wanted).to_bytes(8, "little")
        self.view[start + 16 : start + 16 + len(wanted)] = wanted
        # SYNC POINT: a filter's generation; the pool reads it before the bytes, which are there by then.
        atomics.store_release(self._address + start, self._generation)
        return number


def read_filter(view: memoryview, number: int) -> bytes:
    """What stands in a place, from 1 on: a copy, of bounded length. Raises `ProtocolViolation`."""
    start = (number - 1) * PLACE_BYTES
    size = int.from_bytes(view[start + 8 : start + 16], "little", signed=True)
    if not 0 <= size <= MAX_FILTER_BYTES:
        raise ProtocolViolation(f"a filter of {size} bytes; the limit is {MAX_FILTER_BYTES}")
    return bytes(view[start + 16 : start + 16 + size])
