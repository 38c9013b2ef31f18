"""Asking the vector pool: one client over all pool workers of a node, which are replicas of each other.

A query goes to the next live pool in turn. When a pool dies, its outstanding queries are asked again elsewhere, or
wait until it is back, within their deadlines: a search changes nothing, so asking twice is safe.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import zmq

from ipc import (
    Draining,
    InvalidArgument,
    IpcError,
    PeerLost,
    ProtocolViolation,
    Result,
    RingClient,
    RingFull,
    Stage,
    StaleEpoch,
)
from runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    TrinityError,
    Unavailable,
    WorkerLost,
)
from runtime.node.config import PoolSection
from runtime.node.placement import NodePlan
from runtime.node.run_dir import find_node

_RETRY_NS = 500_000_000  # a lost pool is tried again this often …
_RETRY_MS = 20.0  # … and this long; a pool whose loop runs answers in about one
_WAIT_NS = 10_000_000_000  # a query without a deadline waits no longer than this for a pool
_MAX_PARKED = 1024
_MAX_ATTEMPTS = 3
_LONGEST_MS = 86_400_000  # a deadline further away than a day is a mistake


@dataclass(frozen=True)
class SearchResult:
    """How a query ended. `ids` int64 and `distances` float32 [≤ k], nearest first, are empty unless it was answered.

    `extends` is the number of engine steps; `wait_ns` the time until it had a slot, `search_ns` the time in it.
    """

    ticket: int
    ids: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float32]
    extends: int = 0
    wait_ns: int = 0
    search_ns: int = 0
    error: TrinityError | None = None

    def checked(self) -> "SearchResult":
        """Itself. Raises its error if it ended with one."""
        if self.error is not None:
            raise self.error
        return self


@dataclass
class _Query:
    """What is needed to ask once more."""

    ticket: int
    vector: npt.NDArray[np.float32]
    k: int
    stage: Stage
    collection: str
    top_m: int | None
    search_width: int
    patience: int | None
    deadline_ns: int
    expires_ns: int
    attempts: int = 0


class _Pool:
    """One pool worker's endpoint, and the session with it while there is one."""

    def __init__(self, endpoint: str, name: str) -> None:
        self._endpoint = endpoint
        self._name = name
        self._retry_ns = 0
        self.client: RingClient | None = None
        self.asked: dict[int, _Query] = {}  # request id → query

    @property
    def live(self) -> bool:
        return self.client is not None and self.client.lost is None

    def attach(self, timeout_ms: float, now_ns: int) -> bool:
        """Have a session, if that can be had within `timeout_ms`; tried twice a second at most."""
        if self.live:
            return True
        if now_ns < self._retry_ns:
            return False
        try:
            if self.client is None:
                self.client = RingClient(self._endpoint, self._name, timeout_ms=timeout_ms)
            elif not self.asked:  # what it lost must have been read first
                self.client.reconnect(timeout_ms)
        except IpcError:  # nobody there, refused, or dead half way through
            self._retry_ns = now_ns + _RETRY_NS
        return self.live


