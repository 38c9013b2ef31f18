"""What a pool keeps for its attached clients: a place for each, and the desk, of which each place has a row."""

import contextlib
import os
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ipc.errors import InvalidArgument
from ipc.memory import atomics
from ipc.memory.shared import SharedMemory
from ipc.ring import exchange
from ipc.ring.descriptors import MAX_U16
from ipc.ring.doorbell import EventfdBell
from ipc.ring.filters import PLACE_BYTES, PLACES, read_filter
from ipc.ring.ring import RingConsumer, RingLayout, RingProducer, Watch, format_ring
from ipc.server.reception import Reception
from ipc.session.messages import (
    VERSION,
    Attach,
    Attached,
    Catalogue,
    Grant,
    Served,
    filter_offset,
    result_offset,
    session_bytes,
)

# ---- on what a pool opens sessions. They change when its catalogue does; a session keeps those it was opened with


Number = Callable[[Served], int]
"""The pool's own number for a collection, for its compiled loop; below 0 for one that it has not."""


class Terms:
    """The catalogue and the limits of a session's requests, and the layouts of its request and result ring.

    ring_slots: of either ring. table: int64 [codes, 2], the number and the dimension of each collection. Raises
    `InvalidArgument`.
    """

    def __init__(
        self, catalogue: Catalogue, epoch: int, ring_slots: int, max_k: int, max_top_m: int, number: Number
    ) -> None:
        if not 1 <= max_k <= MAX_U16 or not 1 <= max_top_m <= MAX_U16:
            raise InvalidArgument(f"max_k {max_k} and max_top_m {max_top_m} must be within 1..{MAX_U16}")
        self.catalogue, self.max_k, self.max_top_m = catalogue, max_k, max_top_m
        self.epoch, self.max_dim = epoch, catalogue.max_dim
        self.layouts = (RingLayout(ring_slots, 4 * self.max_dim), RingLayout(ring_slots, 12 * max_k))
        rows = [(number(served), served.dim) for served in catalogue.served]
        self.table = np.array(rows, np.int64).reshape(-1, 2)


class ClientPlace:
    """One attached client: its rings, its doorbell, its pidfd, its row of the desk, and the session's `terms`."""

    def __init__(self, handle: int, attach: Attach, token: bytes, reception: Reception, terms: Terms) -> None:
        """Whole or not at all. Raises `OSError` if the client is gone, and what `Reception.ringer` raises."""
        self.handle, self.terms = handle, terms
        self.row = -1  # of the desk
        self.words = np.zeros(exchange.CLIENT_WORDS, np.int64).data  # of that row
        self.lease = 0  # of the pool's arena; 0: none
        self.granted_ns = time.monotonic_ns()
        self.joined = False  # whether the client was seen to have opened the rings
        self.renewed_ns = 0  # since when another session is to take this one's place; 0: none
        layouts, epoch = terms.layouts, terms.epoch
        with contextlib.ExitStack() as undo:
            self.pidfd = os.pidfd_open(attach.pid)
            undo.callback(os.close, self.pidfd)
            self.bell = reception.ringer(attach, token)
            undo.callback(self.bell.close)
            self.memory = SharedMemory.create("trinity-ring", session_bytes(*layouts))
            undo.callback(self.memory.close)
            view, split = self.memory.view, result_offset(layouts[0])
            requests, results = view[: layouts[0].size], view[split : split + layouts[1].size]
            format_ring(requests, layouts[0], epoch)
            format_ring(results, layouts[1], epoch)
            self.requests = RingConsumer(requests, layouts[0], epoch)
            self.results = RingProducer(results, layouts[1], epoch)
            self.vectors = self.requests.payload(np.float32, 0, terms.max_dim)
            self._filters = view[filter_offset(*layouts) :]
            first = int(np.frombuffer(self._filters, np.uint8).ctypes.data)
            self._known_filters = np.full((PLACES, exchange.KNOWN_WORDS), -1, np.int64)
            self._known_filters[:, exchange.GENERATION_AT] = first + PLACE_BYTES * np.arange(PLACES)
            if isinstance(self.bell, EventfdBell):
                self.results.ring_with(self.bell.fileno())
            reception.watch(self.pidfd)
            undo.pop_all()

    def welcome(self, token: bytes, bell: str, arena: Grant | None) -> Attached:
        """What tells the client about its place."""
        return Attached(
            version=VERSION,
            epoch=self.requests.epoch,
            pid=os.getpid(),
            client=self.handle,
            memory=self.memory.reference,
            requests=self.requests.layout,
            results=self.results.layout,
            catalogue=self.terms.catalogue,
            max_k=self.terms.max_k,
            max_top_m=self.terms.max_top_m,
            token=token,
            bell=bell,
            arena=arena,
        )

    def sit(self, row: int, words: npt.NDArray[np.int64]) -> None:
        """Have this row of a desk: its words say all that compiled code needs to know."""
        words[exchange.END] = self.results.end_address
        words[exchange.COLLECTIONS], words[exchange.CODES] = self.terms.table.ctypes.data, len(self.terms.table)
        words[exchange.FILTERS] = self._known_filters.ctypes.data
        words[exchange.HANDLE] = self.handle
        self.row, self.words = row, words.data

    def filter(self, number: int) -> tuple[int, bytes]:
        """The generation of a filter's place, from 1 on, and a copy of the filter. Raises `ProtocolViolation`."""
        # SYNC POINT: a filter's generation, see `FilterWriter`.
        generation = atomics.load_acquire(int(self._known_filters[number - 1, exchange.GENERATION_AT]))
        return generation, read_filter(self._filters, number)

    def know_filter(self, number: int, generation: int, code: int, known_as: int) -> None:
        """A filter of this generation, asked of the collection of this code, has a number of the pool's own."""
        known = self._known_filters[number - 1]
        known[exchange.KNOWN_GENERATION], known[exchange.KNOWN_NUMBER] = generation, known_as
        known[exchange.KNOWN_CODE] = code

    def forget_filter(self, known_as: int) -> None:
        """The pool has this number no more."""
        known = self._known_filters
        known[known[:, exchange.KNOWN_NUMBER] == known_as, exchange.KNOWN_CODE] = -1

    @property
    def outstanding(self) -> int:
        """Requests accepted and not yet answered."""
        return int(self.words[exchange.OUTSTANDING])

    def has_joined(self) -> bool:
        """Whether the client has opened the rings: one that gave up while it was being answered never does."""
        self.joined = self.joined or self.results.joined
        return self.joined

    def traffic(self) -> dict[str, int]:
        """Requests received and results published so far, and how often the client was rung."""
        return {
            "received": int(self.words[exchange.RECEIVED]),
            "published": self.results.position,
            "rung": self.results.rung,
        }

    def close(self) -> None:
        self.bell.close()
        os.close(self.pidfd)
        self.memory.close()


