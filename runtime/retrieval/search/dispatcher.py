"""Dispatch of a client's queries to pools: replicas and shards, retries, hedging, typed errors.

A query is sent to one of the live pools that serve its collection, or split into one part per shard whose results are
merged; `routing.py` chooses the pools. All results of one query come from one build of the collection, which the result
names. If a pool dies, its queries are retried on others, or wait until it is back, within their deadlines: a search is
idempotent, so a retry is safe. If a pool is stalled, another gets the query too. Every accepted query ends once; one
without a deadline waits as long as queries of its collection are answered, and 10 s more.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

import numpy as np
from msgspec.structs import replace

from ipc import Draining, InvalidArgument, PeerLost, Result, RingClient, RingFull
from runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded, TrinityError, Unavailable
from runtime.retrieval.search.node_pools import NodePools
from runtime.retrieval.search.query import (
    Query,
    QueueLimits,
    SearchResult,
    SearchStatistics,
    ShardGather,
    failed_result,
    status_error,
)

_MAX_ATTEMPTS = 3
_RETRYABLE = ("lost", "stale_epoch")  # the pool failed, not the query
_IGNORED_WHILE_HEDGED = (*_RETRYABLE, "overloaded")  # while another pool has the query too
_HEDGE_EVERY_NS = 50_000_000  # interval of checks for stalled pools


class Dispatcher:
    """A client's outstanding queries to a node's `pools`. Not thread-safe; no method blocks.

    `tickets` numbers the client's queries.
    """

    def __init__(self, pools: NodePools, limits: QueueLimits, clock: Callable[[], int]) -> None:
        self.pools, self._limits, self.clock = pools, limits, clock
        self.tickets = count(1)
        self._parked: deque[Query] = deque()  # waiting for a pool
        self._hedge_at_ns = 0  # time of the next check for stalled pools
        self._answered: dict[str, int] = {}  # collection → time of its last answer, ns
        self._ended: list[SearchResult] = []
        self._open = True

    @property
    def waiting(self) -> bool:
        """Whether a query waits for a pool."""
        return bool(self._parked)

    def only_busy(self) -> RingClient | None:
        """Return the only session with outstanding queries, if there is exactly one and no query is parked."""
        busy = self.pools.clients(busy=True)
        return busy[0] if len(busy) == 1 and not self._parked else None

    # ---- queries

    def submit(self, query: Query, wait_for_room: bool = False) -> None:
        """Send a query, or park what cannot be sent now; with `wait_for_room` also while the rings are full.

        Raises `InvalidRequest`, `Overloaded`, `Unavailable` (closed) if it is not accepted.
        """
        if not self._open:
            self.check_open()
        parts, accept = [query], query.accept
        route: Sequence[int]
        identity, route = self.pools.routes.direct.get(query.spec.collection, ("", ()))
        if not route or query.spec.filter:
            self.pools.routes.check_filter(query.spec.collection, query.spec.filter)
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
        """Raise `Unavailable` after `close`."""
        if not self._open:
            raise Unavailable("the search client was closed")

    def _check_room(self) -> None:
        if (count := len(self._parked)) >= self._limits.parked:
            raise Overloaded(f"{count} queries wait for a pool to take them, the limit is {self._limits.parked}")

    def _park(self, query: Query) -> None:
        query.parked_ns = query.parked_ns or self.clock()
        self._parked.append(query)

    def _split(self, query: Query) -> list[Query]:
        """Return the query itself, or a part per shard once some build has all of its shards up."""
        collection = query.spec.collection
        if query.gather is not None or (shards := self.pools.routes.shards(collection)) <= 1:
            return [query]
        identity = self.pools.routes.whole_build(collection, query.accept)
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
        """Send a query to one of these pools. Return False if none is up. Raises `Overloaded`, `InvalidRequest`."""
        full: RingFull | None = None
        for number in self.pools.replicas.choose(route, now, query.spec.stage) if len(route) > 1 else route:
            try:
                self.pools.sessions[number].submit(query)
            except RingFull as error:
                full = error
            except (PeerLost, Draining):
                continue
            except InvalidArgument as error:
                raise InvalidRequest(str(error)) from error
            else:
                self.pools.replicas.sent(number, now)
                query.parked_ns = 0
                return True
        if full is not None:
            raise Overloaded(str(full)) from full
        return False

    def _route(self, query: Query) -> Sequence[int]:
        collection, gather = query.spec.collection, query.gather
        if gather is not None:
            return self.pools.routes.pools(collection, gather.identity, query.shard)
        if self.pools.routes.shards(collection) > 1:
            return ()  # it is split once all shards are up
        return self.pools.routes.choose(collection, query.accept)

    def cancel(self, ticket: int) -> None:
        """Cancel a query: it ends with an error, or is not returned."""
        if self._parked:
            self._parked = deque(query for query in self._parked if query.ticket != ticket)
        for pool in self.pools.sessions:
            pool.cancel(ticket, _MAX_ATTEMPTS)

    # ---- ends

    def collect(self) -> list[SearchResult]:
        """Return what has ended since the last call. Raises `Unavailable` after `close`."""
        self.check_open()
        now = self.clock()
        for number, pool in enumerate(self.pools.sessions):
            for query, result in pool.poll(now):
                self.pools.replicas.answered(number, now - result.enqueue_ns if result.status == "ok" else None, now)
                self._end(query, result, now)
            self.pools.update(number, pool.maintain(now))
        self.pools.rediscover(now)
        if now >= self._hedge_at_ns and len(self.pools.sessions) > 1:
            self._hedge_at_ns = now + _HEDGE_EVERY_NS
            self.hedge(now)
        if self._parked:
            self._retry_parked(now)
        ended, self._ended = self._ended, []
        return ended

    def hedge(self, now: int) -> None:
        """Hedge: send the queries of stalled pools to other pools too, each once, where there is room."""
        stalled = {number for number in range(len(self.pools.sessions)) if self.pools.replicas.stalled(number, now)}
        for number in stalled:
            for query in self.pools.sessions[number].queries():
                if query.ended or query.in_flight > 1 or query.attempts >= _MAX_ATTEMPTS:
                    continue
                with suppress(TrinityError):  # the stalled pool may still answer it
                    self._send(query, [other for other in self._route(query) if other not in stalled], now)

    def _retry_parked(self, now: int) -> None:
        # (collection, build, shard) without a pool that is up and has room
        unavailable: set[tuple[str, str, int]] = set()
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
                    target = part.spec.collection, part.gather.identity if part.gather else "", part.shard
                    if target in unavailable:
                        self._parked.append(part)
                    elif not self._send_or_park(part) and part.accept is None:
                        unavailable.add(target)
            except TrinityError as error:
                self._fail(query, error)

    def _restart_on_whole_build(self, part: Query, gather: ShardGather) -> Query:
        """Return the part; or the whole query, to be split anew, if its build lost shards and another is complete."""
        collection = gather.whole.spec.collection
        if self.pools.routes.is_whole(collection, gather.identity):
            return part
        with suppress(TrinityError):  # raised again when it is sent
            if self.pools.routes.whole_build(collection, gather.whole.accept) is None:
                return part
        gather.ended = True  # results of two builds are never mixed
        for pool in self.pools.sessions:
            pool.cancel(part.ticket, _MAX_ATTEMPTS)
        gather.whole.parked_ns, gather.whole.attempts = part.parked_ns, 0
        return gather.whole

    def wait_error(self, query: Query, since_ns: int, now_ns: int) -> TrinityError | None:
        """Return the error that ends a query waiting for a pool since `since_ns`; None if it may still wait."""
        if query.spec.deadline_ns:
            late = now_ns >= query.spec.deadline_ns
            return DeadlineExceeded("no pool accepted the query before its deadline") if late else None
        if now_ns < max(since_ns, self._answered.get(query.spec.collection, 0)) + self._limits.wait_ns:
            return None
        collection = query.spec.collection
        try:
            shards = self.pools.routes.shards(collection)
            if query.gather is not None:
                up = {query.shard: bool(self._route(query))}
            elif shards > 1:
                up = {shard: self.pools.routes.has_shard(collection, shard) for shard in range(shards)}
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
            return  # another pool answered it, or the query it is a part of has ended
        if query.in_flight and result.status in _IGNORED_WHILE_HEDGED:
            return
        if result.status == "ok" and len(result.distances) and np.isnan(result.distances[-1]):
            # An intact index has no such distance: vectors and queries are checked to be finite.
            damaged = f"collection {query.spec.collection!r} is damaged: its index returned a distance that is NaN"
            self._fail(query, Unavailable(damaged))
        elif result.status == "ok":
            wait_ns, search_ns = result.begin_ns - result.enqueue_ns, result.end_ns - result.begin_ns
            answered = SearchResult(
                query.ticket, result.ids, result.distances, result.extends, wait_ns, search_ns,
                identity=query.identity,
            )  # fmt: skip
            whole = answered if gather is None else gather.add(answered)
            query.ended = True
            if query.in_flight:
                for pool in self.pools.sessions:
                    pool.cancel_query(query)
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
            query.gather.ended = True  # no partial results
            for pool in self.pools.sessions:
                pool.cancel(query.ticket, _MAX_ATTEMPTS)
        self._ended.append(failed_result(query.ticket, error))

    def statistics(self) -> SearchStatistics:
        """See `SearchStatistics`."""
        return SearchStatistics(self.pools.statistics(), len(self._parked))

    def close(self) -> None:
        """Close the sessions; outstanding queries never end."""
        self._open = False
        self.pools.close()
