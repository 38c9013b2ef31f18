"""One pool worker as a client sees it: its endpoint, the sessions with it while there are any, what was asked there.

A pool whose collections change asks its clients to attach anew: what began in the old session ends there, beside the
new one.
"""

import threading
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ipc import (
    Catalogue,
    Draining,
    IpcError,
    MemoryRefused,
    PeerLost,
    ProtocolViolation,
    Result,
    RingClient,
    RingFull,
    SearchSpec,
    StaleEpoch,
)
from runtime.errors import TrinityError
from runtime.node.config import PoolSection
from runtime.retrieval.search.query import PoolState, PoolStatistics, Query
from runtime.retrieval.search.vectors import DeviceVectors, Vectors, on_host

_RETRY_MS = (400.0, 1600.0)  # an attempt's, at first and at most; a pool whose loop runs answers in about one
_ROUND_TRIPS = 1024


class _Session:
    """An attached client, and what was asked through it."""

    def __init__(self, client: RingClient) -> None:
        self.client = client
        self.identities = {served.name: served.identity for served in client.catalogue.served}
        self.asked: dict[int, Query] = {}  # request id → question


class PoolSession:
    """The session with the pool at `endpoint`. What it loses comes back from `poll` with status 'lost'.

    settings: its doorbell, and the top_m of questions that name none.
    """

    def __init__(self, endpoint: str, name: str, settings: PoolSection, retry_every_ns: int) -> None:
        self.endpoint = endpoint
        self._name, self._settings, self._retry_every_ns = name, settings, retry_every_ns
        self._retry_ns = 0
        self._patience_ms = _RETRY_MS[0]  # doubles with every attempt: on a busy machine an answer takes its time
        self._connector: threading.Thread | None = None
        self._found: list[RingClient] = []  # by the seeker
        self._session: _Session | None = None
        self._ending: list[_Session] = []  # another has taken their place, and they have results to come
        self.opened = 0
        """How many sessions there were: the catalogue may be another after each."""
        self.sent = self.answered = 0
        self.errors: Counter[str] = Counter()
        self._round_trips: deque[int] = deque(maxlen=_ROUND_TRIPS)

    @property
    def live(self) -> bool:
        return self._session is not None and self._session.client.lost is None

    @property
    def catalogue(self) -> Catalogue | None:
        """What the pool offers, or offered last; None before the first session."""
        return None if self._session is None else self._session.client.catalogue

    @property
    def asks(self) -> bool:
        """Whether a question has no end yet."""
        return any(session.asked for session in self._sessions())

    def clients(self, *, busy: bool = False) -> list[RingClient]:
        """Of the sessions that last; `busy`: of those with questions that have no end yet."""
        return [s.client for s in self._sessions() if (s.asked if busy else s.client.lost is None)]

    def _sessions(self) -> Iterator[_Session]:
        yield from self._ending
        if self._session is not None:
            yield self._session

    def maintain(self, now_ns: int) -> bool:
        """Whether there is a session. What is lost or renewed is sought by a thread: the caller never waits."""
        live = self.live
        if live and self._session is not None and not self._session.client.draining:
            return True
        if self._connector is None:
            if now_ns >= self._retry_ns:
                self._retry_ns = now_ns + self._retry_every_ns
                self._connector = threading.Thread(target=self._connect, daemon=True)
                self._connector.start()
        elif not self.connecting and (live or not self.asks):  # what was lost must have been read first
            self._connector = None
            self._adopt()
        return self.live

    @property
    def connecting(self) -> bool:
        """Whether the thread is still at it."""
        return self._connector is not None and self._connector.is_alive()

    def _connect(self) -> None:
        patience_ms, self._patience_ms = self._patience_ms, min(2 * self._patience_ms, _RETRY_MS[1])
        with suppress(IpcError):  # nobody there, refused, or dead half way through
            made = RingClient(
                self.endpoint, self._name, doorbell=self._settings.doorbell, timeout_ms=patience_ms, arena=True,
                top_m=self._settings.top_m,
            )  # fmt: skip
            self._found.append(made)
            self._patience_ms = _RETRY_MS[0]

    def _adopt(self) -> None:
        while self._found:
            if self._session is not None:
                self._ending.append(self._session)
                self._close_ended()
            self._session = _Session(self._found.pop())
            self.opened += 1
            self._retry_ns = 0

    def _close_ended(self) -> None:
        for session in [session for session in self._ending if not session.asked]:
            self._ending.remove(session)
            session.client.close()

    def submit(self, query: Query) -> None:
        """Raises what `RingClient.submit` raises, `InvalidRequest` if CUDA does not copy; nothing was sent then."""
        session, vector = self._session, query.vector
        if session is None:
            raise PeerLost(f"no session with {self.endpoint}")
        if isinstance(vector, DeviceVectors):
            request_id = self._submit_from_gpu(session.client, vector, query.spec)
        else:
            request_id = session.client.submit(vector, query.spec)
        query.attempts += 1
        query.at += 1
        session.asked[request_id] = query
        self.sent += 1

    @staticmethod
    def _submit_from_gpu(client: RingClient, vector: DeviceVectors, spec: SearchSpec) -> int:
        """Into the pool's arena, or else through the host."""
        if client.has_arena:
            with suppress(MemoryRefused):  # it is out of reach, or its slots are all in use
                return client.submit(vector.span, spec)
        return client.submit(vector.on_host(), spec)

    def submit_many(self, rows: Vectors, queries: list[Query]) -> int:
        """`submit` for as many questions (alike but for their vectors, `rows`) as there is room for; how many."""
        session = self._session
        if session is None:
            raise PeerLost(f"no session with {self.endpoint}")
        if isinstance(rows, DeviceVectors) and session.client.has_arena:
            return self._submit_each(queries)
        ids = session.client.submit_many(on_host(rows), queries[0].spec)
        for request_id, query in zip(ids, queries, strict=False):
            query.attempts += 1
            query.at += 1
            session.asked[request_id] = query
        self.sent += len(ids)
        return len(ids)

    def _submit_each(self, queries: list[Query]) -> int:
        for number, query in enumerate(queries):
            try:
                self.submit(query)
            except (RingFull, PeerLost, Draining, TrinityError):
                if number == 0:
                    raise
                return number
        return len(queries)

    def poll(self, now_ns: int) -> list[tuple[Query, Result]]:
        """What has ended since the last call; a pool that breaks the protocol has lost the session."""
        ended = [pair for session in tuple(self._sessions()) for pair in self._poll(session, now_ns)]
        if self._ending:
            self._close_ended()
        return ended

    def _poll(self, session: _Session, now_ns: int) -> list[tuple[Query, Result]]:
        try:
            results = session.client.poll()
        except (StaleEpoch, ProtocolViolation):  # the rest comes as 'lost' next time
            return []
        ended = [(session.asked.pop(result.request_id), result) for result in results]
        for query, result in ended:
            query.at -= 1
            if result.status == "ok":
                self.answered += 1
                self._round_trips.append(now_ns - result.enqueue_ns)
                if not query.ended:
                    query.identity = session.identities[query.spec.collection]
            else:
                self.errors[result.status] += 1
        return ended

    def queries(self) -> list[Query]:
        """Those without an answer yet."""
        return [query for session in self._sessions() for query in session.asked.values()]

    def withdraw(self, query: Query) -> None:
        """Another pool has answered a question: this one need not."""
        for session in self._sessions():
            for request_id, asked in session.asked.items():
                if asked is query:
                    session.client.cancel(request_id)

    def cancel(self, ticket: int, most_attempts: int) -> None:
        """A ticket's questions are not wanted any more, nor asked again if the pool dies."""
        for session in self._sessions():
            for request_id, query in session.asked.items():
                if query.ticket == ticket:
                    query.attempts = most_attempts
                    session.client.cancel(request_id)

    def statistics(self, slow: bool) -> PoolStatistics:
        """See `PoolStatistics`."""
        state: PoolState = "lost" if not self.live else "slow" if slow else "live"
        percentiles = np.percentile(self._round_trips, (50, 90, 99)) / 1e3 if self._round_trips else ()
        return PoolStatistics(
            endpoint=self.endpoint,
            state=state,
            epoch=0 if self._session is None else self._session.client.epoch,
            outstanding=sum(len(session.asked) for session in self._sessions()),
            sent=self.sent,
            answered=self.answered,
            errors=dict(self.errors),
            round_trip_us={q: float(us) for q, us in zip((50, 90, 99), percentiles, strict=False)},
        )

    def close(self) -> None:
        if self._connector is not None:
            self._connector.join()  # it gives up by itself
        self._adopt()
        for session in self._sessions():
            session.client.close()