class SearchClient:
    """Submits queries to the pools at `endpoints` and polls results. One thread; only `search` and `sleep` wait.

    `defaults` gives top_m and search_width for queries that name none.
    """

    def __init__(self, endpoints: Iterable[str], name: str, defaults: PoolSection | None = None) -> None:
        self._defaults = defaults or PoolSection()
        self._pools = [_Pool(endpoint, name) for endpoint in endpoints]
        self._turn = 0
        self._tickets = itertools.count(1)
        self._where: dict[int, tuple[_Pool, int]] = {}  # ticket → its pool and request id there
        self._parked: deque[_Query] = deque()  # waiting for any pool
        self._ended: list[SearchResult] = []
        self._kept: dict[int, SearchResult] = {}  # ended while `search` waited for another

    @classmethod
    def of_plan(cls, plan: NodePlan, name: str) -> Self:
        """The client of one of the node's own workers; pools are attached as they come up."""
        return cls([plan.endpoint(pool.name) for pool in plan.of_role("pool")], name, plan.config.pool)

    @classmethod
    def connect(cls, node: str | Path, name: str = "client", timeout_s: float = 5.0) -> Self:
        """A client of a running node, by its name or run directory. Raises `Unavailable` if no pool answers."""
        client = cls(find_node(node).pools, name)
        end = time.monotonic_ns() + int(timeout_s * 1e9)
        while not any(pool.attach(timeout_s * 1e3, time.monotonic_ns()) for pool in client._pools):
            if time.monotonic_ns() > end or not client._pools:
                client.close()
                raise Unavailable(f"no pool of node {str(node)!r} answered within {timeout_s:g} s")
            time.sleep(0.05)
        return client

    # ---- queries

    def submit(
        self,
        vector: npt.ArrayLike,
        k: int,
        *,
        collection: str,
        stage: Stage = "prefill",
        deadline_ns: int = 0,
        top_m: int | None = None,
        search_width: int | None = None,
        patience: int | None = None,
    ) -> int:
        """Ask for the `k` nearest of `vector` [d]; returns a ticket whose result `poll` brings exactly once.

        Raises `InvalidRequest` (wrong size, a limit passed) or `Overloaded`; nothing was accepted then.
        """
        for name, value in (("k", k), ("top_m", top_m), ("search_width", search_width), ("patience", patience)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidRequest(f"{name} must be an integer, not {value!r}", name)
        expires = deadline_ns or time.monotonic_ns() + _WAIT_NS
        query = _Query(
            ticket=next(self._tickets),
            vector=_as_vector(vector),
            k=k,
            stage=stage,
            collection=collection,
            top_m=top_m,
            search_width=search_width or self._defaults.search_width,
            patience=patience,
            deadline_ns=deadline_ns,
            expires_ns=expires,
        )
        if not self._send(query):
            if len(self._parked) >= _MAX_PARKED:
                raise Overloaded(
                    f"no pool is up and {len(self._parked)} queries wait for one, the limit is {_MAX_PARKED}"
                )
            self._parked.append(query)
        return query.ticket

    def search(
        self,
        vector: npt.ArrayLike,
        k: int = 10,
        *,
        collection: str = "docs",
        stage: Stage = "prefill",
        deadline_ms: float | None = None,
        top_m: int | None = None,
        search_width: int | None = None,
        patience: int | None = None,
    ) -> SearchResult:
        """Ask and wait. Raises what ended the query if it was not answered."""
        if deadline_ms is not None and not 0 < deadline_ms <= _LONGEST_MS:
            raise InvalidRequest(f"deadline_ms is {deadline_ms}, outside 0..{_LONGEST_MS}", "deadline_ms")
        deadline_ns = 0 if deadline_ms is None else time.monotonic_ns() + int(deadline_ms * 1e6)
        ticket = self.submit(
            vector, k, collection=collection, stage=stage, deadline_ns=deadline_ns,
            top_m=top_m, search_width=search_width, patience=patience,
        )  # fmt: skip
        while ticket not in self._kept:
            self._kept.update((result.ticket, result) for result in self._collect())
            if ticket not in self._kept:
                self._wait()
        return self._kept.pop(ticket).checked()

    def cancel(self, ticket: int) -> None:
        """The result is not wanted any more; it comes as an error, or not at all."""
        for query in self._parked:
            if query.ticket == ticket:
                self._parked.remove(query)
                return
        if ticket in self._where:
            pool, request_id = self._where[ticket]
            pool.asked[request_id].attempts = _MAX_ATTEMPTS  # nor is it asked again if the pool dies
            if pool.client is not None:
                pool.client.cancel(request_id)

    def poll(self) -> list[SearchResult]:
        """What has ended since the last call. Never waits (but for a lost pool's return, 20 ms twice a second)."""
        results = [*self._kept.values(), *self._collect()]
        self._kept.clear()
        return results

    # ---- sleeping

    def sleep(self, sockets: Sequence["zmq.Socket[bytes]"], timeout_ms: int) -> None:
        """Wait until a result may have come, one of `sockets` can be read, or the time is over."""
        try:
            if self.arm():
                poller = zmq.Poller()
                for source in (*sockets, *self.filenos()):
                    poller.register(source, zmq.POLLIN)
                poller.poll(timeout_ms)
        finally:
            self.disarm()

    def filenos(self) -> list[int]:
        """Descriptors that become readable once armed and a result has come; they change when a pool comes back."""
        return [client.fileno() for client in self._live()]

    def arm(self) -> bool:
        """Ask to be rung when a result comes; False if one is there already. `disarm` after every `arm`."""
        return all([client.arm() for client in self._live()])  # a list: every one must be armed

    def disarm(self) -> None:
        """Awake again."""
        for client in self._live():
            client.disarm()

    @property
    def live(self) -> bool:
        """Whether a pool is attached."""
        return bool(self._live())

    def _live(self) -> list[RingClient]:
        return [pool.client for pool in self._pools if pool.client is not None and pool.client.lost is None]

    def _wait(self) -> None:
        outstanding = [pool.client for pool in self._pools if pool.client is not None and pool.asked]
        if len(outstanding) == 1 and not self._parked:
            outstanding[0].wait(50.0)  # spins for a moment first: the fast way for the common case
        else:
            self.sleep((), 5)

    # ---- inside

    def _send(self, query: _Query) -> bool:
        """Give a query to the next live pool; False if there is none."""
        now = time.monotonic_ns()
        full: RingFull | None = None
        for _ in self._pools:
            pool = self._pools[self._turn]
            self._turn = (self._turn + 1) % len(self._pools)
            if not pool.attach(_RETRY_MS, now) or pool.client is None:
                continue
            try:
                request_id = pool.client.submit(
                    query.vector, collection=query.collection, stage=query.stage, k=query.k,
                    top_m=query.top_m or min(max(self._defaults.top_m, query.k), pool.client.max_top_m),
                    search_width=query.search_width, patience=query.patience, deadline_ns=query.deadline_ns,
                )  # fmt: skip
            except RingFull as error:
                full = error
            except (PeerLost, Draining):
                continue
            except InvalidArgument as error:
                raise InvalidRequest(str(error)) from error
            else:
                query.attempts += 1
                pool.asked[request_id] = query
                self._where[query.ticket] = (pool, request_id)
                return True
        if full is not None:
            raise Overloaded(str(full)) from full
        return False

    def _collect(self) -> list[SearchResult]:
        now = time.monotonic_ns()
        for pool in self._pools:
            if pool.client is not None:
                for result in _poll(pool.client):
                    self._end(pool.asked.pop(result.request_id), result, now)
            pool.attach(_RETRY_MS, now)
        if self._parked:
            self._unpark(now)
        ended, self._ended = self._ended, []
        return ended

    def _unpark(self, now: int) -> None:
        taken = True  # until a query finds no pool, or no room in any: the others would find none either
        for _ in range(len(self._parked)):
            query = self._parked.popleft()
            if now >= query.expires_ns:
                self._fail(query, WorkerLost("no pool took the query before its deadline"))
                continue
            try:
                taken = taken and self._send(query)
            except Overloaded:
                taken = False
            except TrinityError as error:
                self._fail(query, error)
                continue
            if not taken:
                self._parked.append(query)

    def _end(self, query: _Query, result: Result, now: int) -> None:
        del self._where[query.ticket]
        if result.status == "ok":
            times = (result.begin_ns - result.enqueue_ns, result.end_ns - result.begin_ns)
            self._ended.append(SearchResult(query.ticket, result.ids, result.distances, result.extends, *times))
        elif result.status in ("lost", "stale_epoch") and query.attempts < _MAX_ATTEMPTS and now < query.expires_ns:
            self._parked.append(query)
        else:
            self._fail(query, _error_of_status(result.status, query))

    def _fail(self, query: _Query, error: TrinityError) -> None:
        empty = np.empty(0, np.int64), np.empty(0, np.float32)
        self._ended.append(SearchResult(query.ticket, *empty, error=error))

    def close(self) -> None:
        """End the sessions. What is outstanding never comes."""
        for pool in self._pools:
            if pool.client is not None:
                pool.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_vector(vector: npt.ArrayLike) -> npt.NDArray[np.float32]:
    try:
        return np.array(vector, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"not a vector of numbers: {error}", "vector") from error


def _poll(client: RingClient) -> list[Result]:
    """Results; a pool that breaks the protocol has lost the session, and the rest comes as 'lost' next time."""
    try:
        return client.poll()
    except (StaleEpoch, ProtocolViolation):
        return []


def _error_of_status(status: str, query: _Query) -> TrinityError:
    match status:
        case "overloaded":
            return Overloaded("the pool's queue is full")
        case "deadline_exceeded":
            return DeadlineExceeded("the pool could not answer the query before its deadline")
        case "invalid_request":
            return InvalidRequest("the pool refused the query: a value that is not finite, or a limit passed", "vector")
        case "lost" | "stale_epoch":
            return WorkerLost(f"the pool died with the query, {query.attempts} times")
        case "cancelled":
            return DeadlineExceeded("the query was cancelled")
        case _:
            return InternalError(f"the pool ended the query with status {status!r}")
