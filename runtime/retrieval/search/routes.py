"""Which pools have which build of a collection, as their sessions say, and which of them a query goes to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ipc import Catalogue, Served
from runtime.errors import CollectionReplaced, InvalidRequest, Unavailable
from runtime.retrieval.attributes.filters import binds, check_filter, decode_filter
from runtime.retrieval.attributes.schema import Kind
from runtime.retrieval.search.query import Accept

# ---- which of several pools a query goes to: the replicas in turn, those that are slow or crowded passed over
# Pure code: the clock is handed in, so that the simulator can run it too.


@dataclass(frozen=True)
class ReplicaPolicy:
    """When a pool is passed over, and when it is taken back.

    weight: of a new round trip in the average. A pool is slow once its expected round trip is over `slow` times the
    best one's plus `floor_ns`, and no longer slow once it is under `recovered` times that plus `floor_ns` (hysteresis:
    what lies between changes nothing). A slow pool is sent one query every `probe_ns`; the answer weighs half, so that
    one that has recovered is soon back. With `crowded` queries more than the least loaded one a pool has no turn. One
    that has answered nothing for `stuck_ns`, though it owes answers, is stuck: others are asked what it was asked.
    """

    weight: float = 0.2
    slow: float = 4.0
    recovered: float = 2.0
    floor_ns: int = 5_000_000
    probe_ns: int = 100_000_000
    crowded: int = 32
    stuck_ns: int = 500_000_000


_PROBE_WEIGHT = 0.5


class _Replica:
    __slots__ = ("average_ns", "outstanding", "probed_ns", "slow", "turn", "waiting_ns")

    def __init__(self) -> None:
        self.average_ns: float | None = None  # of its round trips; None before the first
        self.outstanding = 0
        self.waiting_ns = 0  # since when an answer is due: the last one, or the first query after a pause
        self.slow = False
        self.probed_ns = 0
        self.turn = 0

    def expected_ns(self, now_ns: int) -> float | None:
        """The average round trip, or the present silence if that is longer: who is stuck answers nothing."""
        silent = now_ns - self.waiting_ns if self.outstanding else 0
        return float(silent) or None if self.average_ns is None else max(self.average_ns, silent)


class Replicas:
    """What is known of `count` pools: `choose` from those that live; tell what was `sent`, `answered`, `lost`."""

    def __init__(self, count: int, policy: ReplicaPolicy | None = None) -> None:
        self._policy = policy or ReplicaPolicy()
        self._replicas = [_Replica() for _ in range(count)]
        self._turn = 0

    def choose(self, live: Sequence[int], now_ns: int) -> Sequence[int]:
        """All of `live` in the order to try: a slow one due for a probe, the others in turn, the crowded, the slow."""
        if len(live) <= 1:
            return live
        self._judge(live, now_ns)
        least = min(self._replicas[pool].outstanding for pool in live)
        return sorted(live, key=lambda pool: self._rank(self._replicas[pool], least, now_ns))

    def _rank(self, replica: _Replica, least: int, now_ns: int) -> tuple[int, int]:
        if replica.slow:
            due = replica.outstanding == 0 and now_ns - replica.probed_ns >= self._policy.probe_ns
            return (0 if due else 3), replica.turn
        return (2 if replica.outstanding > least + self._policy.crowded else 1), replica.turn

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
        turn = self._replicas[pool].turn
        self._replicas[pool] = _Replica()
        self._replicas[pool].turn = turn

    def slow(self, pool: int) -> bool:
        """Whether a pool is passed over for being slow, as `choose` judged last."""
        return self._replicas[pool].slow

    def stuck(self, pool: int, now_ns: int) -> bool:
        """Whether a pool owes answers and has given none for too long."""
        replica = self._replicas[pool]
        return replica.outstanding > 0 and now_ns - replica.waiting_ns >= self._policy.stuck_ns

    def outstanding(self, pool: int) -> int:
        """Queries that a pool has not answered yet."""
        return self._replicas[pool].outstanding


Pools = tuple[int, ...]


class _Build:
    """A collection of one identity: its live pools by shard."""

    def __init__(self, shards: int) -> None:
        self.pools: list[Pools] = [()] * shards

    @property
    def whole(self) -> bool:
        return all(self.pools)


class Routes:
    """Of the pools that live; made anew when one comes, goes, or offers something else.

    live, lost: the pools' numbers and what they offer; what a lost one offered last, it may offer again.
    """

    def __init__(self, live: Iterable[tuple[int, Catalogue]] = (), lost: Iterable[Catalogue] = ()) -> None:
        self._builds: dict[str, dict[str, _Build]] = {}
        self._unserved: dict[str, str] = {}
        self._served: dict[str, Served] = {}  # the last build of each
        self._demanded: set[str] = set()
        self._awaited = {served.name for catalogue in lost for served in catalogue.served}
        self._none = True
        for number, catalogue in live:
            self._none = False
            for one in catalogue.served:
                self._served[one.name] = one
                if one.demanded:
                    self._demanded.add(one.name)
                build = self._builds.setdefault(one.name, {}).setdefault(one.identity, _Build(one.shards))
                if one.shards == len(build.pools):
                    build.pools[one.shard] = (*build.pools[one.shard], number)
            for other in catalogue.unserved:
                self._unserved[other.name] = other.reason
        self.direct = {
            name: build.pools[0]
            for name, builds in self._builds.items()
            for build in builds.values()
            if len(builds) == len(build.pools) == 1 and name not in self._demanded
        }
        """The pools of each collection that is one build in one piece and demands no filter: most questions look no
        further."""

    @property
    def unavailable(self) -> dict[str, str]:
        """The collections that no pool serves, and why."""
        return {name: reason for name, reason in self._unserved.items() if name not in self._builds}

    @property
    def collections(self) -> tuple[str, ...]:
        """The names of what is served."""
        return tuple(self._builds)

    def check_filter(self, collection: str, content: bytes) -> None:
        """Raise `InvalidFilter` or `InvalidRequest` for what the collection's pools would refuse."""
        served = self._served.get(collection)
        if served is None or not (content or served.demanded):
            return
        wanted = decode_filter(content) if content else None
        if served.demanded and not binds(wanted, served.demanded):
            raise InvalidRequest(
                f"collection {collection!r} demands a filter that binds {served.demanded!r} by eq or in", "filter"
            )
        if wanted is not None:
            check_filter(wanted, {name: Kind(kind) for name, kind in served.attributes.items()})

    def identities(self, collection: str) -> tuple[str, ...]:
        """Of the builds that some pool has."""
        return tuple(self._builds.get(collection, ()))

    def shards(self, collection: str) -> int:
        """Into how many shards a collection is split; 0 if no pool is up that could tell. Raises as `choose`."""
        self._check(collection)
        return max((len(build.pools) for build in self._builds.get(collection, {}).values()), default=0)

    def pools(self, collection: str, identity: str, shard: int) -> Pools:
        """The pools with this shard of this build."""
        build = self._builds.get(collection, {}).get(identity)
        return build.pools[shard] if build is not None and shard < len(build.pools) else ()

    def has_shard(self, collection: str, shard: int) -> bool:
        """Whether a pool has this shard of any build."""
        return any(self.pools(collection, identity, shard) for identity in self.identities(collection))

    def choose(self, collection: str, accept: Accept | None) -> Pools:
        """The pools that may answer a question about a collection in one piece, whatever their builds.

        Raises `InvalidRequest` if there is no such collection, `Unavailable` if its pools say that they cannot serve
        it, `CollectionReplaced` if there are builds and none of them is accepted.
        """
        builds = self._accepted(collection, accept)
        if len(builds) == 1:
            return builds[0][1].pools[0]
        return tuple(sorted(number for _, build in builds for number in build.pools[0]))

    def whole_build(self, collection: str, accept: Accept | None) -> str | None:
        """The identity of an accepted build of which every shard is there, the best served one; None without.

        Raises as `choose` does.
        """
        builds = [(min(map(len, b.pools)), name) for name, b in self._accepted(collection, accept) if b.whole]
        return max(builds)[1] if builds else None

    def is_whole(self, collection: str, identity: str) -> bool:
        """Whether every shard of this build is there."""
        build = self._builds.get(collection, {}).get(identity)
        return build is not None and build.whole

    def _accepted(self, collection: str, accept: Accept | None) -> list[tuple[str, _Build]]:
        self._check(collection)
        builds = list(self._builds.get(collection, {}).items())
        if accept is None or not builds:
            return builds
        accepted = [(identity, build) for identity, build in builds if accept(identity)]
        if not accepted and collection not in self._awaited:
            raise CollectionReplaced(f"collection {collection!r} was replaced by another build of it")
        return accepted

    def _check(self, collection: str) -> None:
        if self._none or collection in self._builds or collection in self._awaited:
            return
        if collection in self._unserved:
            raise Unavailable(f"collection {collection!r} is unavailable: {self._unserved[collection]}", "collection")
        raise InvalidRequest(f"no collection {collection!r}; there are {sorted({*self._builds, *self._unserved})}")
