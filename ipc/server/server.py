"""The pool's side of sessions: who is attached, and whose requests may be read."""

import time
from collections.abc import Iterator, Mapping
from typing import Self

from ipc.endpoints import new_token
from ipc.errors import InvalidArgument, IpcError, MemoryRefused, ProtocolViolation
from ipc.ring import exchange
from ipc.ring.descriptors import STATUS_CODES, Float32s
from ipc.ring.ring import CLOSED, DRAINING, EVICTED
from ipc.server.arena_grants import ArenaGrants
from ipc.server.places import ClientPlace, Desk, Number, Terms
from ipc.server.reception import ASKED, Reception
from ipc.session.device_arena import DeviceArena
from ipc.session.messages import VERSION, Attach, Attached, Catalogue, Refused, Served, ServerStatistics

RENEW_NS = 2_000_000_000  # how long a client may take to open a session in the place of an idle one
JOIN_NS = 10_000_000_000  # how long a client may take to open its rings; longer than those that try again wait
_MAX_NAME = 100


class SessionServer:
    """Serves sessions to clients; requests and results themselves are exchanged over its `desk` (`exchange.py`), by a
    compiled loop. One thread; nothing here blocks.

    SessionServer(endpoint, {"docs": 384}, epoch=7): `endpoint` from `private_endpoint`; `collections` a `Catalogue`, or
    simply name → vector dimension; `epoch` 0..2³²-1, another one in every life of this process; `ring_slots` requests a
    client may have outstanding; `max_k`, `max_top_m` limits of what a descriptor may ask (over them: status
    'invalid_request'); `arena` where clients may put their vectors instead of into their rings: who asks is granted one
    `max_clients`-th of its slots, at most `ring_slots`; `number` what the desk calls each collection. A session that is
    being renewed is none of the `max_clients`, and of those there may be as many again.
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
        arena: DeviceArena | None = None,
        number: Number = lambda served: 0,
    ) -> None:
        if max_clients < 1:
            raise InvalidArgument(f"max_clients must be at least 1, got {max_clients}")
        self.endpoint = endpoint
        self.epoch = epoch
        self._sizes = (ring_slots, max_k, max_top_m)
        self._number = number
        self._terms = self._terms_of(collections)  # of sessions opened from now on
        self._generation = 0  # of the filter that was read last
        each = 0 if arena is None else min(ring_slots, max(1, arena.slots // max_clients))
        self._arena = ArenaGrants(arena, each)
        self._reception = Reception(endpoint)
        self._max_clients = max_clients
        self._clients: dict[int, ClientPlace] = {}  # by handle
        self.desk = Desk(epoch, max_k, max_top_m, 2 * max_clients)
        """For `exchange.py`."""
        self._next_handle = 1
        self._counts = dict.fromkeys(ServerStatistics.__struct_fields__, 0)
        self._draining = False

    def _terms_of(self, collections: Catalogue | Mapping[str, int]) -> Terms:
        if not isinstance(collections, Catalogue):
            collections = Catalogue(tuple(Served(name, dim) for name, dim in collections.items()))
        return Terms(collections, self.epoch, *self._sizes, self._number)

    # ---- what a loop over the desk needs

    def evict(self, row: int) -> None:
        """The client in this row wrote what no correct client writes."""
        place = self.desk.places[row]
        if place is not None:
            self._evict(place)

    def take_from_arena(self) -> None:
        """The request found has its vector in the arena: it is accepted, and comes with `arrived`.

        Its client is evicted if it names a place that it cannot have.
        """
        words = self.desk.words
        place = self._place_of_request()
        try:
            self._arena.put(place, words)
        except IpcError:
            self._evict(place)
            return
        exchange.accept_request(self.desk.address)

    def arrived(self) -> Iterator[Float32s]:
        """Vectors out of the arena that are there by now; the desk's words are each one's request meanwhile."""
        try:
            yield from self._arena.arrived(self.desk.words)
        except MemoryRefused:  # the device has failed, and with it whoever has vectors there
            for place in set(self._arena.readers):
                self._evict(place)

    def filter_of_request(self) -> bytes | None:
        """The filter of the request found, which is not known yet: `know_filter`, or `refuse`. None: its client was
        evicted for what it wrote there."""
        place = self._place_of_request()
        try:
            self._generation, found = place.filter(self.desk.words[exchange.PLACE])
        except ProtocolViolation:
            self._evict(place)
            return None
        return found

    def know_filter(self, number: int) -> None:
        """The filter of the request found has this number: requests with it are found with KNOWN from now on."""
        words, place = self.desk.words, self._place_of_request()
        place.know_filter(words[exchange.PLACE], self._generation, words[exchange.CODE], number)

    def forget_filter(self, number: int) -> None:
        """The filter of this number is asked for when it is named again."""
        for place in self.desk.places:
            if place is not None:
                place.forget_filter(number)

    def refuse(self, status: str) -> None:
        """End the request found, which was not accepted."""
        place = self._place_of_request()
        if exchange.refuse_request(self.desk.address, STATUS_CODES[status]) == exchange.EVICT:
            self._evict(place)
        self.desk.ring_bells()

    def _place_of_request(self) -> ClientPlace:
        place = self.desk.places[self.desk.words[exchange.ROW]]
        assert place is not None
        return place

    @property
    def reading(self) -> bool:
        """Whether vectors are on their way out of the arena: look for them with `arrived`, and do not sleep."""
        return self._arena.reading

    @property
    def clients(self) -> int:
        """Attached clients."""
        return len(self._clients)

    @property
    def malformed(self) -> int:
        """Session messages so far that were none."""
        return self._counts["malformed"]

    # ---- sessions

    def has_news(self) -> bool:
        """Whether a client has sent something. Cheap; for loops that are busy elsewhere."""
        return self.desk.watch.look(0) >= 0

    def fileno(self) -> int:
        """Readable when a doorbell, a session message or a client's end wants attention; level-triggered."""
        return self._reception.fileno()

    @property
    def bell_fileno(self) -> int:
        """Of the eventfd that clients ring, for compiled code that silences it."""
        return self._reception.bell_fileno

    def housekeep(self, now: int) -> None:
        """Evict dead clients, and let in those that ask. Monotonic ns. Those that have gone: `desk.take_vacated`."""
        heard = self._reception.listen()
        for client in tuple(self._clients.values()):
            try:
                absent = not client.has_joined() and now > client.granted_ns + JOIN_NS
                gone = absent or client.pidfd in heard or client.requests.producer_state == CLOSED
                if gone or _is_over(client, now):
                    self._counts["lost"] += 1
                    self._forget(client, CLOSED)
                    continue
                if client.results.free() > client.outstanding:
                    client.requests.resume()
            except ProtocolViolation:
                self._evict(client)
        if ASKED in heard:  # last: a new client may take the place of one that is gone
            for asker, attach in self._reception.asks():
                self._reception.answer(asker, self._answer(attach))

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
        renewed = sum(client.renewed_ns > 0 for client in self._clients.values())
        if len(self._clients) - renewed >= self._max_clients or len(self._clients) >= 2 * self._max_clients:
            raise InvalidArgument(f"all {self._max_clients} places for clients are taken")
        handle, token = self._next_handle, new_token().encode()
        client = ClientPlace(handle, attach, token, self._reception, self._terms)
        try:
            self.desk.put(client)
        except InvalidArgument:
            self._reception.unwatch(client.pidfd)
            client.close()
            raise
        self._next_handle += 1
        self._clients[handle] = client
        grant = self._arena.grant(client) if attach.arena else None
        return client.welcome(token, self._reception.bell_endpoint, grant)

    def _evict(self, client: ClientPlace) -> None:
        """It wrote what no correct client writes."""
        self._counts["evicted"] += 1
        self._forget(client, EVICTED)

    def _forget(self, client: ClientPlace, state: int) -> None:
        client.requests.set_state(state)
        client.bell.ring()
        del self._clients[client.handle]
        for name, count in client.traffic().items():
            self._counts[name] += count
        self.desk.remove(client)
        self._reception.unwatch(client.pidfd)
        self._arena.end(client)
        client.close()

    def renew(self, catalogue: Catalogue) -> None:
        """Offer another catalogue: sessions opened from now on have it, the present ones drain.

        A client of theirs that wants to go on attaches anew, beside its old session, which ends when what is in flight
        there has ended. Raises `InvalidArgument`; nothing has changed then.
        """
        self._terms, now = self._terms_of(catalogue), time.monotonic_ns()
        for client in self._clients.values():
            if not client.renewed_ns:
                client.renewed_ns = now
                client.requests.set_state(DRAINING)
                client.bell.ring()

    def in_use(self, collection: str, identity: str) -> bool:
        """Whether this content of a collection is offered, by the catalogue of today or in a session that lasts."""
        every = (self._terms, *(client.terms for client in self._clients.values()))
        return any(
            (one.name, one.identity) == (collection, identity) for terms in every for one in terms.catalogue.served
        )

    def drain(self) -> None:
        """Take no new clients; the attached ones' `submit` raises `Draining`, or, told once more, `PeerLost`. What is
        in flight goes on."""
        state = CLOSED if self._draining else DRAINING
        self._draining = True
        for client in self._clients.values():
            client.requests.set_state(state)
            client.bell.ring()

    def close(self) -> None:
        """End all sessions; the clients' outstanding requests end there with status 'lost'. Idempotent."""
        if not self._reception.closed:
            for client in tuple(self._clients.values()):
                self._forget(client, CLOSED)
            self._reception.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> ServerStatistics:
        """Counters; cheap."""
        words = self.desk.words
        counts = self._counts | {
            "invalid": words[exchange.INVALID],
            "stale": words[exchange.STALE],
            "clients": len(self._clients),
        }
        for client in self._clients.values():
            counts["outstanding"] += client.outstanding
            for name, count in client.traffic().items():
                counts[name] += count
        return ServerStatistics(**counts)


def _is_over(client: ClientPlace, now: int) -> bool:
    """Whether a session that is being renewed has nothing to end, and its client had time to leave it.

    What the client may write at this very moment is lost with the session, and asked again.
    """
    if not client.renewed_ns or now < client.renewed_ns + RENEW_NS:
        return False
    return not client.outstanding and not client.requests.ready(1)
