"""Server end of sessions: attaches, drains and evicts a pool's clients."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ipc.endpoints import new_token
from ipc.errors import InvalidArgument, IpcError, ProtocolViolation, RingFull
from ipc.native.records import copy_of
from ipc.ring import exchange
from ipc.ring.descriptors import STATUS_CODES, Float32s
from ipc.ring.exchange import CurrentRequest, SessionCollection
from ipc.ring.ring import CLOSED, DRAINING, EVICTED
from ipc.server.client_table import AttachedClient, ClientTable, Searches, Terms
from ipc.server.session_listener import ATTACH_PENDING, SessionListener
from ipc.session.device_arena import DeviceArena
from ipc.session.messages import VERSION, Attach, Attached, Catalogue, Grant, Refused, Served

RENEW_NS = 2_000_000_000  # time for a client to replace an idle session that is being renewed
JOIN_NS = 10_000_000_000  # time for a client to open its rings; longer than the timeout of clients that retry
_MAX_NAME = 100


@dataclass(frozen=True, eq=False)
class SetAside:
    """A request that was set aside, and a copy of its vector."""

    request: CurrentRequest
    vector: Float32s


class SessionServer:
    """Serves sessions to clients. A compiled loop exchanges requests and results over `client_table` (`exchange.py`).

    One thread; nothing here blocks. SessionServer(endpoint, {"docs": 384}, epoch=7):
    `endpoint`: from `private_endpoint`. `collections`: a `Catalogue`, or simply name → vector dimension. `epoch`:
    0..2³²-1, a different one for each start of this process. `ring_slots`: requests that a client may have outstanding.
    `max_k`, `max_top_m`: limits of a request (beyond: status 'invalid_request'). `arena`: memory into which clients may
    write their vectors instead of their rings; a client that requests it is granted one `max_clients`-th of its slots,
    at most `ring_slots`. `searches`: what requests to each collection search. Sessions that are being renewed do not
    count towards `max_clients`; there may be as many again.
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
        searches: Searches = lambda served: SessionCollection(scope=-1),
    ) -> None:
        if max_clients < 1:
            raise InvalidArgument(f"max_clients must be at least 1, got {max_clients}")
        self.endpoint = endpoint
        self.epoch = epoch
        self._sizes = (ring_slots, max_k, max_top_m)
        self._searches = searches
        self._terms = self._terms_of(collections)  # of new sessions
        self._generation = 0  # of the filter read last
        self._arena = arena
        self._arena_slots = 0 if arena is None else min(ring_slots, max(1, arena.slots // max_clients))  # of a client
        self._arena_memory = None if arena is None else arena.memory.reference  # exported once
        self._listener = SessionListener(endpoint)
        self._max_clients = max_clients
        self._clients: dict[int, AttachedClient] = {}  # by handle
        self.client_table = ClientTable(epoch, max_k, max_top_m, 2 * max_clients)
        """Works with `exchange.py`."""
        self._next_handle = 1
        self.malformed = 0
        """Malformed session messages so far."""
        self._draining = False

    def _terms_of(self, collections: Catalogue | Mapping[str, int]) -> Terms:
        if not isinstance(collections, Catalogue):
            collections = Catalogue(tuple(Served(name, dim) for name, dim in collections.items()))
        return Terms(collections, self.epoch, *self._sizes, self._searches)

    # ---- interface of the loop

    @property
    def request(self) -> CurrentRequest:
        """The request that the loop found last."""
        return self.client_table.fields.request

    def evict(self, row: int) -> None:
        """Evict the client in this row for a protocol violation."""
        client = self.client_table.clients[row]
        if client is not None:
            self._evict(client)

    def request_filter(self) -> bytes | None:
        """Return the current request's filter, to be followed by `cache_filter` or `refuse`.

        None: its client was evicted for a protocol violation.
        """
        client = self._requesting_client()
        try:
            self._generation, content = client.read_filter(self.request.filter_slot)
        except ProtocolViolation:
            self._evict(client)
            return None
        return content

    def cache_filter(self, scope: int) -> None:
        """Cache the scope of the current request's filter: `find_request` finds it from now on."""
        request, client = self.request, self._requesting_client()
        client.cache_filter(request.filter_slot, self._generation, request.collection_code, scope)

    def invalidate_filter(self, scope: int) -> None:
        """Drop a filter's scope from all clients' caches."""
        for client in self.client_table.clients:
            if client is not None:
                client.invalidate_filter(scope)

    def set_aside(self) -> SetAside:
        """Accept the current request and return it, for `resume` or an answer later; later requests go on meanwhile."""
        client, request = self._requesting_client(), copy_of(self.request)
        aside = SetAside(request, client.vectors[request.slot, : request.dim].copy())
        exchange.accept_request(self.client_table.address)
        return aside

    def resume(self, aside: SetAside) -> None:
        """Make a request that was set aside the current request again."""
        self.client_table.fields.request = aside.request

    def refuse(self, status: str) -> None:
        """End the current request, which was not accepted, with this status."""
        client = self._requesting_client()
        if exchange.refuse_request(self.client_table.address, STATUS_CODES[status]) == exchange.EVICT:
            self._evict(client)
        self.client_table.ring_bells()

    def _requesting_client(self) -> AttachedClient:
        client = self.client_table.clients[self.request.row]
        assert client is not None
        return client

    @property
    def client_count(self) -> int:
        """Number of attached clients."""
        return len(self._clients)

    # ---- sessions

    def has_requests(self) -> bool:
        """Whether a request can be received from any ring. Cheap; for code that is busy elsewhere."""
        return bool(exchange.has_request(self.client_table.address))

    def fileno(self) -> int:
        """Readable on a doorbell, a session message or a client's death; level-triggered."""
        return self._listener.fileno()

    @property
    def has_events(self) -> bool:
        """Whether `fileno` is readable."""
        return self._listener.has_events

    def wake_on(self, fd: int) -> None:
        """Make `fileno` readable also when `fd`, which its owner reads, is."""
        self._listener.watch(fd)

    @property
    def bell_fileno(self) -> int:
        """File descriptor of the eventfd that clients ring, which compiled code silences."""
        return self._listener.bell_fileno

    def housekeep(self, now: int) -> None:
        """Remove dead clients and attach new ones at `now`, monotonic ns. The client table reports vacated rows."""
        events = self._listener.poll_events()
        for client in tuple(self._clients.values()):
            try:
                absent = not client.has_joined() and now > client.attached_ns + JOIN_NS
                gone = absent or client.pidfd in events or client.requests.producer_state == CLOSED
                if gone or _is_drained(client, now):
                    self._forget(client, CLOSED)
                    continue
                if client.results.free() > client.outstanding:
                    client.requests.resume()
            except ProtocolViolation:
                self._evict(client)
        if ATTACH_PENDING in events:  # last: a new client may reuse what a removed one has freed
            for sender, attach in self._listener.receive_attaches():
                self._listener.reply(sender, self._answer(attach))

    def _answer(self, attach: Attach | Refused) -> Attached | Refused:
        if isinstance(attach, Refused):
            self.malformed += 1
            return attach
        try:
            return self._attach(attach)
        except (IpcError, OSError) as error:
            return Refused(str(error))

    def _attach(self, attach: Attach) -> Attached:
        if attach.version != VERSION:
            raise InvalidArgument(f"protocol version {attach.version}, this pool speaks {VERSION}")
        if len(attach.name) > _MAX_NAME:
            raise InvalidArgument(f"a name has at most {_MAX_NAME} characters, got {len(attach.name)}")
        if self._draining:
            raise InvalidArgument("the pool is draining")
        renewed = sum(client.renewed_ns > 0 for client in self._clients.values())
        if len(self._clients) - renewed >= self._max_clients or len(self._clients) >= 2 * self._max_clients:
            raise InvalidArgument(f"the limit of {self._max_clients} clients is reached")
        handle, token = self._next_handle, new_token().encode()
        client = AttachedClient(handle, attach, token, self._listener, self._terms)
        try:
            self.client_table.add(client)
        except InvalidArgument:
            self._listener.unwatch(client.pidfd)
            client.close()
            raise
        self._next_handle += 1
        self._clients[handle] = client
        grant = self._grant(client) if attach.arena else None
        return client.attached(token, self._listener.bell_endpoint, grant)

    def _grant(self, client: AttachedClient) -> Grant | None:
        """Lease slots of the arena to a client. None without an arena, with too few free slots, or too small ones."""
        arena, memory = self._arena, self._arena_memory
        if arena is None or memory is None or 4 * client.terms.max_dim > arena.payload_bytes:
            return None
        try:
            client.lease = lease = arena.lease(self._arena_slots)
        except (RingFull, InvalidArgument):
            return None
        fields = client.fields
        fields.arena, fields.arena_stride, fields.arena_slots = arena.address_of(lease.first), arena.stride, lease.count
        return Grant(lease, memory)

    def _evict(self, client: AttachedClient) -> None:
        """End the session of a client that violated the protocol."""
        self._forget(client, EVICTED)

    def _forget(self, client: AttachedClient, state: int) -> None:
        client.requests.set_state(state)
        client.bell.ring()
        del self._clients[client.handle]
        self.client_table.remove(client)
        self._listener.unwatch(client.pidfd)
        if self._arena is not None and client.lease is not None:
            self._arena.end_lease(client.lease)
        client.close()

    def renew(self, catalogue: Catalogue) -> None:
        """Replace the catalogue: new sessions have the new one, present sessions drain.

        A client of a draining session attaches again; the old session ends once its requests in flight have ended.
        Raises `InvalidArgument`, without any effect.
        """
        self._terms, now = self._terms_of(catalogue), time.monotonic_ns()
        for client in self._clients.values():
            if not client.renewed_ns:
                client.renewed_ns = now
                client.requests.set_state(DRAINING)
                client.bell.ring()

    def in_use(self, collection: str, identity: str) -> bool:
        """Whether this build of a collection is in the current catalogue or in that of an open session."""
        every = (self._terms, *(client.terms for client in self._clients.values()))
        return any(
            (one.name, one.identity) == (collection, identity) for terms in every for one in terms.catalogue.served
        )

    def drain(self) -> None:
        """Attach no new clients; `submit` of the attached ones raises `Draining`, after a second call `PeerLost`.

        Requests in flight are still served.
        """
        state = CLOSED if self._draining else DRAINING
        self._draining = True
        for client in self._clients.values():
            client.requests.set_state(state)
            client.bell.ring()

    def close(self) -> None:
        """End all sessions; the clients' outstanding requests end with status 'lost'. Idempotent."""
        if not self._listener.closed:
            for client in tuple(self._clients.values()):
                self._forget(client, CLOSED)
            self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_drained(client: AttachedClient, now: int) -> bool:
    """Return whether a session being renewed has no request left and its client had time to replace it.

    A request that the client writes at this moment ends as lost with the session, and the client retries it.
    """
    if not client.renewed_ns or now < client.renewed_ns + RENEW_NS:
        return False
    return not client.outstanding and not client.requests.ready(1)
