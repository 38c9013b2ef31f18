"""The pool's side of sessions: hands out rings, reads requests of all clients, publishes results."""

import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ipc import atomics
from ipc.arena_grants import ArenaGrants
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
from ipc.device_arena import DeviceArena
from ipc.errors import InvalidArgument, IpcError, ProtocolViolation, UnknownRequest
from ipc.places import ClientPlace
from ipc.reception import Reception
from ipc.roster import Roster
from ipc.session import Catalogue, Served
from ipc.spin import SpinBudget
from ipc.statistics import ServerStatistics
from ipc.terms import Terms

HOUSEKEEPING_NS = 1_000_000  # how often a server looks at its session socket and at its clients' lives
LATE_HOUSEKEEPING_NS = 10_000_000  # how much later it may do so while there are requests
SLEEP_MS = 100.0  # no sleep is longer, whatever the doorbells do
_MAX_EXTENDS = (1 << 31) - 1
_PUBLISHABLE = {status: code for status, code in STATUS_CODES.items() if status != LOST}
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_NO_IDS, _NO_DISTANCES = np.empty(0, np.int64), np.empty(0, np.float32)


class RingServer:
    """Serves searches to clients through shared memory. One thread; nothing here blocks except `wait`.

    RingServer(endpoint, {"docs": 384}, epoch=7): `endpoint` from `private_endpoint`; `collections` a `Catalogue`, or
    simply name → vector dimension; `epoch` 0..2³²-1, another one in every life of this process; `ring_slots` requests a
    client may have outstanding; `max_k`, `max_top_m` limits of what a descriptor may ask (over them: status
    'invalid_request'); `spin_us` how long `wait` looks at the rings, at most, before it sleeps (`SpinBudget` learns how
    long it is worth); `arena` where clients may put their vectors instead of into their rings: who asks is granted one
    `max_clients`-th of its slots, at most `ring_slots`.

    A request is accepted only when a slot of its client's result ring is kept for it, so `publish` never waits, and a
    client that does not read its results is not served on (its own ring fills up, and it meets `RingFull`).
    """

    def __init__(
        self,
        endpoint: str,
        collections: Catalogue | Mapping[str, int],
        *,
        epoch: int,
        ring_slots: int = 256,
        max_k: int = 128,
        max_top_m: int = 1024,
        max_clients: int = 64,
        spin_us: float = 200.0,
        arena: DeviceArena | None = None,
    ) -> None:
        if max_clients < 1 or spin_us < 0:
            raise InvalidArgument(f"max_clients {max_clients} must be at least 1, spin_us {spin_us} at least 0")
        self.endpoint = endpoint
        self.epoch = epoch
        self._sizes = (ring_slots, max_k, max_top_m)
        terms = self._terms(collections)
        self._spin = SpinBudget(int(spin_us * 1000))
        self._next_housekeeping = 0
        each = 0 if arena is None else min(ring_slots, max(1, arena.slots // max_clients))
        self._arena = ArenaGrants(arena, each)
        self._reception = Reception(endpoint)
        self._roster = Roster(self._reception, terms, max_clients, self._arena)
        self._clients = self._roster.clients

    def _terms(self, collections: Catalogue | Mapping[str, int]) -> Terms:
        if not isinstance(collections, Catalogue):
            collections = Catalogue(tuple(Served(name, dim) for name, dim in collections.items()))
        return Terms(collections, self.epoch, *self._sizes)

    # ---- requests

    def receive(self, limit: int = 256) -> list[Request]:
        """Up to `limit` new requests, clients in turn, each client's in its order. Never blocks.

        Descriptors that cannot be served are answered here (status 'invalid_request' or 'stale_epoch') and do not
        appear; a client whose descriptors no correct client writes is evicted.
        """
        now = time.monotonic_ns()
        requests: list[Request] = []
        roster = self._roster
        for _ in roster.turns:
            turn = roster.watch.look(roster.turn)
            if turn < 0:
                break
            client = roster.turns[turn]
            roster.turn = turn + 1
            try:
                self._read(client, limit - len(requests), now, requests)
            except IpcError:
                roster.evict(client)  # the other clients' turn comes with the next call
                break
            if len(requests) >= limit:
                break
        # Those who wait for an answer come first, but not for ever.
        if now >= self._next_housekeeping + (LATE_HOUSEKEEPING_NS if requests else 0):
            self._housekeep(now)
        return requests

    def _read(self, client: ClientPlace, limit: int, now: int, requests: list[Request]) -> None:
        ring, outstanding, terms = client.requests, client.outstanding, client.terms
        known, max_dim = terms.unpacked, terms.max_dim
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
                        self._roster.cancelled.append(Cancel(client.handle, request_id))
                    continue
                if room <= 0:
                    ring.pause()  # until housekeeping finds room for its result
                    break
                if kind == SEARCH_ARENA and not self._arena.is_written(client, slot):
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
                    vector = self._arena.take(client, slot, dim)
                else:
                    vector = client.vectors[slot].copy()
                    if dim != max_dim:
                        vector = vector[:dim]
                requests.append(Request(client.handle, request_id, parameters, deadline, enqueue, now, vector))
        finally:
            ring.release(done)
            client.received += len(requests) - before

    def _refuse(self, client: ClientPlace, request_id: int, status: str, now: int) -> bool:
        self._roster.counts["stale" if status == "stale_epoch" else "invalid"] += 1
        client.outstanding[request_id] = now
        return self.publish(client.handle, request_id, status)

    def cancellations(self) -> list[Cancel]:
        """Outstanding requests whose client cancelled them, or is gone, since the last call.

        Each still wants its one `publish` (which a gone client's requests swallow). `receive` gives the request first.
        """
        roster = self._roster
        if not roster.cancelled:
            return []
        cancelled = [c for c in roster.cancelled if self._is_outstanding(c)]
        roster.cancelled = []
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
            if not 0 < client < self._roster.next_handle:
                raise UnknownRequest(f"there never was a client {client}")
            self._roster.counts["dropped"] += 1
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
                f"{found.terms.limits.max_k}"
            )
        del found.outstanding[request_id]
        if found.cancelled:
            found.cancelled.discard(request_id)
        if sent == 0:
            return True
        if sent < 0:  # not for want of a slot, which every accepted request has: the client wrote what is not its own
            self._roster.evict(found)
            return False
        self._roster.counts["rung"] += 1
        found.bell.ring()
        return True

    # ---- sleeping and sessions

    def has_news(self) -> bool:
        """Whether a client has sent something that `receive` would read. Cheap; for loops that are busy elsewhere."""
        return self._roster.watch.look(0) >= 0

    def wait(self, timeout_ms: float) -> bool:
        """Sleep until `receive` or `cancellations` may have something, or the time is over. True in the former case.

        Spins `spin_us` first. Attaching, closing and dying clients are taken care of meanwhile.
        """
        begin = time.monotonic_ns()
        if begin >= self._next_housekeeping:
            self._housekeep(begin)
        limit = int(timeout_ms * 1e6)
        if self._roster.watch.spin(min(self._spin.ns, limit)) >= 0:
            return True
        end = begin + limit
        while True:
            now = time.monotonic_ns()
            self._housekeep(now)
            if self._roster.cancelled:
                return True
            if self._roster.watch.arm() and end > now:
                self._listen(min((end - now) / 1e9, SLEEP_MS / 1e3))
            self._roster.watch.disarm()
            if self._roster.watch.look(0) >= 0:
                self._spin.learn(time.monotonic_ns() - begin)
                return True
            if time.monotonic_ns() >= end:
                self._housekeep(time.monotonic_ns())
                return bool(self._roster.cancelled)

    def fileno(self) -> int:
        """Readable when a doorbell, a session message or a client's end wants attention; level-triggered.

        To sleep on it in a loop of one's own: `arm()`, poll, `disarm()`.
        """
        return self._reception.fileno()

    def arm(self) -> bool:
        """Ask to be rung. False: something waits already, do not sleep."""
        self._housekeep(time.monotonic_ns())
        if self._roster.cancelled or not self._roster.watch.arm():
            self._roster.watch.disarm()
            return False
        return True

    def disarm(self) -> None:
        """Awake again."""
        self._roster.watch.disarm()
        self._listen(0)

    def _listen(self, timeout_s: float) -> set[int]:
        """Sessions and deaths are left to housekeeping, which comes at once then."""
        heard = self._reception.listen(timeout_s)
        if heard:
            self._next_housekeeping = 0
        return heard

    def _housekeep(self, now: int) -> None:
        self._roster.look_after(now)
        self._next_housekeeping = now + HOUSEKEEPING_NS

    def renew(self, catalogue: Catalogue) -> None:
        """Offer another catalogue: sessions opened from now on have it, the present ones drain.

        A client of theirs that wants to go on attaches anew, beside its old session, which ends when what is in flight
        there has ended. Raises `InvalidArgument`; nothing has changed then.
        """
        self._roster.renew(self._terms(catalogue))

    def in_use(self, collection: str, identity: str) -> bool:
        """Whether a session lasts that offers this content of a collection."""
        return self._roster.offers(collection, identity)

    def drain(self) -> None:
        """Take no new clients; the attached ones' `submit` raises `Draining`. What is in flight goes on."""
        self._roster.drain()

    def close(self) -> None:
        """End all sessions; the clients' outstanding requests end there with status 'lost'. Idempotent."""
        if not self._reception.closed:
            self._roster.close()
            self._reception.close()

    def __enter__(self) -> "RingServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> ServerStatistics:
        """Counters; cheap."""
        return self._roster.statistics()
