"""The pool's side of sessions: hands out rings, reads requests of all clients, publishes results."""

import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ipc import atomics
from ipc.descriptors import (
    CANCEL,
    LOST,
    MAX_REQUEST_ID,
    REQUEST_HEADER,
    SEARCH,
    SEARCH_ARENA,
    STATUS_CODES,
    Cancel,
    Request,
)
from ipc.device_arena import DeviceArena, Place
from ipc.endpoints import new_token
from ipc.errors import InvalidArgument, IpcError, ProtocolViolation, RingFull, UnknownRequest
from ipc.memo import Memo
from ipc.memory import MemoryReference
from ipc.parameters import Limits, Unpacked, unpack
from ipc.places import ClientPlace
from ipc.reception import ASKED, Reception
from ipc.ring import CLOSED, DRAINING, EVICTED, OPEN, RingLayout, Watch
from ipc.session import VERSION, Attach, Attached, Grant, Refused, Served
from ipc.spin import SpinBudget
from ipc.statistics import ServerStatistics

HOUSEKEEPING_NS = 1_000_000  # how often a server looks at its session socket and at its clients' lives
JOIN_NS = 10_000_000_000  # how long a client may take to open its rings; longer than any attaching client waits
LATE_HOUSEKEEPING_NS = 10_000_000  # how much later it may do so while there are requests
SLEEP_MS = 100.0  # no sleep is longer, whatever the doorbells do
_MAX_NAME = 100
_MAX_EXTENDS = (1 << 31) - 1
_PUBLISHABLE = {status: code for status, code in STATUS_CODES.items() if status != LOST}
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_NO_IDS, _NO_DISTANCES = np.empty(0, np.int64), np.empty(0, np.float32)


