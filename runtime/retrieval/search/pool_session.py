"""A client's sessions with one pool worker, the queries outstanding there, and the choice between replicas.

A pool whose collections change drains its sessions: the client attaches again, and outstanding queries end in the old
session, which stays open beside the new one until then.
"""

import threading
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ipc import (
    Catalogue,
    IpcError,
    MemoryRefused,
    PeerLost,
    ProtocolViolation,
    Result,
    RingClient,
    SearchSpec,
    StaleEpoch,
)
from runtime.errors import Overloaded
from runtime.retrieval.fair_threads import start_thread
from runtime.retrieval.search.query import PoolState, PoolStatistics, Query
from runtime.retrieval.search.vectors import DeviceVectors

_CONNECT_MS = (400.0, 1600.0)
"""Timeout of attaching, first and maximum; a running pool answers in about 1 ms."""
_ROUND_TRIPS = 1024


class _Session:
    """An attached client and its outstanding queries."""

    def __init__(self, client: RingClient) -> None:
        self.client = client
        self.identities = {served.name: served.identity for served in client.catalogue.served}
        self.outstanding: dict[int, Query] = {}  # request id → query


class PoolSession:
    """The sessions with the pool at `endpoint`. Queries lost with a session end in `poll` with status 'lost'.

    top_m: of queries that specify none.
    """

    def __init__(self, endpoint: str, name: str, top_m: int, retry_every_ns: int) -> None:
        self.endpoint = endpoint
        self._name, self._top_m, self._retry_every_ns = name, top_m, retry_every_ns
        self._retry_ns = 0
        self._timeout_ms = _CONNECT_MS[0]  # doubles with every attempt: a busy machine answers late
        self._connector: threading.Thread | None = None
        self._connected: list[RingClient] = []  # by the connector thread
        self._session: _Session | None = None
        self._ending: list[_Session] = []  # replaced sessions with outstanding queries
        self.opened = 0
        """Number of sessions opened so far; the catalogue may differ after each."""
        self.sent = self.answered = 0
        self.errors: Counter[str] = Counter()
        self._round_trips: deque[int] = deque(maxlen=_ROUND_TRIPS)

    @property
    def live(self) -> bool:
        return self._session is not None and self._session.client.lost is None

    @property
    def catalogue(self) -> Catalogue | None:
        """What the pool serves, or served last; None before the first session."""
        return None if self._session is None else self._session.client.catalogue

    @property
    def has_outstanding(self) -> bool:
        """Whether a query is outstanding."""
        return any(session.outstanding for session in self._sessions())

    def clients(self, *, busy: bool = False) -> list[RingClient]:
        """Return the clients of live sessions; `busy`: of sessions with outstanding queries."""
        return [s.client for s in self._sessions() if (s.outstanding if busy else s.client.lost is None)]

    def _sessions(self) -> Iterator[_Session]:
        yield from self._ending
        if self._session is not None:
            yield self._session

    def maintain(self, now_ns: int) -> bool:
        """Return whether there is a session. A lost or draining one is replaced by a thread, so this never blocks."""
        live = self.live
        if live and self._session is not None and not self._session.client.draining:
            return True
        if self._connector is None:
            if now_ns >= self._retry_ns:
                self._retry_ns = now_ns + self._retry_every_ns
                with suppress(Overloaded):  # no thread left: tried again like an attempt that fails
                    self._connector = start_thread(self._connect, "connect")
        elif not self._connector.is_alive() and (live or not self.has_outstanding):  # its lost queries are polled first
            self._connector = None
            self._adopt()
        return self.live

    @property
    def connecting(self) -> bool:
        """Whether there is a connection attempt whose outcome `maintain` has not seen yet."""
        return self._connector is not None

    def _connect(self) -> None:
        timeout_ms, self._timeout_ms = self._timeout_ms, min(2 * self._timeout_ms, _CONNECT_MS[1])
        with suppress(IpcError):  # no pool, refused, or died during the handshake
            client = RingClient(self.endpoint, self._name, timeout_ms=timeout_ms, arena=True, top_m=self._top_m)
            self._connected.append(client)
            self._timeout_ms = _CONNECT_MS[0]

    def _adopt(self) -> None:
        while self._connected:
            if self._session is not None:
                self._ending.append(self._session)
                self._close_ended()
            self._session = _Session(self._connected.pop())
            self.opened += 1
            self._retry_ns = 0

    def _close_ended(self) -> None:
        for session in [session for session in self._ending if not session.outstanding]:
            self._ending.remove(session)
            session.client.close()

    def submit(self, query: Query) -> None:
        """Send a query. Raises as `RingClient.submit`, and `InvalidRequest` if CUDA cannot copy: nothing was sent."""
        session, vector = self._session, query.vector
        if session is None:
            raise PeerLost(f"no session with {self.endpoint}")
        assert vector is not None, "it is embedded"
        if isinstance(vector, DeviceVectors):
            request_id = self._submit_from_gpu(session.client, vector, query.spec)
        else:
            request_id = session.client.submit(vector, query.spec)
        query.attempts += 1
        query.in_flight += 1
        session.outstanding[request_id] = query
        self.sent += 1

    @staticmethod
    def _submit_from_gpu(client: RingClient, vector: DeviceVectors, spec: SearchSpec) -> int:
        """Send a vector through the pool's arena, or else through the host."""
        if client.takes_in_place(spec):
            with suppress(MemoryRefused):  # the arena is out of reach, or all of its slots are in use
                return client.submit(vector.span, spec)
        return client.submit(vector.on_host(), spec)

    def poll(self, now_ns: int) -> list[tuple[Query, Result]]:
        """Return what has ended since the last call. A protocol violation of the pool ends the session."""
        ended = [pair for session in tuple(self._sessions()) for pair in self._poll(session, now_ns)]
        if self._ending:
            self._close_ended()
        return ended

    def _poll(self, session: _Session, now_ns: int) -> list[tuple[Query, Result]]:
        try:
            results = session.client.poll()
        except (StaleEpoch, ProtocolViolation):  # the other queries end as 'lost' next time
            return []
        ended = [(session.outstanding.pop(result.request_id), result) for result in results]
        for query, result in ended:
            query.in_flight -= 1
            if result.status == "ok":
                self.answered += 1
                self._round_trips.append(now_ns - result.enqueue_ns)
                if not query.ended:
                    query.identity = session.identities[query.spec.collection]
            else:
                self.errors[result.status] += 1
        return ended

    def queries(self) -> list[Query]:
        """Return the outstanding queries."""
        return [query for session in self._sessions() for query in session.outstanding.values()]

    def cancel_query(self, query: Query) -> None:
        """Cancel a hedged query that another pool has answered."""
        for session in self._sessions():
            for request_id, candidate in session.outstanding.items():
                if candidate is query:
                    session.client.cancel(request_id)

    def cancel(self, ticket: int, max_attempts: int) -> None:
        """Cancel a ticket's queries, without retry if the pool dies."""
        for session in self._sessions():
            for request_id, query in session.outstanding.items():
                if query.ticket == ticket:
                    query.attempts = max_attempts
                    session.client.cancel(request_id)

    def statistics(self, slow: bool) -> PoolStatistics:
        """See `PoolStatistics`."""
        state: PoolState = "lost" if not self.live else "slow" if slow else "live"
        percentiles = np.percentile(self._round_trips, (50, 90, 99)) / 1e3 if self._round_trips else ()
        return PoolStatistics(
            endpoint=self.endpoint,
            state=state,
            epoch=0 if self._session is None else self._session.client.epoch,
            outstanding=sum(len(session.outstanding) for session in self._sessions()),
            sent=self.sent,
            answered=self.answered,
            errors=dict(self.errors),
            round_trip_us={q: float(us) for q, us in zip((50, 90, 99), percentiles, strict=False)},
        )

    def close(self) -> None:
        if self._connector is not None:
            self._connector.join()  # it times out by itself
        self._adopt()
        for session in self._sessions():
            session.client.close()