# ---- which of several pools a query goes to: the one beside who asks, else the replicas in turn, those that are slow
# or crowded passed over
# Pure code: the clock is handed in.


@dataclass(frozen=True)
class ReplicaPolicy:
    """When a pool is passed over, and when it is taken back.

    weight: of a new round trip in the average. A pool is slow once its expected round trip is over `slow` times the
    best one's plus `floor_ns`, and no longer slow once it is under `recovered` times that plus `floor_ns` (hysteresis:
    what lies between changes nothing). A slow pool is sent one query every `probe_ns`; the answer weighs half, so that
    one that has recovered is soon back. With `crowded` queries more than the least loaded one a pool has no turn. One
    that has answered nothing for `stalled_ns`, though it owes answers, is stalled: others are asked what it was asked.
    """

    weight: float = 0.2
    slow: float = 4.0
    recovered: float = 2.0
    floor_ns: int = 5_000_000
    probe_ns: int = 100_000_000
    crowded: int = 32
    stalled_ns: int = 500_000_000


_PROBE_WEIGHT = 0.5


@dataclass(slots=True)
class _Replica:
    average_ns: float | None = None  # of its round trips; None before the first
    outstanding: int = 0
    waiting_ns: int = 0  # since when an answer is due: the last one, or the first query after a pause
    slow: bool = False
    probed_ns: int = 0
    turn: int = 0

    def expected_ns(self, now_ns: int) -> float | None:
        """The average round trip, or the present silence if that is longer: who is stalled answers nothing."""
        silent = now_ns - self.waiting_ns if self.outstanding else 0
        return float(silent) or None if self.average_ns is None else max(self.average_ns, silent)