# ---- what the compiled exchange of requests and results works on


class Desk:
    """The tables of `exchange.py`, and the clients in their rows. `address` and `words` are the desk's.

    A client keeps its row as long as it is attached. A row that becomes vacant is given to nobody before
    `take_vacated` has told whoever keeps requests by their client's row.
    """

    def __init__(self, epoch: int, max_k: int, max_top_m: int, most: int) -> None:
        words = np.zeros(exchange.DESK_WORDS, np.int64)
        self._keep = words
        self._rows = np.zeros((most, exchange.CLIENT_WORDS), np.int64)
        self.address = int(words.ctypes.data)
        self.words = words.data
        self.words[exchange.EPOCH], self.words[exchange.MAX_K], self.words[exchange.MAX_TOP_M] = epoch, max_k, max_top_m
        self.words[exchange.CLIENTS] = int(self._rows.ctypes.data)
        self.places: list[ClientPlace | None] = [None] * most
        self._vacated: set[int] = set()
        self._look_at_all()

    def put(self, place: ClientPlace) -> None:
        """Give a client a row. Raises `InvalidArgument` if there is none."""
        for row, there in enumerate(self.places):
            if there is None and row not in self._vacated:
                self.places[row] = place
                place.sit(row, self._rows[row])
                self._look_at_all()
                return
        raise InvalidArgument(f"all {len(self.places)} rows for clients are taken")

    def remove(self, place: ClientPlace) -> None:
        """The client is gone."""
        self.places[place.row] = None
        self._rows[place.row] = 0
        self._vacated.add(place.row)
        self._look_at_all()

    @property
    def vacant(self) -> bool:
        """Whether `take_vacated` has something to tell."""
        return bool(self._vacated)

    def take_vacated(self) -> list[int]:
        """Rows whose clients are gone since the last call; others may have them from now on."""
        vacated = sorted(self._vacated)
        self._vacated.clear()
        return vacated

    def ring_bells(self) -> None:
        """Ring those that compiled code could not."""
        if not self.words[exchange.BELLS]:
            return
        self.words[exchange.BELLS] = 0
        for place in self.places:
            if place is not None and place.words[exchange.TO_RING]:
                place.words[exchange.TO_RING] = 0
                place.bell.ring()

    def _look_at_all(self) -> None:
        used = max((row + 1 for row, place in enumerate(self.places) if place is not None), default=0)
        self.watch = Watch([None if place is None else place.requests for place in self.places[:used]])
        self.words[exchange.ROWS], self.words[exchange.WATCH] = used, self.watch.address
