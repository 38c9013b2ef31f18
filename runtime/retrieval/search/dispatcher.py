"""Where a client's queries go and how they end: to replicas and shards, again elsewhere, or to a typed error.

A question goes to one of the live pools that have its collection, or is split into one for each of the collection's
shards, whose answers are merged; `routes.py` says to which. All answers of one question come from one build of the
collection, which its result names. When a pool dies, its questions are asked again elsewhere, or wait until it is back,
within their deadlines: a search changes nothing, so asking twice is safe. When it is silent, another is asked as well.
Every question that was taken ends once. One without a deadline waits while its collection is answered, and 10 s more.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import count

import numpy as np
from msgspec.structs import replace

from ipc import Draining, InvalidArgument, PeerLost, Result, RingClient, RingFull
from runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded, TrinityError, Unavailable
from runtime.node.config import PoolSection
from runtime.retrieval.search.pool_session import PoolSession, ReplicaPolicy, Replicas
from runtime.retrieval.search.query import (
    Query,
    QueueLimits,
    SearchResult,
    SearchStatistics,
    ShardGather,
    failed_result,
    status_error,
)
from runtime.retrieval.search.routing import RoutingTable
from runtime.retrieval.search.vectors import Vectors

_MAX_ATTEMPTS = 3
_RETRYABLE = ("lost", "stale_epoch")  # what says nothing about the query
_IGNORED_WHILE_HEDGED = (*_RETRYABLE, "overloaded")  # of no weight while another pool has the query too
_HEDGE_EVERY_NS = 50_000_000  # how often the questions of silent pools are looked through
BATCH_QUERIES = 32  # questions of a batch that go to one pool before the next has its turn


class Dispatcher:
    """The `QueryTransport` to a node's pools: one client's sessions, and its questions, by `tickets`. One thread."""

    def __init__(
        self,
        endpoints: Iterable[str],
        name: str,
        settings: PoolSection,
        policy: ReplicaPolicy | None = None,
        find: Callable[[], Iterable[str]] | None = None,
        limits: QueueLimits | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        near: Collection[int] = (),
    ) -> None:
        self._name, self.settings, self._policy, self._find = name, settings, policy, find
        self._limits, self.clock = limits or QueueLimits(), clock
        self.tickets = count(1)
        self.pools = [self._session(endpoint) for endpoint in endpoints]
        self._up = [0] * len(self.pools)  # the sessions of those that are up, counted, as far as was noticed
        self._find_ns = 0  # not before then
        self._near = near
        self.replicas = Replicas(len(self.pools), policy, near)
        self.routes = RoutingTable()
        self._parked: deque[Query] = deque()  # waiting for any pool
        self._hedge_at_ns = 0  # not before then
        self._answered: dict[str, int] = {}  # collection → when the last of its queries was answered, in ns
        self._ended: list[SearchResult] = []
        self._open = True

    # ---- pools

    def _session(self, endpoint: str) -> PoolSession:
        return PoolSession(endpoint, self._name, self.settings, self._limits.retry_ns)

    def maintain(self, now_ns: int) -> bool:
        """Have sessions with as many pools as can be had. Whether there is one with any."""
        for number, pool in enumerate(self.pools):
            self._update_pool(number, pool.maintain(now_ns))
        if not any(self._up):
            self._rediscover(now_ns)
        return any(self._up)

    def _rediscover(self, now_ns: int) -> None:
        """All pools are lost: a node that was started again has others, where its run directory says."""
        if self._find is None or now_ns < self._find_ns or any(pool.asks for pool in self.pools):
            return
        self._find_ns = now_ns + self._limits.retry_ns
        try:
            endpoints = list(self._find())
        except TrinityError:  # the node is not up
            return
        if endpoints == [pool.endpoint for pool in self.pools]:
            return
        for pool, endpoint in zip(self.pools, endpoints, strict=False):
            pool.endpoint = endpoint
        for pool in self.pools[len(endpoints) :]:
            pool.close()
        kept = self.pools[: len(endpoints)]
        new = [self._session(endpoint) for endpoint in endpoints[len(kept) :]]
        self.pools = [*kept, *new]
        self._up = [0] * len(self.pools)
        self.replicas = Replicas(len(self.pools), self._policy, self._near)

    @property
    def connecting(self) -> bool:
        """Whether a pool is being looked for at this moment."""
        return any(pool.connecting for pool in self.pools)

    def _update_pool(self, number: int, live: bool) -> None:
        up = self.pools[number].opened if live else 0
        if up == self._up[number]:
            return
        if up and not self._up[number]:
            self.replicas.lost(number)  # what was known is of its last life
        self._up[number] = up
        offers = [(number, pool.catalogue, pool.live) for number, pool in enumerate(self.pools)]
        self.routes = RoutingTable(
            [(number, offer) for number, offer, live in offers if live and offer is not None],
            [offer for _, offer, live in offers if not live and offer is not None],
        )

    def clients(self) -> list[RingClient]:
        """The live sessions."""
        return [client for pool in self.pools for client in pool.clients()]

    @property
    def waiting(self) -> bool:
        """Whether a question waits for a pool."""
        return bool(self._parked)

    def only_busy(self) -> RingClient | None:
        """The one session that everything outstanding waits for, if there is just one."""
        busy = [client for pool in self.pools for client in pool.clients(busy=True)]
        return busy[0] if len(busy) == 1 and not self._parked else None

    # ---- questions

    def submit(self, query: Query, wait_for_room: bool = False) -> None:
        """Send a query, or park what cannot be sent now; with `wait_for_room` also while the rings are full.

        Raises `InvalidRequest`, `Overloaded`, `Unavailable` (closed): not taken.
        """
        if not self._open:
            self.check_open()
        parts, accept = [query], query.accept
        route: Sequence[int]
        identity, route = self.routes.direct.get(query.spec.collection, ("", ()))
        if not route or query.spec.filter:
            self.routes.check_filter(query.spec.collection, query.spec.filter)
        if not route or (accept is not None and not accept(identity)):
            parts = self._split(query)
            route = self._route(parts[0])
            if len(parts) > 1:
                self._check_room()
        try:
            sent = self._send(parts[0], route, self.clock())
        except Overloaded:
            if not wait_for_room:
                raise
            sent = False
        if not sent:
            self._check_room()
            self._park(parts[0])
        for part in parts[1:]:
            self._send_or_park(part)

    def check_open(self) -> None:
        """Raises `Unavailable` after `close`."""
        if not self._open:
            raise Unavailable("the search client was closed")

    def _check_room(self) -> None:
        if (count := len(self._parked)) >= self._limits.parked:
            raise Overloaded(f"{count} queries wait for a pool to take them, the limit is {self._limits.parked}")

    def _park(self, query: Query) -> None:
        query.parked_ns = query.parked_ns or self.clock()
        self._parked.append(query)

    def submit_many(self, queries: list[Query], rows: Vectors) -> int:
        """`ask` for as many questions as there is room for now, from the first on; how many.

        They are alike but for their vectors, `rows`, and no more than `BATCH_QUERIES`. Raises `InvalidRequest`,
        `Unavailable` (closed).
        """
        self.check_open()
        collection = queries[0].spec.collection
        self.routes.check_filter(collection, queries[0].spec.filter)
        if self.routes.shards(collection) != 1:
            return self._submit_each(queries)
        now, sent = self.clock(), 0
        for number in self.replicas.choose(self.routes.choose(collection, queries[0].accept), now):
            try:
                sent = self.pools[number].submit_many(rows, queries)
            except (RingFull, PeerLost, Draining):
                continue
            except InvalidArgument as error:
                raise InvalidRequest(str(error)) from error
            self.replicas.sent(number, now, sent)
            break
        return sent

    def _submit_each(self, queries: list[Query]) -> int:
        for number, query in enumerate(queries):
            try:
                self.submit(query)
            except TrinityError as error:
                if number == 0 and not isinstance(error, Overloaded):
                    raise
                return number  # it is the first of the next ones
        return len(queries)

    def _split(self, query: Query) -> list[Query]:
        """The question itself, or what each shard is asked of it, once every shard of one build is there."""
        collection = query.spec.collection
        if query.gather is not None or (shards := self.routes.shards(collection)) <= 1:
            return [query]
        identity = self.routes.whole_build(collection, query.accept)
        if identity is None:
            return [query]
        gather = ShardGather(query, identity, query.spec.k, shards)
        return [replace(query, shard=shard, gather=gather) for shard in range(shards)]

    def _send_or_park(self, query: Query) -> bool:
        with suppress(Overloaded):
            if self._send(query, self._route(query), self.clock()):
                return True
        self._park(query)
        return False

    def _send(self, query: Query, route: Sequence[int], now: int) -> bool:
        """Give a question to one of these pools; False if none is up. Raises `Overloaded`, `InvalidRequest`."""
        full: RingFull | None = None
        for number in self.replicas.choose(route, now) if len(route) > 1 else route:
            try:
                self.pools[number].submit(query)
            except RingFull as error:
                full = error
            except (PeerLost, Draining):
                continue
            except InvalidArgument as error:
                raise InvalidRequest(str(error)) from error
            else:
                self.replicas.sent(number, now)
                query.parked_ns = 0
                return True
        if full is not None:
            raise Overloaded(str(full)) from full
        return False

    def _route(self, query: Query) -> Sequence[int]:
        collection, gather = query.spec.collection, query.gather
        if gather is not None:
            return self.routes.pools(collection, gather.identity, query.shard)
        if self.routes.shards(collection) > 1:
            return ()  # it is split once all shards are there
        return self.routes.choose(collection, query.accept)

    def cancel(self, ticket: int) -> None:
        """A question's result is not wanted any more; it comes as an error, or not at all."""
        if self._parked:
            self._parked = deque(query for query in self._parked if query.ticket != ticket)
        for pool in self.pools:
            pool.cancel(ticket, _MAX_ATTEMPTS)

    # ---- ends

    def collect(self) -> list[SearchResult]:
        """What has ended since the last call. Raises `Unavailable` after `close`."""
        self.check_open()
        now = self.clock()
        for number, pool in enumerate(self.pools):
            for query, result in pool.poll(now):
                self.replicas.answered(number, now - result.enqueue_ns if result.status == "ok" else None, now)
                self._end(query, result, now)
            self._update_pool(number, pool.maintain(now))
        if not any(self._up):
            self._rediscover(now)
        if now >= self._hedge_at_ns and len(self.pools) > 1:
            self._hedge_at_ns = now + _HEDGE_EVERY_NS
            self.hedge(now)
        if self._parked:
            self._retry_parked(now)
        ended, self._ended = self._ended, []
        return ended

    def hedge(self, now: int) -> None:
        """Ask others what pools were asked that have fallen silent: each question once, where there is room."""
        stalled = {number for number in range(len(self.pools)) if self.replicas.stalled(number, now)}
        for number in stalled:
            for query in self.pools[number].queries():
                if query.ended or query.at > 1 or query.attempts >= _MAX_ATTEMPTS:
                    continue
                with suppress(TrinityError):  # it may still be answered where it is
                    self._send(query, [other for other in self._route(query) if other not in stalled], now)

    def _retry_parked(self, now: int) -> None:
        full: set[tuple[str, str, int]] = set()  # builds' shards of which no pool is up, or none has room
        for _ in range(len(self._parked)):
            query = self._parked.popleft()
            if query.gather is not None:
                if query.gather.ended:
                    continue
                query = self._restart_on_whole_build(query, query.gather)
            end = self.wait_error(query, query.parked_ns, now)
            if end is not None:
                self._fail(query, end)
                continue
            try:
                parts = self._split(query)
                for part in parts:
                    place = part.spec.collection, part.gather.identity if part.gather else "", part.shard
                    if place in full:
                        self._parked.append(part)
                    elif not self._send_or_park(part) and part.accept is None:
                        full.add(place)
            except TrinityError as error:
                self._fail(query, error)

    def _restart_on_whole_build(self, part: Query, gather: ShardGather) -> Query:
        """The part; or the whole question, from the start, if shards of its build are gone and another is whole."""
        collection = gather.whole.spec.collection
        if self.routes.is_whole(collection, gather.identity):
            return part
        with suppress(TrinityError):  # it ends when it is sent
            if self.routes.whole_build(collection, gather.whole.accept) is None:
                return part
        gather.ended = True  # never a part of an answer
        for pool in self.pools:
            pool.cancel(part.ticket, _MAX_ATTEMPTS)
        gather.whole.parked_ns, gather.whole.attempts = part.parked_ns, 0
        return gather.whole

    def wait_error(self, query: Query, since_ns: int, now_ns: int) -> TrinityError | None:
        """What ends a question that has waited for a pool since `since_ns`; None if it may wait on."""
        if query.spec.deadline_ns:
            late = now_ns >= query.spec.deadline_ns
            return DeadlineExceeded("no pool took the query before its deadline") if late else None
        if now_ns < max(since_ns, self._answered.get(query.spec.collection, 0)) + self._limits.wait_ns:
            return None
        collection = query.spec.collection
        try:
            shards = self.routes.shards(collection)
            if query.gather is not None:
                up = {query.shard: bool(self._route(query))}
            elif shards > 1:
                up = {shard: self.routes.has_shard(collection, shard) for shard in range(shards)}
            else:
                up = {0: bool(self._route(query))}
        except TrinityError as error:
            return error
        for shard in (shard for shard, there in up.items() if not there):
            of = f"shard {shard} of " if shards > 1 else ""
            return Unavailable(f"no pool with {of}{collection!r} is up")
        return Unavailable(f"no pool with {collection!r} had room for {self._limits.wait_ns / 1e9:g} s")

    def _end(self, query: Query, result: Result, now: int) -> None:
        gather = query.gather
        if query.ended or (gather is not None and gather.ended):
            return  # another pool has answered it, or its query has ended without it
        if query.at and result.status in _IGNORED_WHILE_HEDGED:
            return
        if result.status == "ok" and len(result.distances) and np.isnan(result.distances[-1]):
            # No healthy index has such a distance: vectors and queries are checked to be finite.
            damaged = f"collection {query.spec.collection!r} is damaged: its index gave a distance that is no number"
            self._fail(query, Unavailable(damaged))
        elif result.status == "ok":
            wait_ns, search_ns = result.begin_ns - result.enqueue_ns, result.end_ns - result.begin_ns
            found = SearchResult(
                query.ticket, result.ids, result.distances, result.extends, wait_ns, search_ns,
                identity=query.identity,
            )  # fmt: skip
            whole = found if gather is None else gather.add(found)
            query.ended = True
            if query.at:
                for pool in self.pools:
                    pool.withdraw(query)
            if whole is not None:
                self._answered[query.spec.collection] = now
                self._ended.append(whole)
        elif result.status in _RETRYABLE and query.attempts < _MAX_ATTEMPTS:
            self._park(query)
        else:
            self._fail(query, status_error(result.status, query))

    def _fail(self, query: Query, error: TrinityError) -> None:
        query.ended = True
        if query.gather is not None:
            query.gather.ended = True  # never a part of an answer
            for pool in self.pools:
                pool.cancel(query.ticket, _MAX_ATTEMPTS)
        self._ended.append(failed_result(query.ticket, error))

    def statistics(self) -> SearchStatistics:
        """See `SearchStatistics`."""
        pools = (pool.statistics(self.replicas.slow(number)) for number, pool in enumerate(self.pools))
        return SearchStatistics(tuple(pools), len(self._parked))

    def close(self) -> None:
        """End the sessions. What is outstanding never comes."""
        self._open = False
        for pool in self.pools:
            pool.close()
