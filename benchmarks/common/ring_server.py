"""A session server that hands out requests as objects and takes results one by one: for loops in Python, of
benchmarks and tests. A pool's own loop is compiled."""

import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ipc.errors import InvalidArgument, IpcError
from ipc.memory import intrinsics
from ipc.memory.compiled import entry_point
from ipc.ring import exchange
from ipc.ring.descriptors import LOST, STAGES, STATUS_CODES, Float32s, SearchSpec
from ipc.ring.doorbell import SpinBudget
from ipc.ring.filters import FILTER_SLOTS
from ipc.server.client_table import AttachedClient
from ipc.server.server import SessionServer

HOUSEKEEPING_NS = 1_000_000  # how often a server looks at its session socket and at its clients' lives
SLEEP_NS = 100_000_000  # no sleep is longer, whatever the doorbells do
LATE_HOUSEKEEPING_NS = 10_000_000  # how much later housekeeping may come while there are requests
_PUBLISHABLE = {status: code for status, code in STATUS_CODES.items() if status != LOST}
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_NO_IDS, _NO_DISTANCES = np.empty(0, np.int64), np.empty(0, np.float32)


class Request(msgspec.Struct, frozen=True, eq=False):
    """A search that a client wants. `vector` is float32 [dim], the receiver's own copy. Times are monotonic ns.

    (`client`, `request_id`) names it. `identity` is that of the collection in the session that it came through: it is
    to be answered from this content and no other.
    """

    client: int
    request_id: int
    spec: SearchSpec
    identity: str
    enqueue_ns: int
    receive_ns: int
    vector: Float32s


class Cancel(msgspec.Struct, frozen=True):
    """A client does not want a request's result any more (or is gone). The request still ends with one `publish`."""

    client: int
    request_id: int


