"""A session server with requests and results as Python objects; the pool's own loop is compiled."""

import ctypes
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ipc.native import intrinsics
from ipc.native.compiled import EntryPoints
from ipc.ring import exchange
from ipc.ring.descriptors import STAGES, STATUS_CODES, Float32s, SearchSpec
from ipc.ring.exchange import client_table_at
from ipc.ring.filters import FILTER_SLOTS
from ipc.server.client_table import AttachedClient
from ipc.server.server import SessionServer

SLEEP_NS = 100_000_000  # maximum sleep, regardless of doorbells
entry_point = EntryPoints(globals())


class Request(msgspec.Struct, frozen=True, eq=False):
    """A search request of a client, identified by (`client`, `request_id`). `vector` is float32 [dim], a copy. Times
    are monotonic ns."""

    client: int
    request_id: int
    spec: SearchSpec
    enqueue_ns: int
    receive_ns: int
    vector: Float32s


class Cancel(msgspec.Struct, frozen=True):
    """Cancellation of a request, by its client or because the client is gone. The request still ends with one
    `publish`."""

    client: int
    request_id: int


@entry_point("int64(int64)")
def next_request(clients: int) -> int:
    """Find the next request: round robin over clients, in order within each. Returns a code of `exchange`."""
    return exchange.find_request(client_table_at(clients))


@entry_point("void(int64)")
def release_request(clients: int) -> None:
    """Release the slot of the request found, whose vector has been copied."""
    exchange.release(client_table_at(clients))


@entry_point("int64(int64, int64, int64, int64, int64[::1], float32[::1], int64)")
def answer_with(clients: int, row: int, request_id: int, status: int, ids: Any, values: Any, receive_ns: int) -> int:
    """End a request with results, both [count], at most max_k. A negative result means that the client must be
    evicted."""
    table = client_table_at(clients)
    payload = exchange.result_payload(table, row)
    if payload < 0:
        return payload
    intrinsics.copy(payload, ids.ctypes.data, 8 * len(ids))
    intrinsics.copy(payload + 8 * table.max_k, values.ctypes.data, 4 * len(values))
    return exchange.answer(table, row, request_id, status, len(ids), 0, receive_ns, 0)


class _Session(NamedTuple):
    """Outstanding requests of a client."""

    attached: AttachedClient
    receive_ns: dict[int, int]  # by request id


class RingServer(SessionServer):
    """A `SessionServer` with requests and results as objects; the compiled exchange validates and moves them.

    A request is accepted only when a slot of its client's result ring is reserved for it, so that `publish` never
    waits. A client that does not read its results is not served: its own ring fills up, and it receives `RingFull`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sessions: dict[int, _Session] = {}  # by the client's handle
        self._cancelled: list[Cancel] = []
        self._filters: dict[int, bytes] = {}  # by client row and filter slot

    def receive(self, limit: int = 256) -> list[Request]:
        """Return up to `limit` new requests, round robin over clients, in order within each. Never blocks.

        A request whose vector its client's device is still writing to the arena is not returned yet. Invalid
        descriptors are answered here (status 'invalid_request' or 'stale_epoch') and not returned; a client whose
        descriptors no correct client writes is evicted.
        """
        now = time.monotonic_ns()
        self._cancel_gone_clients()
        requests: list[Request] = []
        table, current, found = self.client_table, self.request, -1
        left = 2 * limit  # not every entry is a request
        while found != exchange.NONE and left and len(requests) < limit:
            left -= 1
            found = next_request(table.address)
            if found == exchange.CANCEL:
                self._cancel(current.row, current.request_id)
            elif found == exchange.EVICT:
                self.evict(current.row)
            elif found == exchange.ACCEPTED:
                requests.append(self._request(now))
                release_request(table.address)
            elif found == exchange.FILTER and (wanted := self.request_filter()) is not None:
                number = current.row * FILTER_SLOTS + current.filter_slot - 1
                self._filters[number] = wanted
                self.cache_filter(number)
        table.ring_bells()
        self.housekeep(now)
        return requests

    def _request(self, now: int) -> Request:
        current = self.request
        vector = np.array((ctypes.c_float * current.dim).from_address(current.vector))
        attached = self.client_table.clients[current.row]
        assert attached is not None
        session = self._sessions.setdefault(attached.handle, _Session(attached, {}))
        session.receive_ns[current.request_id] = now
        spec = SearchSpec(
            attached.terms.catalogue.served[current.collection_code].name, current.k, STAGES[current.stage],
            current.top_m, current.search_width, current.patience or None, current.deadline_ns,
            self._filters[current.scope] if current.filter_slot else b"", current.flow,
        )  # fmt: skip
        return Request(attached.handle, current.request_id, spec, current.enqueued_ns, now, vector)

    def _cancel(self, row: int, request_id: int) -> None:
        attached = self.client_table.clients[row]
        session = None if attached is None else self._sessions.get(attached.handle)
        if session and request_id in session.receive_ns:
            cancel = Cancel(session.attached.handle, request_id)
            self._cancelled += [] if cancel in self._cancelled else [cancel]

    def _cancel_gone_clients(self) -> None:
        """Cancel the outstanding requests of clients that are gone."""
        for handle in [handle for handle in self._sessions if handle not in self._clients]:
            gone = [Cancel(handle, request_id) for request_id in self._sessions.pop(handle).receive_ns]
            self._cancelled = [cancel for cancel in self._cancelled if cancel.client != handle] + gone
        self.client_table.take_vacated()

    def wait(self, timeout_ms: float) -> bool:
        """Sleep until a ring has an entry, a client has gone, or the timeout expires (False).

        Attaching, closing and dying clients are handled meanwhile.
        """
        end = time.monotonic_ns() + int(timeout_ms * 1e6)
        while True:
            now = time.monotonic_ns()
            self.housekeep(now)
            self._cancel_gone_clients()
            if self._cancelled:
                return True
            if now >= end:
                return False
            if self.client_table.watch.sleep(self.fileno(), min(end - now, SLEEP_NS)):
                return True

    def cancellations(self) -> list[Cancel]:
        """Return the outstanding requests that were cancelled, or whose client is gone, since the last call.

        Each still needs its one `publish` (which is dropped if the client is gone). `receive` returns the request
        first.
        """
        self._cancel_gone_clients()
        cancelled, self._cancelled = self._cancelled, []
        return [
            cancel
            for cancel in cancelled
            if (session := self._sessions.get(cancel.client)) is None or cancel.request_id in session.receive_ns
        ]

    def publish(
        self,
        client: int,
        request_id: int,
        status: str = "ok",
        ids: npt.ArrayLike = (),
        distances: npt.ArrayLike = (),
    ) -> bool:
        """End a request: `ids` and `distances` [at most max_k] are copied into its client's ring.

        Returns False if the client is gone; the result is dropped.
        """
        if client not in self._clients:
            return False
        session, table = self._sessions[client], self.client_table
        sent = answer_with(
            table.address, session.attached.row, request_id, STATUS_CODES[status], np.ascontiguousarray(ids, np.int64),
            np.ascontiguousarray(distances, np.float32), session.receive_ns.pop(request_id),
        )  # fmt: skip
        if sent < 0:  # not a full ring, since a slot is reserved: the client has corrupted its ring
            self.evict(session.attached.row)
            return False
        table.ring_bells()
        return True


entry_point.compile()