class RingServer:
    """Serves searches to clients through shared memory. One thread; nothing here blocks except `wait`.

    RingServer(endpoint, {"docs": 384}, epoch=7): `endpoint` from `private_endpoint`; `collections` name → vector
    dimension; `shards` name → (this pool's shard, number of shards), for collections that are split; `epoch` 0..2³²-1,
    another one in every life of this process; `ring_slots` requests a client may have outstanding; `max_k`, `max_top_m`
    limits of what a descriptor may ask (over them: status 'invalid_request'); `spin_us` how long `wait` looks at the
    rings, at most, before it sleeps (`SpinBudget` learns how long it is worth); `arena` where clients may put their
    vectors instead of into their rings: who asks is granted `ring_slots` of its slots, as long as there are so many.

    A request is accepted only when a slot of its client's result ring is kept for it, so `publish` never waits, and a
    client that does not read its results is not served on (its own ring fills up, and it meets `RingFull`).
    """

    def __init__(
        self,
        endpoint: str,
        collections: Mapping[str, int],
        *,
        epoch: int,
        shards: Mapping[str, tuple[int, int]] | None = None,
        ring_slots: int = 256,
        max_k: int = 128,
        max_top_m: int = 1024,
        max_clients: int = 64,
        spin_us: float = 200.0,
        arena: DeviceArena | None = None,
    ) -> None:
        self._limits = Limits.checked(collections, max_k, max_top_m)
        if max_clients < 1 or spin_us < 0:
            raise InvalidArgument(f"max_clients {max_clients} must be at least 1, spin_us {spin_us} at least 0")
        self.endpoint = endpoint
        self.epoch = epoch
        split = shards or {}
        self._served = tuple(Served(name, dim, *split.get(name, (0, 1))) for name, dim in collections.items())
        self._max_clients = max_clients
        self._arena = arena
        self._arena_reference = None if arena is None else arena.memory.reference  # exported once
        self._max_dim = max(collections.values())
        self._layouts = (RingLayout(ring_slots, 4 * self._max_dim), RingLayout(ring_slots, 12 * max_k))
        self._spin = SpinBudget(int(spin_us * 1000))
        self._clients: dict[int, ClientPlace] = {}
        self._turns: list[ClientPlace] = []
        self._turn = 0
        self._watch = Watch([])
        self._unpacked: Memo[bytes, Unpacked] = Memo(lambda packed: unpack(packed, epoch, self._limits))
        self._cancelled: list[Cancel] = []
        self._next_handle = 1
        self._draining = False
        self._rung = 0
        self._next_housekeeping = 0
        self._counts = dict.fromkeys(ServerStatistics.__struct_fields__, 0)
        self._reception = Reception(endpoint)

    # ---- requests

    def receive(self, limit: int = 256) -> list[Request]:
        """Up to `limit` new requests, clients in turn, each client's in its order. Never blocks.

        Descriptors that cannot be served are answered here (status 'invalid_request' or 'stale_epoch') and do not
        appear; a client whose descriptors no correct client writes is evicted.
        """
        now = time.monotonic_ns()
        requests: list[Request] = []
        for _ in self._turns:
            turn = self._watch.look(self._turn)
            if turn < 0:
                break
            client = self._turns[turn]
            self._turn = turn + 1
            try:
                self._read(client, limit - len(requests), now, requests)
            except IpcError:
                self._evict(client)  # the other clients' turn comes with the next call
                break
            if len(requests) >= limit:
                break
        # Those who wait for an answer come first, but not for ever.
        if now >= self._next_housekeeping + (LATE_HOUSEKEEPING_NS if requests else 0):
            self._housekeep(now)
        return requests

    def _read(self, client: ClientPlace, limit: int, now: int, requests: list[Request]) -> None:
        ring, outstanding, known = client.requests, client.outstanding, self._unpacked
        count = ring.ready(limit)
        room = client.results.room - len(outstanding)
        if room < count:
            room = client.results.free() - len(outstanding)
        done, before = 0, len(requests)
        try:
            for slot in range(ring.first, ring.first + count):
                request_id, deadline, enqueue, packed = REQUEST_HEADER.unpack_from(ring.view, ring.header_offsets[slot])
                kind, refusal, parameters, dim = known[packed]
                if kind == CANCEL:
                    done += 1
                    if request_id in outstanding and request_id not in client.cancelled:
                        client.cancelled.add(request_id)
                        self._cancelled.append(Cancel(client.handle, request_id))
                    continue
                if room <= 0:
                    ring.pause()  # until housekeeping finds room for its result
                    break
                if kind == SEARCH_ARENA and not self._is_written(client, slot):
                    break  # the client's device is still at it: next time
                room -= 1
                done += 1
                if not client.last_id < request_id <= MAX_REQUEST_ID or kind not in (SEARCH, SEARCH_ARENA):
                    raise ProtocolViolation(f"request {request_id}, kind {kind}, after request {client.last_id}")
                client.last_id = request_id
                if parameters is None or deadline < 0:
                    if self._refuse(client, request_id, refusal or "invalid_request", now):
                        continue
                    return  # evicted
                outstanding[request_id] = now
                if kind == SEARCH_ARENA:
                    vector = self._from_arena(client, slot, dim)
                else:
                    vector = client.vectors[slot].copy()
                    if dim != self._max_dim:
                        vector = vector[:dim]
                requests.append(Request(client.handle, request_id, parameters, deadline, enqueue, now, vector))
        finally:
            ring.release(done)
            client.received += len(requests) - before

    def _is_written(self, client: ClientPlace, slot: int) -> bool:
        """Whether the vector is in the arena by now; the queue of a dead client's device must not hold up the pool."""
        if self._arena is None:
            raise ProtocolViolation("a vector in the arena of a pool that has none")
        return self._arena.is_written(client.lease, _place(client, slot))

    def _from_arena(self, client: ClientPlace, slot: int, dim: int) -> npt.NDArray[np.float32]:
        """Take a vector that is written out of the arena."""
        assert self._arena is not None
        vector = np.empty(dim, np.float32)
        self._arena.take(client.lease, _place(client, slot), vector)
        self._arena.memory.flush()
        return vector

    def _refuse(self, client: ClientPlace, request_id: int, status: str, now: int) -> bool:
        self._counts["stale" if status == "stale_epoch" else "invalid"] += 1
        client.outstanding[request_id] = now
        return self.publish(client.handle, request_id, status)

    def cancellations(self) -> list[Cancel]:
        """Outstanding requests whose client cancelled them, or is gone, since the last call.

        Each still wants its one `publish` (which a gone client's requests swallow). `receive` gives the request first.
        """
        if not self._cancelled:
            return []
        cancelled = [c for c in self._cancelled if self._is_outstanding(c)]
        self._cancelled = []
        return cancelled

    def _is_outstanding(self, cancel: Cancel) -> bool:
        client = self._clients.get(cancel.client)
        return client is None or cancel.request_id in client.outstanding

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
        receive_ns = found.outstanding.get(request_id)
        if receive_ns is None:
            raise UnknownRequest(f"request {request_id} of client {client} is not outstanding")
        code = _PUBLISHABLE.get(status)
        if code is None:
            raise InvalidArgument(f"status must be one of {tuple(_PUBLISHABLE)}, got {status!r}")
        some_ids = _NO_IDS if ids is None else np.ascontiguousarray(ids, _INT64)
        some_distances = _NO_DISTANCES if distances is None else np.ascontiguousarray(distances, _FLOAT32)
        sent = atomics.TOO_LARGE
        if some_ids.ndim + some_distances.ndim == 2:
            sent = found.results.send_pairs(
                some_ids, some_distances,
                request_id, self.epoch | code << 32, min(extends, _MAX_EXTENDS) << 32, receive_ns, begin_ns,
            )  # fmt: skip
        if sent == atomics.TOO_LARGE:
            raise InvalidArgument(
                f"ids {some_ids.shape} and distances {some_distances.shape} must be of one length up to "
                f"{self._limits.max_k}"
            )
        del found.outstanding[request_id]
        if found.cancelled:
            found.cancelled.discard(request_id)
        if sent == 0:
            return True
        if sent < 0:  # not for want of a slot, which every accepted request has: the client wrote what is not its own
            self._evict(found)
            return False
        self._rung += 1
        found.bell.ring()
        return True

    # ---- sleeping and sessions

    def has_news(self) -> bool:
        """Whether a client has sent something that `receive` would read. Cheap; for loops that are busy elsewhere."""
        return self._watch.look(0) >= 0

    def wait(self, timeout_ms: float) -> bool:
        """Sleep until `receive` or `cancellations` may have something, or the time is over. True in the former case.

        Spins `spin_us` first. Attaching, closing and dying clients are taken care of meanwhile.
        """
        begin = time.monotonic_ns()
        if begin >= self._next_housekeeping:
            self._housekeep(begin)
        limit = int(timeout_ms * 1e6)
        if self._watch.spin(min(self._spin.ns, limit)) >= 0:
            return True
        end = begin + limit
        while True:
            now = time.monotonic_ns()
            self._housekeep(now)
            if self._cancelled:
                return True
            if self._watch.arm() and end > now:
                self._listen(min((end - now) / 1e9, SLEEP_MS / 1e3))
            self._watch.disarm()
            if self._watch.look(0) >= 0:
                self._spin.learn(time.monotonic_ns() - begin)
                return True
            if time.monotonic_ns() >= end:
                self._housekeep(time.monotonic_ns())
                return bool(self._cancelled)

    def fileno(self) -> int:
        """Readable when a doorbell, a session message or a client's end wants attention; level-triggered.

        To sleep on it in a loop of one's own: `arm()`, poll, `disarm()`.
        """
        return self._reception.fileno()

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
        self._listen(0)

    def _listen(self, timeout_s: float) -> set[int]:
        """Sessions and deaths are left to housekeeping, which comes at once then."""
        heard = self._reception.listen(timeout_s)
        if heard:
            self._next_housekeeping = 0
        return heard

    def _housekeep(self, now: int) -> None:
        heard = self._reception.listen(0)
        for client in tuple(self._turns):
            try:
                absent = not client.joined and not client.has_joined() and now > client.granted_ns + JOIN_NS
                if absent or client.pidfd in heard or client.requests.producer_state == CLOSED:
                    self._counts["lost"] += 1
                    self._forget(client, CLOSED)
                    continue
                client.requests.beat(now)
                if client.results.free() > len(client.outstanding):
                    client.requests.resume()
            except ProtocolViolation:
                self._evict(client)
        if ASKED in heard:  # last: a new client may take the place of one that is gone
            for asker, attach in self._reception.asks():
                self._reception.answer(asker, self._answer(attach))
        self._next_housekeeping = now + HOUSEKEEPING_NS

    def _answer(self, attach: Attach | Refused) -> Attached | Refused:
        if isinstance(attach, Refused):
            self._counts["malformed"] += 1
            return attach
        try:
            answer = self._attach(attach)
        except (IpcError, OSError) as error:
            self._counts["refused"] += 1
            return Refused(str(error))
        self._counts["attached"] += 1
        return answer

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
        client = ClientPlace.make(handle, attach, token, self._reception, self._layouts, self.epoch, self._max_dim)
        self._next_handle += 1
        self._clients[handle] = client
        self._turns.append(client)
        self._watch_all()
        grant = self._grant(client) if attach.arena else None
        return client.welcome(token, self._served, self._limits, self._reception.bell_endpoint, grant)

    def _grant(self, client: ClientPlace) -> Grant | None:
        """Slots of the arena for a new client; None where there is no arena, or none of its slots is left."""
        reference = self._arena_reference
        if self._arena is None or reference is None:
            return None
        try:
            client.lease, lease = self._arena.lease(self._layouts[0].slots)
        except (RingFull, InvalidArgument):
            return None
        if isinstance(reference, MemoryReference):
            return Grant(lease, host=reference)
        return Grant(lease, gpu=reference)

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
        for name, count in client.traffic().items():
            self._counts[name] += count
        self._watch_all()
        self._reception.unwatch(client.pidfd)
        if self._arena is not None and client.lease:
            self._arena.end_lease(client.lease)
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
        if self._reception.closed:
            return
        for client in tuple(self._turns):
            self._forget(client, CLOSED)
        self._reception.close()

    def __enter__(self) -> "RingServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> ServerStatistics:
        """Counters; cheap."""
        counts = self._counts | {"clients": len(self._turns), "rung": self._rung}
        for client in self._turns:
            counts["outstanding"] += len(client.outstanding)
            for name, count in client.traffic().items():
                counts[name] += count
        return ServerStatistics(**counts)


def _place(client: ClientPlace, slot: int) -> Place:
    """Where a request's vector lies, as its slot says."""
    return Place(*client.vectors[slot][:2].view(np.uint32).tolist())