class UnknownRequest(IpcError, KeyError):
    """No such request is outstanding: it has ended already, or never was."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


@entry_point("int64(int64)")
def next_request(clients: int) -> int:
    """Look for one request, clients in turn, each client's in its order. What is found: see the module's text."""
    return int(exchange.find_request(intrinsics.words(clients, exchange.TABLE_WORDS)))


@entry_point("void(int64)")
def release_request(clients: int) -> None:
    """The vector of the request found has been copied."""
    exchange.release(intrinsics.words(clients, exchange.TABLE_WORDS))


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
    """End a request with results, [count] both, at most MAX_K. Below 0: the client must be evicted."""
    words = intrinsics.words(clients, exchange.TABLE_WORDS)
    payload = exchange.result_payload(words, row)
    if payload < 0:
        return int(payload)
    intrinsics.copy(payload, ids.ctypes.data, 8 * len(ids))
    intrinsics.copy(payload + 8 * words[exchange.MAX_K], values.ctypes.data, 4 * len(values))
    return int(exchange.answer(words, row, request_id, status, len(ids), extends, receive_ns, begin_ns))


class _Session(NamedTuple):
    """What was received from a client and is not yet published."""

    attached: AttachedClient
    receive_ns: dict[int, int]  # by request id
    cancelled: set[int]  # those of them that the client does not want any more


class RingServer(SessionServer):
    """A `SessionServer` with requests and results as objects; the compiled exchange checks and moves them.

    A request is accepted only when a slot of its client's result ring is kept for it, so `publish` never waits, and a
    client that does not read its results is not served on (its own ring fills up, and it meets `RingFull`).
    """

    def __init__(self, *args: Any, spin_us: float = 200.0, **options: Any) -> None:
        """As `SessionServer`. `spin_us`: how long `wait` looks at the rings, at most, before it sleeps."""
        super().__init__(*args, **options)
        self._spin = SpinBudget(int(spin_us * 1000))
        self._next_housekeeping = 0
        self._sessions: dict[int, _Session] = {}  # by the client's handle
        self._cancelled: list[Cancel] = []
        self._filters: dict[int, bytes] = {}  # by client row and filter slot

    def receive(self, limit: int = 256) -> list[Request]:
        """Up to `limit` new requests, clients in turn, each client's in its order. Never blocks.

        Those with vectors in the arena come when the vectors are out of it, be it later than others.
        Descriptors that cannot be served are answered here (status 'invalid_request' or 'stale_epoch') and do not
        appear; a client whose descriptors no correct client writes is evicted.
        """
        now = time.monotonic_ns()
        self._cancel_gone_clients()
        requests: list[Request] = []
        table, words, found = self.client_table, self.client_table.words, -1
        left, accepted = 2 * limit, 0  # some of what is found are no requests
        while found != exchange.NONE and left and accepted < limit:
            left -= 1
            found = next_request(table.address)
            if found == exchange.CANCEL:
                row, request_id = words[exchange.ROW], words[exchange.REQUEST_ID]
                requests += [self._request(vector, now) for vector in self.copied_vectors()]  # it may be one of them
                self._cancel(row, request_id)
            elif found == exchange.EVICT:
                self.evict(words[exchange.ROW])
            elif found == exchange.ACCEPTED:
                attached = table.clients[words[exchange.ROW]]
                assert attached is not None
                requests.append(self._request(attached.vectors[words[exchange.SLOT], : words[exchange.DIM]], now))
                release_request(table.address)
                accepted += 1
            elif found == exchange.ARENA:
                self.accept_from_arena()
                accepted += 1
            elif found == exchange.FILTER and (wanted := self.request_filter()) is not None:
                number = words[exchange.ROW] * FILTER_SLOTS + words[exchange.FILTER_SLOT] - 1
                self._filters[number] = wanted
                self.cache_filter(number)
        requests += [self._request(vector, now) for vector in self.copied_vectors()]
        table.ring_bells()
        # Those who wait for an answer come first, but not for ever.
        if now >= self._next_housekeeping + (LATE_HOUSEKEEPING_NS if requests else 0):
            self.housekeep(now)
        return requests

    def _request(self, vector: Float32s, now: int) -> Request:
        """Return the current request; the vector is copied."""
        words = self.client_table.words
        attached = self.client_table.clients[words[exchange.ROW]]
        assert attached is not None
        session = self._sessions.get(attached.handle)
        if session is None:
            session = self._sessions[attached.handle] = _Session(attached, {}, set())
        session.receive_ns[words[exchange.REQUEST_ID]] = now
        served = attached.terms.catalogue.served[words[exchange.COLLECTION_CODE]]
        spec = SearchSpec(
            served.name, words[exchange.K], STAGES[words[exchange.STAGE]], words[exchange.TOP_M],
            words[exchange.WIDTH], words[exchange.PATIENCE] or None, words[exchange.DEADLINE],
            b"" if words[exchange.FILTER_NUMBER] < 0 else self._filters[words[exchange.FILTER_NUMBER]],
        )  # fmt: skip
        return Request(
            attached.handle,
            words[exchange.REQUEST_ID],
            spec,
            served.identity,
            words[exchange.ENQUEUE],
            now,
            vector.copy(),
        )

    def _cancel(self, row: int, request_id: int) -> None:
        attached = self.client_table.clients[row]
        session = None if attached is None else self._sessions.get(attached.handle)
        if session and request_id in session.receive_ns and request_id not in session.cancelled:
            session.cancelled.add(request_id)
            self._cancelled.append(Cancel(session.attached.handle, request_id))

    def _cancel_gone_clients(self) -> None:
        """Cancel the requests of clients that are gone."""
        for handle in [handle for handle in self._sessions if handle not in self._clients]:
            session = self._sessions.pop(handle)
            gone = (request_id for request_id in session.receive_ns if request_id not in session.cancelled)
            self._cancelled += [Cancel(handle, request_id) for request_id in gone]
        self.client_table.take_vacated()

    # ---- sleeping

    @property
    def _ended(self) -> bool:
        """Whether there is something to do that is in no ring."""
        self._cancel_gone_clients()
        return bool(self._cancelled) or self.copying

    def housekeep(self, now: int) -> None:
        super().housekeep(now)
        self._next_housekeeping = now + HOUSEKEEPING_NS

    def wait(self, timeout_ms: float) -> bool:
        """Sleep until there is something in a ring, or a client has gone, or the time is over (False).

        Spins `spin_us` first. Attaching, closing and dying clients are taken care of meanwhile.
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
        """Ask to be rung. False: something waits already, do not sleep."""
        self.housekeep(time.monotonic_ns())
        if self._ended or not self.client_table.watch.arm():
            self.client_table.watch.disarm()
            return False
        return True

    def disarm(self) -> None:
        """Awake again."""
        self.client_table.watch.disarm()
        if self._listener.poll_events():  # sessions and deaths are left to housekeeping, which comes at once then
            self._next_housekeeping = 0

    # ---- ends

    def cancellations(self) -> list[Cancel]:
        """Outstanding requests whose client cancelled them, or is gone, since the last call.

        Each still wants its one `publish` (which a gone client's requests swallow). `receive` gives the request first.
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
        """End a request: `status` of `STATUSES`, `ids` and `distances` [at most max_k] copied into its client's ring.

        False: the client is gone, the result was dropped and counted. Raises `UnknownRequest` if the request is not
        outstanding (every request ends once), `InvalidArgument` for results that do not fit.
        """
        if client not in self._clients:
            if not 0 < client < self._next_handle:
                raise UnknownRequest(f"there never was a client {client}")
            self._counts["dropped"] += 1
            return False
        session = self._sessions.get(client)
        receive_ns = None if session is None else session.receive_ns.get(request_id)
        if session is None or receive_ns is None:
            raise UnknownRequest(f"request {request_id} of client {client} is not outstanding")
        code = _PUBLISHABLE.get(status)
        if code is None:
            raise InvalidArgument(f"status must be one of {tuple(_PUBLISHABLE)}, got {status!r}")
        some_ids = _NO_IDS if ids is None else np.ascontiguousarray(ids, _INT64)
        some_distances = _NO_DISTANCES if distances is None else np.ascontiguousarray(distances, _FLOAT32)
        most = session.attached.terms.max_k
        if some_ids.ndim + some_distances.ndim != 2 or not len(some_ids) == len(some_distances) <= most:
            raise InvalidArgument(
                f"ids {some_ids.shape} and distances {some_distances.shape} must be of one length up to {most}"
            )
        row, table = session.attached.row, self.client_table
        sent = answer_with(
            table.address, row, request_id, code, some_ids, some_distances, extends, receive_ns, begin_ns
        )
        del session.receive_ns[request_id]
        session.cancelled.discard(request_id)
        if sent < 0:  # not for want of a slot, which every accepted request has: the client wrote what is not its own
            self.evict(row)
            return False
        table.ring_bells()
        return True
