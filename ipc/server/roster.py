"""The clients of a pool: let in, looked after, told to drain, given up."""

import time

from ipc.endpoints import new_token
from ipc.errors import InvalidArgument, IpcError, ProtocolViolation
from ipc.ring.exchange import INVALID, STALE
from ipc.ring.ring import CLOSED, DRAINING, EVICTED
from ipc.server.arena_grants import ArenaGrants
from ipc.server.places import ClientPlace, Desk, Terms
from ipc.server.reception import ASKED, Reception
from ipc.session.messages import VERSION, Attach, Attached, Refused, ServerStatistics

RENEW_NS = 2_000_000_000  # how long a client may take to open a session in the place of an idle one
JOIN_NS = 10_000_000_000  # how long a client may take to open its rings; longer than those that try again wait
_MAX_NAME = 100


class Roster:
    """Who is attached, by handle and in turns, and the sessions' beginnings and ends. One thread; never waits.

    terms: of sessions opened from now on. max_clients: how many may have such; a session that is being renewed does not
    count, and of those there may be as many again.
    """

    def __init__(self, reception: Reception, terms: Terms, max_clients: int, arena: ArenaGrants) -> None:
        self._reception, self._terms, self._max_clients, self._arena = reception, terms, max_clients, arena
        self.clients: dict[int, ClientPlace] = {}
        self.turns: list[ClientPlace] = []
        self.desk = Desk(terms.epoch, terms.limits.max_k, terms.limits.max_top_m, 2 * max_clients)
        self.next_handle = 1
        self.counts = dict.fromkeys(ServerStatistics.__struct_fields__, 0)
        self._draining = False

    def look_after(self, now: int) -> None:
        """Remove clients that are gone, and let in those that ask. Monotonic ns."""
        heard = self._reception.listen()
        for client in tuple(self.turns):
            try:
                absent = not client.joined and not client.has_joined() and now > client.granted_ns + JOIN_NS
                gone = absent or client.pidfd in heard or client.requests.producer_state == CLOSED
                if gone or self._over(client, now):
                    self.counts["lost"] += 1
                    self._forget(client, CLOSED)
                    continue
                if client.results.free() > client.outstanding:
                    client.requests.resume()
            except ProtocolViolation:
                self.evict(client)
        if ASKED in heard:  # last: a new client may take the place of one that is gone
            for asker, attach in self._reception.asks():
                self._reception.answer(asker, self._answer(attach))

    def _over(self, client: ClientPlace, now: int) -> bool:
        """Whether a session that is being renewed has nothing to end, and its client had time to leave it.

        What the client may write at this very moment is lost with the session, and asked again.
        """
        if not client.renewed_ns or now < client.renewed_ns + RENEW_NS:
            return False
        return not client.outstanding and not client.requests.ready(1)

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
        renewed = sum(client.renewed_ns > 0 for client in self.turns)
        if len(self.turns) - renewed >= self._max_clients or len(self.turns) >= 2 * self._max_clients:
            raise InvalidArgument(f"all {self._max_clients} places for clients are taken")
        handle, token = self.next_handle, new_token().encode()
        client = ClientPlace.make(handle, attach, token, self._reception, self._terms)
        try:
            self.desk.put(client)
        except InvalidArgument:
            self._reception.unwatch(client.pidfd)
            client.close()
            raise
        self.next_handle += 1
        self.clients[handle] = client
        self.turns.append(client)
        grant = self._arena.grant(client) if attach.arena else None
        return client.welcome(token, self._reception.bell_endpoint, grant)

    def evict(self, client: ClientPlace) -> None:
        """It wrote what no correct client writes."""
        self.counts["evicted"] += 1
        self._forget(client, EVICTED)

    def _forget(self, client: ClientPlace, state: int) -> None:
        client.requests.set_state(state)
        client.bell.ring()
        del self.clients[client.handle]
        self.turns.remove(client)
        for name, count in client.traffic().items():
            self.counts[name] += count
        self.desk.remove(client)
        self._reception.unwatch(client.pidfd)
        self._arena.end(client)
        client.close()

    def renew(self, terms: Terms) -> None:
        """Open sessions on other terms from now on; tell the attached clients to leave theirs."""
        self._terms, now = terms, time.monotonic_ns()
        for client in self.turns:
            if not client.renewed_ns:
                client.renewed_ns = now
                client.requests.set_state(DRAINING)
                client.bell.ring()

    def offers(self, collection: str, identity: str) -> bool:
        """Whether the terms of today, or of a session that lasts, offer this content of a collection."""
        every = (self._terms, *(client.terms for client in self.turns))
        return any(
            (one.name, one.identity) == (collection, identity) for terms in every for one in terms.catalogue.served
        )

    def drain(self) -> None:
        """Let nobody in; tell the attached ones, or those told already that it is over."""
        state = CLOSED if self._draining else DRAINING
        self._draining = True
        for client in self.turns:
            client.requests.set_state(state)
            client.bell.ring()

    def close(self) -> None:
        """End all sessions."""
        for client in tuple(self.turns):
            self._forget(client, CLOSED)

    def statistics(self) -> ServerStatistics:
        """Counters; cheap."""
        words = self.desk.words
        counted = {"invalid": words[INVALID], "stale": words[STALE]}
        counts = self.counts | counted | {"clients": len(self.turns)}
        for client in self.turns:
            counts["outstanding"] += client.outstanding
            for name, count in client.traffic().items():
                counts[name] += count
        return ServerStatistics(**counts)
