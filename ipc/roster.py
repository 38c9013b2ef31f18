"""The clients of a pool: let in, looked after, told to drain, given up."""

from ipc.arena_grants import ArenaGrants
from ipc.descriptors import Cancel
from ipc.endpoints import new_token
from ipc.errors import InvalidArgument, IpcError, ProtocolViolation
from ipc.parameters import Limits
from ipc.places import ClientPlace
from ipc.reception import ASKED, Reception
from ipc.ring import CLOSED, DRAINING, EVICTED, OPEN, RingLayout, Watch
from ipc.session import VERSION, Attach, Attached, Refused, Served
from ipc.statistics import ServerStatistics

JOIN_NS = 10_000_000_000  # how long a client may take to open its rings; longer than those that try again wait
_MAX_NAME = 100


class Roster:
    """Who is attached, by handle and in turns, and the sessions' beginnings and ends. One thread; never waits.

    layouts: of every client's request and result ring. max_dim: of the longest vector. max_clients: places.
    """

    def __init__(
        self,
        reception: Reception,
        served: tuple[Served, ...],
        limits: Limits,
        layouts: tuple[RingLayout, RingLayout],
        epoch: int,
        max_dim: int,
        max_clients: int,
        arena: ArenaGrants,
    ) -> None:
        self._reception, self._served, self._limits, self._layouts = reception, served, limits, layouts
        self._epoch, self._max_dim, self._max_clients, self._arena = epoch, max_dim, max_clients, arena
        self.clients: dict[int, ClientPlace] = {}
        self.turns: list[ClientPlace] = []
        self.turn = 0
        """Whose requests are read next."""
        self.watch = Watch([])
        """Over the request rings of `turns`."""
        self.cancelled: list[Cancel] = []
        """What nobody waits for any more, not yet told."""
        self.next_handle = 1
        self.counts = dict.fromkeys(ServerStatistics.__struct_fields__, 0)
        self._draining = False

    def look_after(self, now: int) -> None:
        """Part with who is gone, give signs of life, and let in who asks. Monotonic ns."""
        heard = self._reception.listen(0)
        for client in tuple(self.turns):
            try:
                absent = not client.joined and not client.has_joined() and now > client.granted_ns + JOIN_NS
                if absent or client.pidfd in heard or client.requests.producer_state == CLOSED:
                    self.counts["lost"] += 1
                    self._forget(client, CLOSED)
                    continue
                client.requests.beat(now)
                if client.results.free() > len(client.outstanding):
                    client.requests.resume()
            except ProtocolViolation:
                self.evict(client)
        if ASKED in heard:  # last: a new client may take the place of one that is gone
            for asker, attach in self._reception.asks():
                self._reception.answer(asker, self._answer(attach))

    def _answer(self, attach: Attach | Refused) -> Attached | Refused:
        if isinstance(attach, Refused):
            self.counts["malformed"] += 1
            return attach
        try:
            answer = self._attach(attach)
        except (IpcError, OSError) as error:
            self.counts["refused"] += 1
            return Refused(str(error))
        self.counts["attached"] += 1
        return answer

    def _attach(self, attach: Attach) -> Attached:
        if attach.version != VERSION:
            raise InvalidArgument(f"protocol version {attach.version}, this pool speaks {VERSION}")
        if len(attach.name) > _MAX_NAME:
            raise InvalidArgument(f"a name has at most {_MAX_NAME} characters, got {len(attach.name)}")
        if self._draining:
            raise InvalidArgument("the pool is draining")
        if len(self.clients) >= self._max_clients:
            raise InvalidArgument(f"all {self._max_clients} places for clients are taken")
        handle, token = self.next_handle, new_token().encode()
        client = ClientPlace.make(handle, attach, token, self._reception, self._layouts, self._epoch, self._max_dim)
        self.next_handle += 1
        self.clients[handle] = client
        self.turns.append(client)
        self._watch_all()
        grant = self._arena.grant(client) if attach.arena else None
        return client.welcome(token, self._served, self._limits, self._reception.bell_endpoint, grant)

    def evict(self, client: ClientPlace) -> None:
        """It wrote what no correct client writes."""
        self.counts["evicted"] += 1
        self._forget(client, EVICTED)

    def _forget(self, client: ClientPlace, state: int) -> None:
        client.requests.set_state(state)
        client.bell.ring()
        gone = (request_id for request_id in client.outstanding if request_id not in client.cancelled)
        self.cancelled += [Cancel(client.handle, request_id) for request_id in gone]
        del self.clients[client.handle]
        self.turns.remove(client)
        for name, count in client.traffic().items():
            self.counts[name] += count
        self._watch_all()
        self._reception.unwatch(client.pidfd)
        self._arena.end(client)
        client.close()

    def _watch_all(self) -> None:
        self.turn = 0
        self.watch = Watch([client.requests for client in self.turns])

    def drain(self) -> None:
        """Let nobody in; tell the attached ones, or those told already that it is over."""
        self._draining = True
        for client in self.turns:
            client.requests.set_state(DRAINING if client.requests.consumer_state == OPEN else CLOSED)
            client.bell.ring()

    def close(self) -> None:
        """End all sessions."""
        for client in tuple(self.turns):
            self._forget(client, CLOSED)

    def statistics(self) -> ServerStatistics:
        """Counters; cheap."""
        counts = self.counts | {"clients": len(self.turns)}
        for client in self.turns:
            counts["outstanding"] += len(client.outstanding)
            for name, count in client.traffic().items():
                counts[name] += count
        return ServerStatistics(**counts)
