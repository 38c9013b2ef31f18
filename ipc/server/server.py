"""The pool's side of sessions: who is attached, and whose requests may be read."""

from collections.abc import Iterator, Mapping
from typing import Self

from ipc.errors import InvalidArgument, IpcError, MemoryRefused, ProtocolViolation
from ipc.ring import exchange
from ipc.ring.descriptors import STATUS_CODES, Float32s
from ipc.server.arena_grants import ArenaGrants
from ipc.server.places import ClientPlace, Desk, Number, Terms
from ipc.server.reception import Reception
from ipc.server.roster import Roster
from ipc.session.device_arena import DeviceArena
from ipc.session.messages import Catalogue, Served, ServerStatistics


class SessionServer:
    """Serves sessions to clients; requests and results themselves are exchanged over its `desk` (`exchange.py`), by a
    compiled loop. One thread; nothing here blocks.

    SessionServer(endpoint, {"docs": 384}, epoch=7): `endpoint` from `private_endpoint`; `collections` a `Catalogue`, or
    simply name → vector dimension; `epoch` 0..2³²-1, another one in every life of this process; `ring_slots` requests a
    client may have outstanding; `max_k`, `max_top_m` limits of what a descriptor may ask (over them: status
    'invalid_request'); `arena` where clients may put their vectors instead of into their rings: who asks is granted one
    `max_clients`-th of its slots, at most `ring_slots`; `number` what the desk calls each collection.
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
        terms = self._terms(collections)
        self._generation = 0  # of the filter that was read last
        each = 0 if arena is None else min(ring_slots, max(1, arena.slots // max_clients))
        self._arena = ArenaGrants(arena, each)
        self._reception = Reception(endpoint)
        self._roster = Roster(self._reception, terms, max_clients, self._arena)
        self._clients = self._roster.clients

    def _terms(self, collections: Catalogue | Mapping[str, int]) -> Terms:
        if not isinstance(collections, Catalogue):
            collections = Catalogue(tuple(Served(name, dim) for name, dim in collections.items()))
        return Terms(collections, self.epoch, *self._sizes, self._number)

    # ---- what a loop over the desk needs

    @property
    def desk(self) -> Desk:
        """For `exchange.py`."""
        return self._roster.desk

    def housekeep(self, now: int) -> None:
        """Let in who asks, evict dead clients, beat. Those that have gone: `desk.take_vacated`."""
        self._roster.look_after(now)

    def evict(self, row: int) -> None:
        """The client in this row wrote what no correct client writes."""
        place = self.desk.places[row]
        if place is not None:
            self._roster.evict(place)

    def take_from_arena(self) -> None:
        """The request found has its vector in the arena: it is accepted, and comes with `arrived`.

        Its client is evicted if it names a place that it cannot have.
        """
        words = self.desk.words
        place = self._place_of_request()
        try:
            self._arena.put(place, words)
        except IpcError:
            self._roster.evict(place)
            return
        exchange.accept_request(self.desk.address)
        exchange.release_request(self.desk.address)

    def arrived(self) -> Iterator[Float32s]:
        """Vectors out of the arena that are there by now; the desk's words are each one's request meanwhile."""
        try:
            yield from self._arena.arrived(self.desk.words)
        except MemoryRefused:  # the device has failed, and with it whoever has vectors there
            for place in set(self._arena.readers):
                self._roster.evict(place)

    def filter_of_request(self) -> bytes | None:
        """The filter of the request found, which is not known yet: `know_filter`, or `refuse`. None: its client was
        evicted for what it wrote there."""
        place = self._place_of_request()
        try:
            self._generation, found = place.filter(self.desk.words[exchange.PLACE])
        except ProtocolViolation:
            self._roster.evict(place)
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
            self._roster.evict(place)
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
        return self._roster.counts["malformed"]

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> ServerStatistics:
        """Counters; cheap."""
        return self._roster.statistics()