# ---- choice between replicas: a near pool first, then the stage's in turn; slow and overloaded pools are avoided
# Pure code: the clock is a parameter.


@dataclass(frozen=True)
class ReplicaPolicy:
    """When a pool is avoided, and when it is used again.

    weight: of a new round trip in the moving average. A pool becomes slow once its expected round trip exceeds `slow`
    times the best one's plus `floor_ns`. A slow pool gets one probe query every `probe_ns`, whose round trip
    weighs half, so that recovery is noticed soon. A pool with `crowded` more outstanding queries than the least loaded
    one is avoided. A pool with outstanding queries that has answered nothing for `stalled_ns` is stalled: its queries
    are hedged.
    """

    weight: float = 0.2
    slow: float = 4.0
    floor_ns: int = 5_000_000
    probe_ns: int = 100_000_000
    crowded: int = 32
    stalled_ns: int = 500_000_000


_PROBE_WEIGHT = 0.5


@dataclass(slots=True)
class _Replica:
    average_ns: float | None = None  # of its round trips; None before the first
    stage: str = ""  # whose queries it answers first; "": both
    outstanding: int = 0
    waiting_ns: int = 0  # start of the present wait: the last answer, or the first query after an idle time
    slow: bool = False
    probed_ns: int = 0
    last_sent: int = 0  # number of the send

    def expected_ns(self, now_ns: int) -> float | None:
        """Return the average round trip, or the present wait if that is longer: a stalled pool answers nothing."""
        silent = now_ns - self.waiting_ns if self.outstanding else 0
        return float(silent) or None if self.average_ns is None else max(self.average_ns, silent)


