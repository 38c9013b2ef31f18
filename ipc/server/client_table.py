"""A pool's attached clients, and the table through which compiled code reaches them."""

import contextlib
import os
import time
from collections.abc import Callable

import numpy as np

from ipc.errors import InvalidArgument
from ipc.memory.shared import SharedMemory
from ipc.native import atomics
from ipc.native.atomics import ProducerEnd
from ipc.native.records import address_of, array_from, new_array, numpy_view
from ipc.ring import exchange
from ipc.ring.descriptors import MAX_U16
from ipc.ring.doorbell import EventfdBell
from ipc.ring.exchange import CachedFilter, ClientRow, SessionCollection
from ipc.ring.filters import FILTER_SLOT_BYTES, FILTER_SLOTS, read_filter
from ipc.ring.ring import RingConsumer, RingLayout, RingProducer, Watch, format_ring
from ipc.server.session_listener import SessionListener
from ipc.session.device_arena import Lease
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


Searches = Callable[[Served], SessionCollection]
"""What requests to a collection search, in the loop's numbers."""


class Terms:
    """Catalogue and limits of a session's requests, and the layouts of its request and result rings.

    ring_slots: slots of each ring. `collections`: by code, of which there are `codes`.
    Raises `InvalidArgument`.
    """

    def __init__(
        self, catalogue: Catalogue, epoch: int, ring_slots: int, max_k: int, max_top_m: int, searches: Searches
    ) -> None:
        if not 1 <= max_k <= MAX_U16 or not 1 <= max_top_m <= MAX_U16:
            raise InvalidArgument(f"max_k {max_k} and max_top_m {max_top_m} must be within 1..{MAX_U16}")
        self.catalogue, self.max_k, self.max_top_m = catalogue, max_k, max_top_m
        self.epoch, self.max_dim = epoch, catalogue.max_dim
        self.layouts = (RingLayout(ring_slots, 4 * self.max_dim), RingLayout(ring_slots, 12 * max_k))
        self.codes = len(catalogue.served)
        self.collections = new_array(SessionCollection, self.codes)
        for code, served in enumerate(catalogue.served):
            self.collections[code] = searches(served)
            self.collections[code].dim = served.dim


class AttachedClient:
    """One attached client: its rings, doorbell, pidfd, row of the client table, and the session's `terms`."""

    def __init__(self, handle: int, attach: Attach, token: bytes, listener: SessionListener, terms: Terms) -> None:
        """All or nothing. Raises `OSError` if the client is gone, and the errors of `SessionListener.open_bell`."""
        self.handle, self.terms = handle, terms
        self.row = -1  # of the client table
        self.fields = ClientRow()  # of its row
        self.lease: Lease | None = None  # of slots of the pool's arena
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
            self._cached_filters = new_array(CachedFilter, FILTER_SLOTS)
            for slot in range(FILTER_SLOTS):
                self._cached_filters[slot].generation_at = first + FILTER_SLOT_BYTES * slot
                self._cached_filters[slot].code = -1
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

    def bind_row(self, row: int, fields: ClientRow) -> None:
        """Fill in this row of the client table for compiled code."""
        fields.results = array_from(ProducerEnd, address_of(self.results.end))
        fields.collections, fields.codes = self.terms.collections, self.terms.codes
        fields.cached_filters, fields.handle = self._cached_filters, self.handle
        self.row, self.fields = row, fields

    def read_filter(self, number: int) -> tuple[int, bytes]:
        """Return the generation and a copy of the filter in a slot, from 1 on. Raises `ProtocolViolation`."""
        # SYNC POINT: a filter's generation, see `FilterWriter`.
        generation = atomics.load_acquire(self._cached_filters[number - 1].generation_at)
        return generation, read_filter(self._filters, number)

    def cache_filter(self, slot: int, generation: int, code: int, scope: int) -> None:
        """Cache the scope of a slot's filter of this generation, for the collection of this code."""
        cached = self._cached_filters[slot - 1]
        cached.generation, cached.scope, cached.code = generation, scope, code

    def invalidate_filter(self, scope: int) -> None:
        """Drop this scope from the cache."""
        cached = numpy_view(self._cached_filters, FILTER_SLOTS)
        cached["code"][cached["scope"] == scope] = -1

    @property
    def outstanding(self) -> int:
        """Requests accepted and not yet answered."""
        return self.fields.outstanding

    def has_joined(self) -> bool:
        """Whether the client has opened the rings: one that timed out before the reply never does."""
        self._joined = self._joined or self.results.joined
        return self._joined

    def close(self) -> None:
        self.bell.close()
        os.close(self.pidfd)
        self.memory.close()


# ---- the client table


class ClientTable:
    """A server's attached clients, each with a row of the table that `exchange.py` works on.

    `fields`: the table at `address`; `clients`: the clients by row. A client keeps its row while it is attached. A
    vacated row is not reused before `take_vacated` has reported it to the owner of the row's requests.
    """

    def __init__(self, epoch: int, max_k: int, max_top_m: int, most: int) -> None:
        self._rows = new_array(ClientRow, most)
        self.fields = exchange.ClientTable(epoch=epoch, max_k=max_k, max_top_m=max_top_m, rows=self._rows)
        self.address = address_of(self.fields)
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
        self._rows[client.row] = ClientRow()
        self._vacated.add(client.row)
        self._rebuild_watch()

    def take_vacated(self) -> list[int]:
        """Return the rows vacated since the last call, and free them for reuse."""
        vacated = sorted(self._vacated)
        self._vacated.clear()
        return vacated

    def ring_bells(self) -> None:
        """Ring the doorbells that compiled code could not ring."""
        if not self.fields.pending_bells:
            return
        self.fields.pending_bells = 0
        for client in self.clients:
            if client is not None and client.fields.bell_pending:
                client.fields.bell_pending = False
                client.bell.ring()

    def _rebuild_watch(self) -> None:
        used = max((row + 1 for row, client in enumerate(self.clients) if client is not None), default=0)
        self.watch = Watch([None if client is None else client.requests for client in self.clients[:used]])
        self.fields.row_count, self.fields.watch = used, self.watch.table
