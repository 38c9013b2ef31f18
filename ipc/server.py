"""The pool's side of sessions: hands out rings, reads requests of all clients, publishes results."""

import contextlib
import os
import select
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from ipc.descriptors import (
    CANCEL,
    LOST,
    MAX_PARAMETERS,
    MAX_REQUEST_ID,
    MAX_U16,
    PARAMETERS,
    REQUEST_HEADER,
    RESULT_HEADER,
    SEARCH,
    STAGES,
    STATUS_CODES,
    STATUSES,
    Cancel,
    Request,
    Stage,
)
from ipc.doorbell import EventfdBell, Ringer, ZmqRinger, ZmqSleeper, send_fds
from ipc.endpoints import bind, new_token, receive_all, send_now
from ipc.errors import InvalidArgument, IpcError, ProtocolViolation, UnknownRequest
from ipc.memory import SharedMemory
from ipc.places import ClientPlace
from ipc.ring import CLOSED, DRAINING, EVICTED, OPEN, RingLayout, Watch
from ipc.session import (
    EVENTFD,
    MAX_MESSAGE_BYTES,
    VERSION,
    ZEROMQ,
    Attach,
    Attached,
    Refused,
    decode_attach,
    encode,
    result_offset,
)
from ipc.spin import SpinBudget

if TYPE_CHECKING:
    from collections.abc import Sequence

HOUSEKEEPING_NS = 1_000_000  # how often a server looks at its session socket and at its clients' lives
LATE_HOUSEKEEPING_NS = 10_000_000  # how much later it may do so while there are requests
SLEEP_MS = 100.0  # no sleep is longer, whatever the doorbells do
_MAX_NAME = 100


class ServerStatistics(msgspec.Struct, frozen=True):
    """Counters of a server since it was made.

    `clients` now; `attached`, `refused`, `lost` (closed or died) and `evicted` (broke the protocol) clients so far;
    requests `received` and `outstanding`; results `published` and `dropped` (their client was gone); requests refused
    as `invalid` or `stale`; doorbells `rung`; session messages that were `malformed`.
    """

    clients: int
    attached: int
    refused: int
    lost: int
    evicted: int
    received: int
    outstanding: int
    published: int
    dropped: int
    invalid: int
    stale: int
    rung: int
    malformed: int


class _Parameters(NamedTuple):
    """A request's checked parameters, or the status that refuses them. `values`: collection … patience, dim."""

    kind: int
    refusal: str
    values: tuple[str, Stage, int, int, int, int | None, int]


