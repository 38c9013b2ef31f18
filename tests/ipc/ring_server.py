"""A session server with requests and results as Python objects, for loops in Python of benchmarks and tests. The pool's
own loop is compiled."""

import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ipc.errors import InvalidArgument, IpcError
from ipc.native import intrinsics
from ipc.native.compiled import EntryPoints
from ipc.ring import exchange
from ipc.ring.descriptors import LOST, STAGES, STATUS_CODES, Float32s, SearchSpec
from ipc.ring.doorbell import SpinBudget
from ipc.ring.exchange import client_table_at
from ipc.ring.filters import FILTER_SLOTS
from ipc.server.client_table import AttachedClient
from ipc.server.server import SessionServer

HOUSEKEEPING_NS = 1_000_000  # interval of checks of the session socket and of clients' processes
SLEEP_NS = 100_000_000  # maximum sleep, regardless of doorbells
LATE_HOUSEKEEPING_NS = 10_000_000  # maximum delay of housekeeping while there are requests
_PUBLISHABLE = {status: code for status, code in STATUS_CODES.items() if status != LOST}
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_NO_IDS, _NO_DISTANCES = np.empty(0, np.int64), np.empty(0, np.float32)
entry_point = EntryPoints(globals())


class Request(msgspec.Struct, frozen=True, eq=False):
    """A search request of a client. `vector` is float32 [dim], a copy. Times are monotonic ns.

    (`client`, `request_id`) identifies it. `identity` is that of the collection's build in the client's session: the
    answer must come from this build.
    """

    client: int
    request_id: int
    spec: SearchSpec
    identity: str
    enqueue_ns: int
    receive_ns: int
    vector: Float32s


class Cancel(msgspec.Struct, frozen=True):
    """Cancellation of a request, by its client or because the client is gone. The request still ends with one
    `publish`."""

    client: int
    request_id: int


class UnknownRequest(IpcError, KeyError):
    """There is no outstanding request with that id: it has ended, or never existed."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


@entry_point("int64(int64)")
def next_request(clients: int) -> int:
    """Find the next request: round robin over clients, in order within each. Returns a code of `exchange`."""
    return exchange.find_request(client_table_at(clients))


@entry_point("void(int64)")
def release_request(clients: int) -> None:
    """Release the slot of the request found, whose vector has been copied."""
    exchange.release(client_table_at(clients))


@entry_point("void(int64, float32[::1])")
def take_vector(address: int, vector: Any) -> None:
    """Copy a request's vector, in its ring or in an arena in host memory."""
    intrinsics.copy(vector.ctypes.data, address, 4 * len(vector))


@entry_point("int64(int64, int64, int64, int64, int64[::1], float32[::1], int64, int64, int64)")
def answer_with(
    clients: int,
    row: int,
    request_id: int,
    status: int,
    ids: Any,
    values: Any,
    extends: int,
    receive_ns: int,
    begin_ns: int,
) -> int:
    """End a request with results, both [count], at most max_k. A negative result means that the client must be
    evicted."""
    table = client_table_at(clients)
    payload = exchange.result_payload(table, row)
    if payload < 0:
        return payload
    intrinsics.copy(payload, ids.ctypes.data, 8 * len(ids))
    intrinsics.copy(payload + 8 * table.max_k, values.ctypes.data, 4 * len(values))
    return exchange.answer(table, row, request_id, status, len(ids), extends, receive_ns, begin_ns)


class _Session(NamedTuple):
    """Outstanding requests of a client."""

    attached: AttachedClient
    receive_ns: dict[int, int]  # by request id
    cancelled: set[int]  # those of them that were cancelled