class Replicas:
    """What is known of `count` pools: `choose` from those that live; tell what was `sent`, `answered`, `lost`."""

    def __init__(self, count: int, policy: ReplicaPolicy | None = None, near: Collection[int] = ()) -> None:
        """near: those beside who asks."""
        self._policy = policy or ReplicaPolicy()
        self._near = frozenset(near)
        self._replicas = [_Replica() for _ in range(count)]
        self._turn = 0

    def choose(self, live: Sequence[int], now_ns: int) -> Sequence[int]:
        """All of `live` in the order to try: a slow one due for a probe, the near one, the others in turn, the crowded,
        the slow."""
        if len(live) <= 1:
            return live
        self._judge(live, now_ns)
        least = min(self._replicas[pool].outstanding for pool in live)
        return sorted(live, key=lambda pool: self._rank(pool, least, now_ns))

    def _rank(self, pool: int, least: int, now_ns: int) -> tuple[int, bool, int]:
        replica, far = self._replicas[pool], pool not in self._near
        if replica.slow:
            due = replica.outstanding == 0 and now_ns - replica.probed_ns >= self._policy.probe_ns
            return (0 if due else 3), far, replica.turn
        return (2 if replica.outstanding > least + self._policy.crowded else 1), far, replica.turn

    def _judge(self, live: Sequence[int], now_ns: int) -> None:
        expected = {pool: self._replicas[pool].expected_ns(now_ns) for pool in live}
        known = [value for value in expected.values() if value is not None]
        if not known:
            return
        best = min(known)
        for pool, value in expected.items():
            replica = self._replicas[pool]
            if value is None:
                continue
            limit = best * (self._policy.recovered if replica.slow else self._policy.slow) + self._policy.floor_ns
            if replica.slow != (value > limit):
                replica.slow = not replica.slow
                replica.probed_ns = now_ns

    def sent(self, pool: int, now_ns: int, count: int = 1) -> None:
        """`count` queries went to a pool: the others' turn comes first."""
        replica = self._replicas[pool]
        if replica.outstanding == 0:
            replica.waiting_ns = now_ns
        replica.outstanding += count
        replica.probed_ns = now_ns
        self._turn += 1
        replica.turn = self._turn

    def answered(self, pool: int, took_ns: int | None, now_ns: int) -> None:
        """A query of a pool ended, `took_ns` after it was sent; None if without an answer, which may be had fast."""
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
        """A pool's session is over: what comes back is another process."""
        self._replicas[pool] = _Replica(turn=self._replicas[pool].turn)

    def slow(self, pool: int) -> bool:
        """Whether a pool is passed over for being slow, as `choose` judged last."""
        return self._replicas[pool].slow

    def stalled(self, pool: int, now_ns: int) -> bool:
        """Whether a pool owes answers and has given none for too long."""
        replica = self._replicas[pool]
        return replica.outstanding > 0 and now_ns - replica.waiting_ns >= self._policy.stalled_ns

    def outstanding(self, pool: int) -> int:
        """Queries that a pool has not answered yet."""
        return self._replicas[pool].outstanding