class Replicas:
    """Load and latency of `count` pools: `choose` orders the live ones; `sent`, `answered` and `lost` report events."""

    def __init__(self, count: int, policy: ReplicaPolicy | None = None, near: Collection[int] = ()) -> None:
        """near: indexes of the preferred pools."""
        self._policy = policy or ReplicaPolicy()
        self._near = frozenset(near)
        self._replicas = [_Replica() for _ in range(count)]
        self._sends = 0

    def serves(self, pool: int, stage: str) -> None:
        """Set the stage whose queries a pool answers first, "" for both."""
        self._replicas[pool].stage = stage

    def choose(self, live: Sequence[int], now_ns: int, stage: str = "") -> Sequence[int]:
        """Return `live` in the order to try: slow pools due for a probe, near ones, those of the query's `stage`, of
        both, of the other one (each least recently used first), overloaded ones, slow ones."""
        if len(live) <= 1:
            return live
        self._update_slow(live, now_ns)
        lowest = min(self._replicas[pool].outstanding for pool in live)
        return sorted(live, key=lambda pool: self._rank(pool, lowest, now_ns, stage))

    def _rank(self, pool: int, lowest: int, now_ns: int, stage: str) -> tuple[int, int, int]:
        replica = self._replicas[pool]
        far = 0 if pool in self._near else 1 if replica.stage == stage else 3 if replica.stage else 2
        if replica.slow:
            due = replica.outstanding == 0 and now_ns - replica.probed_ns >= self._policy.probe_ns
            return (0 if due else 3), far, replica.last_sent
        return (2 if replica.outstanding > lowest + self._policy.crowded else 1), far, replica.last_sent

    def _update_slow(self, live: Sequence[int], now_ns: int) -> None:
        expected = {pool: self._replicas[pool].expected_ns(now_ns) for pool in live}
        best = min((value for value in expected.values() if value is not None), default=0.0)
        for pool, value in expected.items():
            limit = self._policy.slow * best + self._policy.floor_ns
            self._replicas[pool].slow = value is not None and value > limit

    def sent(self, pool: int, now_ns: int) -> None:
        """Record that a query was sent to a pool; the others are tried before it next time."""
        replica = self._replicas[pool]
        if replica.outstanding == 0:
            replica.waiting_ns = now_ns
        replica.outstanding += 1
        replica.probed_ns = now_ns
        self._sends += 1
        replica.last_sent = self._sends

    def answered(self, pool: int, took_ns: int | None, now_ns: int) -> None:
        """Record the end of a query, `took_ns` after it was sent; None without an answer: errors may be fast."""
        replica = self._replicas[pool]
        replica.outstanding -= 1
        replica.waiting_ns = now_ns
        if took_ns is None:
            return
        if replica.average_ns is None:
            replica.average_ns = float(took_ns)
        else:
            weight = _PROBE_WEIGHT if replica.slow else self._policy.weight
            replica.average_ns += weight * (took_ns - replica.average_ns)

    def lost(self, pool: int) -> None:
        """Forget the measurements of a pool whose session ended: the next one is another process."""
        self._replicas[pool] = _Replica(stage=self._replicas[pool].stage, last_sent=self._replicas[pool].last_sent)

    def slow(self, pool: int) -> bool:
        """Return whether a pool is slow, as of the last `choose`."""
        return self._replicas[pool].slow

    def stalled(self, pool: int, now_ns: int) -> bool:
        """Return whether a pool has outstanding queries and has answered none for too long."""
        replica = self._replicas[pool]
        return replica.outstanding > 0 and now_ns - replica.waiting_ns >= self._policy.stalled_ns