class RingServer(SessionServer):
    """A `SessionServer` with requests and results as objects; the compiled exchange validates and moves them.

    A request is accepted only when a slot of its client's result ring is reserved for it, so that `publish` never
    waits. A client that does not read its results is not served: its own ring fills up, and it receives `RingFull`.
    """

    def __init__(self, *args: Any, spin_us: float = 200.0, **options: Any) -> None:
        """As `SessionServer`. `spin_us`: maximum time for which `wait` polls the rings before it sleeps."""
        super().__init__(*args, **options)
        self._spin = SpinBudget(int(spin_us * 1000))
        self._next_housekeeping = 0
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
        left, accepted = 2 * limit, 0  # not every entry is a request
        while found != exchange.NONE and left and accepted < limit:
            left -= 1
            found = next_request(table.address)
            if found == exchange.CANCEL:
                self._cancel(current.row, current.request_id)
            elif found == exchange.EVICT:
                self.evict(current.row)
            elif found == exchange.ACCEPTED:
                vector = np.zeros(current.dim, np.float32)
                take_vector(current.vector, vector)
                requests.append(self._request(vector, now))
                release_request(table.address)
                accepted += 1
            elif found == exchange.FILTER and (wanted := self.request_filter()) is not None:
                number = current.row * FILTER_SLOTS + current.filter_slot - 1
                self._filters[number] = wanted
                self.cache_filter(number)
        table.ring_bells()
        # Requests have priority over housekeeping, up to a delay.
        if now >= self._next_housekeeping + (LATE_HOUSEKEEPING_NS if requests else 0):
            self.housekeep(now)
        return requests

    def _request(self, vector: Float32s, now: int) -> Request:
        """Return the current request."""
        current = self.request
        attached = self.client_table.clients[current.row]
        assert attached is not None
        session = self._sessions.get(attached.handle)
        if session is None:
            session = self._sessions[attached.handle] = _Session(attached, {}, set())
        session.receive_ns[current.request_id] = now
        served = attached.terms.catalogue.served[current.collection_code]
        spec = SearchSpec(
            served.name, current.k, STAGES[current.stage], current.top_m, current.search_width,
            current.patience or None, current.deadline_ns, self._filters[current.scope] if current.filter_slot else b"",
            current.flow,
        )  # fmt: skip
        return Request(
            attached.handle,
            current.request_id,
            spec,
            served.identity,
            current.enqueued_ns,
            now,
            vector,
        )

    def _cancel(self, row: int, request_id: int) -> None:
        attached = self.client_table.clients[row]
        session = None if attached is None else self._sessions.get(attached.handle)
        if session and request_id in session.receive_ns and request_id not in session.cancelled:
            session.cancelled.add(request_id)
            self._cancelled.append(Cancel(session.attached.handle, request_id))

    def _cancel_gone_clients(self) -> None:
        """Cancel the outstanding requests of clients that are gone."""
        for handle in [handle for handle in self._sessions if handle not in self._clients]:
            session = self._sessions.pop(handle)
            gone = (request_id for request_id in session.receive_ns if request_id not in session.cancelled)
            self._cancelled += [Cancel(handle, request_id) for request_id in gone]
        self.client_table.take_vacated()

    # ---- sleeping

    @property
    def _ended(self) -> bool:
        """Whether there is work that is not in a ring."""
        self._cancel_gone_clients()
        return bool(self._cancelled)

    def housekeep(self, now: int) -> None:
        super().housekeep(now)
        self._next_housekeeping = now + HOUSEKEEPING_NS

    def wait(self, timeout_ms: float) -> bool:
        """Sleep until a ring has an entry, a client has gone, or the timeout expires (False).

        Spins for `spin_us` first. Attaching, closing and dying clients are handled meanwhile.
        """
        begin = time.monotonic_ns()
        if begin >= self._next_housekeeping:
            self.housekeep(begin)
        limit = int(timeout_ms * 1e6)
        if self.client_table.watch.spin(min(self._spin.ns, limit)) >= 0:
            return True
        end = begin + limit
        while True:
            now = time.monotonic_ns()
            self.housekeep(now)
            if self._ended:
                return True
            if self.client_table.watch.sleep(self.fileno(), max(min(end - now, SLEEP_NS), 0)):
                self._spin.learn(time.monotonic_ns() - begin)
                return True
            if time.monotonic_ns() >= end:
                self.housekeep(time.monotonic_ns())
                return self._ended

    def arm(self) -> bool:
        """Request to be woken by doorbells. Returns False if an entry is waiting already: do not sleep."""
        self.housekeep(time.monotonic_ns())
        if self._ended or not self.client_table.watch.arm():
            self.client_table.watch.disarm()
            return False
        return True

    def disarm(self) -> None:
        """Stop requesting doorbells after waking up."""
        self.client_table.watch.disarm()
        if self._listener.poll_events():  # housekeeping handles sessions and deaths, at once
            self._next_housekeeping = 0

    # ---- ending requests

    def cancellations(self) -> list[Cancel]:
        """Return the outstanding requests that were cancelled, or whose client is gone, since the last call.

        Each still needs its one `publish` (which is dropped if the client is gone). `receive` returns the request
        first.
        """
        self._cancel_gone_clients()
        cancelled, self._cancelled = self._cancelled, []
        return [cancel for cancel in cancelled if self._is_outstanding(cancel)]

    def _is_outstanding(self, cancel: Cancel) -> bool:
        session = self._sessions.get(cancel.client)
        return session is None or cancel.request_id in session.receive_ns

    def publish(
        self,
        client: int,
        request_id: int,
        status: str = "ok",
        ids: npt.ArrayLike | None = None,
        distances: npt.ArrayLike | None = None,
        *,
        extends: int = 0,
        begin_ns: int = 0,
    ) -> bool:
        """End a request: `status` of `STATUSES`, `ids` and `distances` [at most max_k] are copied into its client's
        ring.

        Returns False if the client is gone; the result is dropped. Raises `UnknownRequest` if the request
        is not outstanding (every request ends once), `InvalidArgument` for results that do not fit.
        """
        if client not in self._clients:
            if not 0 < client < self._next_handle:
                raise UnknownRequest(f"unknown client {client}")
            return False
        session = self._sessions.get(client)
        receive_ns = None if session is None else session.receive_ns.get(request_id)
        if session is None or receive_ns is None:
            raise UnknownRequest(f"request {request_id} of client {client} is not outstanding")
        code = _PUBLISHABLE.get(status)
        if code is None:
            raise InvalidArgument(f"status must be one of {tuple(_PUBLISHABLE)}, got {status!r}")
        id_array = _NO_IDS if ids is None else np.ascontiguousarray(ids, _INT64)
        distance_array = _NO_DISTANCES if distances is None else np.ascontiguousarray(distances, _FLOAT32)
        most = session.attached.terms.max_k
        if id_array.ndim + distance_array.ndim != 2 or not len(id_array) == len(distance_array) <= most:
            raise InvalidArgument(
                f"ids {id_array.shape} and distances {distance_array.shape} must have the same length, at most {most}"
            )
        row, table = session.attached.row, self.client_table
        sent = answer_with(
            table.address, row, request_id, code, id_array, distance_array, extends, receive_ns, begin_ns
        )
        del session.receive_ns[request_id]
        session.cancelled.discard(request_id)
        if sent < 0:  # not a full ring, since a slot is reserved: the client has corrupted its ring
            self.evict(row)
            return False
        table.ring_bells()
        return True


entry_point.compile()
