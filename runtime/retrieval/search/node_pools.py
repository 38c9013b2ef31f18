"""A client's sessions with all pools of a node: which are up, what they serve, and how fast they answer."""

from collections.abc import Callable, Collection, Iterable

from ipc import RingClient
from runtime.errors import TrinityError
from runtime.retrieval.search.pool_session import PoolSession, ReplicaPolicy, Replicas
from runtime.retrieval.search.query import PoolStatistics
from runtime.retrieval.search.routing import RoutingTable


class NodePools:
    """`sessions` by the pool's number, with `routes` to those that are up and their `replicas`' measurements.

    `top_m`: of queries that specify none. `find` returns the endpoints of the pools, once all known ones are lost.
    `retry_ns`: interval of reconnects. `near`: indexes of the endpoints that are preferred.
    """

    def __init__(
        self,
        endpoints: Iterable[str],
        name: str,
        top_m: int,
        policy: ReplicaPolicy | None,
        find: Callable[[], Iterable[str]] | None,
        retry_ns: int,
        near: Collection[int],
    ) -> None:
        self._name, self._top_m, self._policy, self._find = name, top_m, policy, find
        self._retry_ns, self._near = retry_ns, near
        self._find_ns = 0  # time of the next rediscovery
        self._replace([self._session(endpoint) for endpoint in endpoints])
        self.routes = RoutingTable()

    def _replace(self, sessions: list[PoolSession]) -> None:
        self.sessions = sessions
        self._up = [0] * len(sessions)  # per pool: its session's number, 0 while it is down
        self.replicas = Replicas(len(sessions), self._policy, self._near)

    def _session(self, endpoint: str) -> PoolSession:
        return PoolSession(endpoint, self._name, self._top_m, self._retry_ns)

    def update(self, number: int, live: bool) -> None:
        """Record whether a pool has a session now; what it serves may differ from the session before."""
        up = self.sessions[number].opened if live else 0
        if up == self._up[number]:
            return
        if up and not self._up[number]:
            self.replicas.lost(number)  # its measurements are of the process before
        self._up[number] = up
        if (catalogue := self.sessions[number].catalogue) is not None:
            self.replicas.serves(number, catalogue.stage)
        offers = [(number, pool.catalogue, pool.live) for number, pool in enumerate(self.sessions)]
        self.routes = RoutingTable(
            [(number, offer) for number, offer, live in offers if live and offer is not None],
            [offer for _, offer, live in offers if not live and offer is not None],
        )

    def rediscover(self, now_ns: int) -> None:
        """If all pools are lost, look up the endpoints again: a restarted node has new ones."""
        if any(self._up) or self._find is None or now_ns < self._find_ns:
            return
        if any(pool.has_outstanding for pool in self.sessions):
            return
        self._find_ns = now_ns + self._retry_ns
        try:
            endpoints = list(self._find())
        except TrinityError:  # the node is not up
            return
        if endpoints == [pool.endpoint for pool in self.sessions]:
            return
        for pool, endpoint in zip(self.sessions, endpoints, strict=False):
            pool.endpoint = endpoint
        for pool in self.sessions[len(endpoints) :]:
            pool.close()
        kept = self.sessions[: len(endpoints)]
        self._replace([*kept, *(self._session(endpoint) for endpoint in endpoints[len(kept) :])])

    @property
    def connecting(self) -> bool:
        """Whether a connection attempt is in progress."""
        return any(pool.connecting for pool in self.sessions)

    def clients(self, *, busy: bool = False) -> list[RingClient]:
        """Return the clients of the live sessions; `busy`: of those with outstanding queries."""
        return [client for pool in self.sessions for client in pool.clients(busy=busy)]

    def statistics(self) -> tuple[PoolStatistics, ...]:
        """See `PoolStatistics`."""
        return tuple(pool.statistics(self.replicas.slow(number)) for number, pool in enumerate(self.sessions))

    def close(self) -> None:
        """Close the sessions."""
        for pool in self.sessions:
            pool.close()
