"""A pool's attached clients, and the table through which compiled code reaches them."""

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
from ipc.ring.filters import FILTER_SLOT_BYTES, FILTER_SLOTS, read_filter
from ipc.ring.ring import RingConsumer, RingLayout, RingProducer, Watch, format_ring
from ipc.server.session_listener import SessionListener
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

# ---- terms of a session: those of the server when it was opened


Number = Callable[[Served], int]
"""The loop's number for a collection: -1 for none, below -1 for one that only filtered requests may search."""


class Terms:
    """Catalogue and limits of a session's requests, and the layouts of its request and result rings.

    ring_slots: slots of each ring. `table`: int64 [codes, 2], the pool's number and the dimension of each collection.
    Raises `InvalidArgument`.
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


class AttachedClient:
    """One attached client: its rings, doorbell, pidfd, row of the client table, and the session's `terms`."""

    def __init__(self, handle: int, attach: Attach, token: bytes, listener: SessionListener, terms: Terms) -> None:
        """All or nothing. Raises `OSError` if the client is gone, and the errors of `SessionListener.open_bell`."""
        self.handle, self.terms = handle, terms
        self.row = -1  # of the client table
        self.words = np.zeros(exchange.CLIENT_WORDS, np.int64).data  # of its row
        self.lease = 0  # number of its lease of the pool's arena; 0: none
        self.attached_ns = time.monotonic_ns()
        self._joined = False  # whether the client has opened the rings
        self.renewed_ns = 0  # since when another session is to replace this one; 0: not replaced
        layouts, epoch = terms.layouts, terms.epoch
        with contextlib.ExitStack() as undo:
            self.pidfd = os.pidfd_open(attach.pid)
            undo.callback(os.close, self.pidfd)
            self.bell = listener.open_bell(attach, token)
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
            self._cached_filters = np.full((FILTER_SLOTS, exchange.CACHED_FILTER_WORDS), -1, np.int64)
            self._cached_filters[:, exchange.GENERATION_ADDRESS] = first + FILTER_SLOT_BYTES * np.arange(FILTER_SLOTS)
            if isinstance(self.bell, EventfdBell):
                self.results.ring_with(self.bell.fileno())
            listener.watch(self.pidfd)
            undo.pop_all()

    def attached(self, token: bytes, bell: str, arena: Grant | None) -> Attached:
        """Return the reply that opens the session."""
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

    def bind_row(self, row: int, words: npt.NDArray[np.int64]) -> None:
        """Fill in this row of the client table for compiled code."""
        words[exchange.RESULT_END] = self.results.end_address
        words[exchange.COLLECTIONS], words[exchange.CODES] = self.terms.table.ctypes.data, len(self.terms.table)
        words[exchange.CACHED_FILTERS] = self._cached_filters.ctypes.data
        words[exchange.HANDLE] = self.handle
        self.row, self.words = row, words.data

    def read_filter(self, number: int) -> tuple[int, bytes]:
        """Return the generation and a copy of the filter in a slot, from 1 on. Raises `ProtocolViolation`."""
        # SYNC POINT: a filter's generation, see `FilterWriter`.
        generation = atomics.load_acquire(int(self._cached_filters[number - 1, exchange.GENERATION_ADDRESS]))
        return generation, read_filter(self._filters, number)

    def cache_filter(self, slot: int, generation: int, code: int, number: int) -> None:
        """Cache the pool's number for a slot's filter of this generation, for the collection of this code."""
        cached = self._cached_filters[slot - 1]
        cached[exchange.CACHED_GENERATION], cached[exchange.CACHED_NUMBER] = generation, number
        cached[exchange.CACHED_CODE] = code

    def invalidate_filter(self, number: int) -> None:
        """Drop this number of the pool's from the cache."""
        cached = self._cached_filters
        cached[cached[:, exchange.CACHED_NUMBER] == number, exchange.CACHED_CODE] = -1

    @property
    def outstanding(self) -> int:
        """Requests accepted and not yet answered."""
        return int(self.words[exchange.OUTSTANDING])

    def has_joined(self) -> bool:
        """Whether the client has opened the rings: one that timed out before the reply never does."""
        self._joined = self._joined or self.results.joined
        return self._joined

    def counters(self) -> dict[str, int]:
        """Requests received, results published and doorbells rung so far."""
        return {
            "received": int(self.words[exchange.RECEIVED]),
            "published": self.results.position,
            "rung": self.results.rung,
        }

    def close(self) -> None:
        self.bell.close()
        os.close(self.pidfd)
        self.memory.close()


# ---- the client table


class ClientTable:
    """A server's attached clients, each with a row of the table that `exchange.py` works on.

    `address` and `words` are those of the client table, `clients` the clients by row. A client keeps its row while it
    is attached. A vacated row is not reused before `take_vacated` has reported it to the owner of the row's requests.
    """

    def __init__(self, epoch: int, max_k: int, max_top_m: int, most: int) -> None:
        words = np.zeros(exchange.TABLE_WORDS, np.int64)
        self._array = words  # owns the memory at `address`
        self._rows = np.zeros((most, exchange.CLIENT_WORDS), np.int64)
        self.address = int(words.ctypes.data)
        self.words = words.data
        self.words[exchange.EPOCH], self.words[exchange.MAX_K], self.words[exchange.MAX_TOP_M] = epoch, max_k, max_top_m
        self.words[exchange.CLIENT_ROWS] = int(self._rows.ctypes.data)
        self.clients: list[AttachedClient | None] = [None] * most
        self._vacated: set[int] = set()
        self._rebuild_watch()

    def add(self, client: AttachedClient) -> None:
        """Give a client a row. Raises `InvalidArgument` if none is free."""
        for row, occupant in enumerate(self.clients):
            if occupant is None and row not in self._vacated:
                self.clients[row] = client
                client.bind_row(row, self._rows[row])
                self._rebuild_watch()
                return
        raise InvalidArgument(f"all {len(self.clients)} rows for clients are taken")

    def remove(self, client: AttachedClient) -> None:
        """Vacate a client's row."""
        self.clients[client.row] = None
        self._rows[client.row] = 0
        self._vacated.add(client.row)
        self._rebuild_watch()

    @property
    def has_vacated(self) -> bool:
        """Whether `take_vacated` would return any rows."""
        return bool(self._vacated)

    def take_vacated(self) -> list[int]:
        """Return the rows vacated since the last call, and free them for reuse."""
        vacated = sorted(self._vacated)
        self._vacated.clear()
        return vacated

    def ring_bells(self) -> None:
        """Ring the doorbells that compiled code could not ring."""
        if not self.words[exchange.PENDING_BELLS]:
            return
        self.words[exchange.PENDING_BELLS] = 0
        for client in self.clients:
            if client is not None and client.words[exchange.BELL_PENDING]:
                client.words[exchange.BELL_PENDING] = 0
                client.bell.ring()

    def _rebuild_watch(self) -> None:
        used = max((row + 1 for row, client in enumerate(self.clients) if client is not None), default=0)
        self.watch = Watch([None if client is None else client.requests for client in self.clients[:used]])
        self.words[exchange.ROW_COUNT], self.words[exchange.WATCH] = used, self.watch.address