class RingServer:
    """Serves searches to clients through shared memory. One thread; nothing here blocks except `wait`.

    RingServer(endpoint, {"docs": 384}, epoch=7): `endpoint` from `private_endpoint`; `collections` name → vector
    dimension; `epoch` 0..2³²-1, another one in every life of this process; `ring_slots` requests a client may have
    outstanding; `max_k`, `max_top_m` limits of what a descriptor may ask (over them: status 'invalid_request');
    `spin_us` how long `wait` looks at the rings, at most, before it sleeps (`SpinBudget` learns how long it is worth).

    A request is accepted only when a slot of its client's result ring is kept for it, so `publish` never waits, and a
    client that does not read its results is not served on (its own ring fills up, and it meets `RingFull`).
    """

    def __init__(
        self,
        endpoint: str,
        collections: Mapping[str, int],
        *,
        epoch: int,
        ring_slots: int = 256,
        max_k: int = 128,
        max_top_m: int = 1024,
        max_clients: int = 64,
        spin_us: float = 200.0,
    ) -> None:
        if not collections or min(collections.values()) < 1:
            raise InvalidArgument(f"at least one collection, dimensions of at least 1; got {dict(collections)}")
        if not 1 <= max_k <= MAX_U16 or not 1 <= max_top_m <= MAX_U16 or max_clients < 1 or spin_us < 0:
            raise InvalidArgument(
                f"max_k {max_k} and max_top_m {max_top_m} must be within 1..{MAX_U16}, "
                f"max_clients {max_clients} at least 1, spin_us {spin_us} at least 0"
            )
        self.endpoint = endpoint
        self.epoch = epoch
        self._collections = tuple(collections.items())
        self._max_k = max_k
        self._max_top_m = max_top_m
        self._max_clients = max_clients
        self._max_dim = max(collections.values())
        self._layouts = (RingLayout(ring_slots, 4 * self._max_dim), RingLayout(ring_slots, 12 * max_k))
        self._spin = SpinBudget(int(spin_us * 1000))
        self._clients: dict[int, ClientPlace] = {}
        self._turns: list[ClientPlace] = []
        self._turn = 0
        self._watch = Watch([])
        self._parameters: dict[bytes, _Parameters] = {}
        self._cancelled: list[Cancel] = []
        self._next_handle = 1
        self._draining = False
        self._next_housekeeping = 0
        self._counts = dict.fromkeys(ServerStatistics.__struct_fields__, 0)
        self._no_ids = np.empty(0, np.int64)
        self._no_distances = np.empty(0, np.float32)

        with contextlib.ExitStack() as undo:
            self._session = bind(zmq.ROUTER, endpoint, max_message_bytes=MAX_MESSAGE_BYTES)
            undo.callback(self._session.close)
            self._zmq_bell_endpoint = f"{endpoint}-bell"
            self._zmq_bell = ZmqSleeper(self._zmq_bell_endpoint)
            undo.callback(self._zmq_bell.close)
            self._bell = EventfdBell()
            undo.callback(self._bell.close)
            self._epoll = select.epoll()
            undo.pop_all()
        self._bell_fd = self._bell.fileno()
        self._zmq_bell_fd = self._zmq_bell.fileno()
        self._session_fd = int(self._session.getsockopt(zmq.FD))
        for fd in (self._bell_fd, self._zmq_bell_fd, self._session_fd):
            self._epoll.register(fd, select.EPOLLIN)

    # ---- requests

    def receive(self, limit: int = 256) -> list[Request]:
        """Up to `limit` new requests, clients in turn, each client's in its order. Never blocks.

        Descriptors that cannot be served are answered here (status 'invalid_request' or 'stale_epoch') and do not
        appear; a client whose descriptors no correct client writes is evicted.
        """
        now = time.monotonic_ns()
        requests: list[Request] = []
        for _ in range(len(self._turns)):
            turn = self._watch.look(self._turn)
            if turn < 0:
                break
            client = self._turns[turn]
            self._turn = turn + 1
            try:
                self._drain(client, limit - len(requests), now, requests)
            except ProtocolViolation:
                self._evict(client)  # the other clients' turn comes with the next call
                break
            if len(requests) >= limit:
                break
        self._counts["received"] += len(requests)
        # Those who wait for an answer come first, but not for ever.
        if now >= self._next_housekeeping + (LATE_HOUSEKEEPING_NS if requests else 0):
            self._housekeep(now)
        return requests

    def cancellations(self) -> list[Cancel]:
        """Outstanding requests whose client cancelled them, or is gone, since the last call.

        Each still wants its one `publish` (which a gone client's requests swallow). `receive` gives the request first.
        """
        cancelled = [c for c in self._cancelled if self._is_outstanding(c)]
        self._cancelled = []
        return cancelled

    def _is_outstanding(self, cancel: Cancel) -> bool:
        client = self._clients.get(cancel.client)
        return client is None or cancel.request_id in client.outstanding

    def _drain(self, client: ClientPlace, limit: int, now: int, requests: list[Request]) -> None:
        ring = client.requests
        room = client.results.room(limit + len(client.outstanding)) - len(client.outstanding)
        first, done = ring.first, 0
        for slot in range(first, first + ring.ready(limit)):
            request_id, deadline, enqueue, packed = REQUEST_HEADER.unpack_from(ring.view, ring.header_offsets[slot])
            parameters = self._parameters.get(packed) or self._learn(packed)
            if parameters.kind == CANCEL:
                if request_id in client.outstanding and request_id not in client.cancelled:
                    client.cancelled.add(request_id)
                    self._cancelled.append(Cancel(client.handle, request_id))
                done += 1
                continue
            if room <= 0:
                ring.pause()  # until housekeeping finds room for its result
                break
            room -= 1
            done += 1
            if not client.last_id < request_id <= MAX_REQUEST_ID or parameters.kind != SEARCH:
                raise ProtocolViolation(f"request {request_id}, kind {parameters.kind}, after request {client.last_id}")
            client.last_id = request_id
            if parameters.refusal or deadline < 0:
                status = parameters.refusal or "invalid_request"
                self._counts["stale" if status == "stale_epoch" else "invalid"] += 1
                self._write(client, request_id, status, now, self._no_ids, self._no_distances, 0, 0)
                continue
            client.outstanding[request_id] = now
            vector = client.vectors[slot].copy()
            collection, stage, k, top_m, width, patience, dim = parameters.values
            requests.append(
                Request(
                    client.handle,
                    request_id,
                    collection,
                    stage,
                    k,
                    top_m,
                    width,
                    patience,
                    deadline,
                    enqueue,
                    now,
                    vector if dim == self._max_dim else vector[:dim],
                )
            )
        ring.release(done)

    def _learn(self, packed: bytes) -> _Parameters:
        """Check parameters that come for the first time. Nothing is allocated by what they say."""
        epoch, kind, stage, collection, k, top_m, width, patience, dim = PARAMETERS.unpack(packed)
        refusal = ""
        values: tuple[str, Stage, int, int, int, int | None, int] = ("", STAGES[0], 0, 0, 0, None, 0)
        if epoch != self.epoch:
            refusal = "stale_epoch"
        elif kind == SEARCH:
            known = stage < len(STAGES) and collection < len(self._collections)
            if (
                known
                and dim == self._collections[collection][1]
                and 1 <= k <= self._max_k
                and 1 <= top_m <= self._max_top_m
                and width >= 1
            ):
                values = (self._collections[collection][0], STAGES[stage], k, top_m, width, patience or None, dim)
            else:
                refusal = "invalid_request"
        if len(self._parameters) >= MAX_PARAMETERS:
            self._parameters.clear()
        found = self._parameters[packed] = _Parameters(kind, refusal, values)
        return found

    # ---- results

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
        found = self._clients.get(client)
        if found is None:
            if not 0 < client < self._next_handle:
                raise UnknownRequest(f"there never was a client {client}")
            self._counts["dropped"] += 1
            return False
        if request_id not in found.outstanding:
            raise UnknownRequest(f"request {request_id} of client {client} is not outstanding")
        found_ids = self._no_ids if ids is None else np.asarray(ids)
        found_distances = self._no_distances if distances is None else np.asarray(distances)
        shape = found_ids.shape
        if shape != found_distances.shape or len(shape) != 1 or shape[0] > self._max_k:
            raise InvalidArgument(
                f"ids {shape} and distances {found_distances.shape} must be of one length up to {self._max_k}"
            )
        if status not in STATUS_CODES or status == LOST:
            raise InvalidArgument(f"status must be one of {STATUSES} and not {LOST!r}, got {status!r}")
        receive_ns = found.outstanding.pop(request_id)
        if found.cancelled:
            found.cancelled.discard(request_id)
        try:
            self._write(found, request_id, status, receive_ns, found_ids, found_distances, extends, begin_ns)
        except ProtocolViolation:
            self._evict(found)
            return False
        return True

    def _write(
        self,
        client: ClientPlace,
        request_id: int,
        status: str,
        receive_ns: int,
        ids: npt.NDArray[Any],
        distances: npt.NDArray[Any],
        extends: int,
        begin_ns: int,
    ) -> None:
        ring = client.results
        slot = ring.loan()
        if count := len(ids):
            client.ids[slot][:count] = ids
            client.distances[slot][:count] = distances
        RESULT_HEADER.pack_into(
            ring.view,
            ring.header_offsets[slot],
            request_id,
            self.epoch,
            STATUS_CODES[status],
            count,
            extends,
            receive_ns,
            begin_ns,
            time.monotonic_ns(),
        )
        self._counts["published"] += 1
        if ring.send():
            self._counts["rung"] += 1
            client.bell.ring()

    # ---- sleeping and sessions

    def wait(self, timeout_ms: float) -> bool:
        """Sleep until `receive` or `cancellations` may have something, or the time is over. True in the former case.

        Spins `spin_us` first. Attaching, closing and dying clients are taken care of meanwhile.
        """
        end = time.monotonic_ns() + int(timeout_ms * 1e6)
        if time.monotonic_ns() >= self._next_housekeeping:
            self._housekeep(time.monotonic_ns())
        begin = time.monotonic_ns()
        if self._watch.spin(min(self._spin.ns, int(timeout_ms * 1e6))) >= 0:
            return True
        while True:
            now = time.monotonic_ns()
            self._housekeep(now)
            if self._cancelled:
                return True
            if self._watch.arm() and end > now:
                self._hear(self._epoll.poll(min((end - now) / 1e9, SLEEP_MS / 1e3)))
            self._watch.disarm()
            if self._watch.look() >= 0:
                self._spin.learn(time.monotonic_ns() - begin)
                return True
            if time.monotonic_ns() >= end:
                self._housekeep(time.monotonic_ns())
                return bool(self._cancelled)

    def fileno(self) -> int:
        """Readable when a doorbell, a session message or a client's end wants attention; level-triggered.

        To sleep on it in a loop of one's own: `arm()`, poll, `disarm()`.
        """
        return self._epoll.fileno()

    def arm(self) -> bool:
        """Ask to be rung. False: something waits already, do not sleep."""
        self._housekeep(time.monotonic_ns())
        if self._cancelled or not self._watch.arm():
            self._watch.disarm()
            return False
        return True

    def disarm(self) -> None:
        """Awake again."""
        self._watch.disarm()
        self._hear(self._epoll.poll(0))

    def _hear(self, events: list[tuple[int, int]]) -> None:
        """Silence what rings; sessions and deaths are left to housekeeping, which comes at once then."""
        for fd, _ in events:
            if fd == self._bell_fd:
                self._bell.silence()
            elif fd == self._zmq_bell_fd:
                self._zmq_bell.silence()
            else:
                self._next_housekeeping = 0

    def _housekeep(self, now: int) -> None:
        self._next_housekeeping = now + HOUSEKEEPING_NS
        events = self._epoll.poll(0)
        self._hear(events)
        dead = {fd for fd, _ in events}
        for client in tuple(self._turns):
            try:
                if client.pidfd in dead or client.requests.producer_state == CLOSED:
                    self._counts["lost"] += 1
                    self._forget(client, CLOSED)
                    continue
                client.requests.beat(now)
                if client.results.free() > len(client.outstanding):
                    client.requests.resume()
            except ProtocolViolation:
                self._evict(client)
        if self._session_fd in dead:  # last: a new client may take the place of one that is gone
            while messages := receive_all(self._session):
                for frames in messages:
                    self._answer(frames)
            self._next_housekeeping = now + HOUSEKEEPING_NS

    def _answer(self, frames: "Sequence[bytes]") -> None:
        if len(frames) != 2:
            self._counts["malformed"] += 1
            return
        try:
            answer: Attached | Refused = self._attach(decode_attach(frames[1]))
            self._counts["attached"] += 1
        except msgspec.MsgspecError as error:
            self._counts["malformed"] += 1
            answer = Refused(f"malformed message: {error}")
        except (IpcError, OSError) as error:
            self._counts["refused"] += 1
            answer = Refused(str(error))
        send_now(self._session, frames[0], encode(answer))  # an asker that does not read gets nothing

    def _attach(self, attach: Attach) -> Attached:
        if attach.version != VERSION:
            raise InvalidArgument(f"protocol version {attach.version}, this pool speaks {VERSION}")
        if len(attach.name) > _MAX_NAME:
            raise InvalidArgument(f"a name has at most {_MAX_NAME} characters, got {len(attach.name)}")
        if self._draining:
            raise InvalidArgument("the pool is draining")
        if len(self._clients) >= self._max_clients:
            raise InvalidArgument(f"all {self._max_clients} places for clients are taken")
        handle, token = self._next_handle, new_token().encode()
        with contextlib.ExitStack() as undo:
            pidfd = os.pidfd_open(attach.pid)
            undo.callback(os.close, pidfd)
            bell = self._make_bell(attach, token)
            undo.callback(bell.close)
            memory = SharedMemory.create("trinity-ring", result_offset(self._layouts[0]) + self._layouts[1].size)
            undo.callback(memory.close)
            client = ClientPlace(
                handle, attach.name, pidfd, bell, memory, self._layouts, self.epoch, self._max_dim, self._max_k
            )
            self._epoll.register(pidfd, select.EPOLLIN)
            undo.pop_all()
        self._next_handle += 1
        self._clients[handle] = client
        self._turns.append(client)
        self._watch_all()
        return Attached(
            version=VERSION,
            epoch=self.epoch,
            pid=os.getpid(),
            client=handle,
            memory=memory.reference,
            requests=self._layouts[0],
            results=self._layouts[1],
            collections=self._collections,
            max_k=self._max_k,
            max_top_m=self._max_top_m,
            token=token,
            bell=self._zmq_bell_endpoint,
        )

    def _make_bell(self, attach: Attach, token: bytes) -> Ringer:
        if attach.doorbell == ZEROMQ:
            return ZmqRinger(attach.bell)
        if attach.doorbell != EVENTFD:
            raise InvalidArgument(f"no such doorbell: {attach.doorbell!r:.100}")
        bell = EventfdBell()
        try:
            send_fds(attach.bell, token, [self._bell.fileno(), bell.fileno()])
        except BaseException:
            bell.close()
            raise
        return bell

    def _evict(self, client: ClientPlace) -> None:
        self._counts["evicted"] += 1
        self._forget(client, EVICTED)

    def _forget(self, client: ClientPlace, state: int) -> None:
        client.requests.set_state(state)
        client.bell.ring()
        gone = (request_id for request_id in client.outstanding if request_id not in client.cancelled)
        self._cancelled += [Cancel(client.handle, request_id) for request_id in gone]
        del self._clients[client.handle]
        self._turns.remove(client)
        self._watch_all()
        self._epoll.unregister(client.pidfd)
        client.close()

    def _watch_all(self) -> None:
        self._turn = 0
        self._watch = Watch([client.requests for client in self._turns])

    def drain(self) -> None:
        """Take no new clients; the attached ones' `submit` raises `Draining`. What is in flight goes on."""
        self._draining = True
        for client in self._turns:
            client.requests.set_state(DRAINING if client.requests.consumer_state == OPEN else CLOSED)
            client.bell.ring()

    def close(self) -> None:
        """End all sessions; the clients' outstanding requests end there with status 'lost'. Idempotent."""
        if self._session.closed:
            return
        for client in tuple(self._turns):
            self._forget(client, CLOSED)
        self._epoll.close()
        self._session.close()
        self._zmq_bell.close()
        self._bell.close()

    def __enter__(self) -> "RingServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> ServerStatistics:
        """Counters; cheap."""
        outstanding = sum(len(client.outstanding) for client in self._turns)
        return ServerStatistics(**{**self._counts, "clients": len(self._turns), "outstanding": outstanding})
