"""Routing table of a client: which pools serve which build and shard of a collection, from their catalogues."""

from collections.abc import Iterable, Sequence

from ipc import Catalogue, Served
from runtime.errors import CollectionReplaced, InvalidRequest, Unavailable
from runtime.retrieval.attributes.filters import binds, check_filter, decode_filter
from runtime.retrieval.attributes.schema import AttributeType
from runtime.retrieval.search.query import AcceptBuild

Pools = tuple[int, ...]


class _Build:
    """One build of a collection: its live pools by shard."""

    def __init__(self, shards: int) -> None:
        self.pools: list[Pools] = [()] * shards

    @property
    def whole(self) -> bool:
        return all(self.pools)


class RoutingTable:
    """Immutable; rebuilt when a pool appears, is lost, or serves something else.

    live: numbers and catalogues of the live pools. lost: last catalogues of the lost ones, which may come back.
    """

    def __init__(self, live: Iterable[tuple[int, Catalogue]] = (), lost: Iterable[Catalogue] = ()) -> None:
        self._builds: dict[str, dict[str, _Build]] = {}
        self._unserved: dict[str, str] = {}
        self._served: dict[str, Served] = {}  # of each collection the last one listed
        self._demanded: set[str] = set()
        self._awaited = {served.name for catalogue in lost for served in catalogue.served}
        self._no_pool = True
        for number, catalogue in live:
            self._no_pool = False
            for entry in catalogue.served:
                self._served[entry.name] = entry
                if entry.demanded:
                    self._demanded.add(entry.name)
                build = self._builds.setdefault(entry.name, {}).setdefault(entry.identity, _Build(entry.shards))
                if entry.shards == len(build.pools):
                    build.pools[entry.shard] = (*build.pools[entry.shard], number)
            for other in catalogue.unserved:
                self._unserved[other.name] = other.reason
        self.direct = {
            name: (identity, build.pools[0])
            for name, builds in self._builds.items()
            for identity, build in builds.items()
            if len(builds) == len(build.pools) == 1 and name not in self._demanded
        }
        """Fast path: identity and pools of each collection with one build, one shard, and no demanded filter."""

    @property
    def unavailable(self) -> dict[str, str]:
        """The collections that no pool can serve: the reasons."""
        return {name: reason for name, reason in self._unserved.items() if name not in self._builds}

    @property
    def collections(self) -> tuple[str, ...]:
        """The names of the collections that are served."""
        return tuple(self._builds)

    def check_filter(self, collection: str, content: bytes) -> None:
        """Raise `InvalidFilter` or `InvalidRequest` for a filter that the collection's pools would refuse."""
        served = self._served.get(collection)
        if served is None or not (content or served.demanded):
            return
        parsed = decode_filter(content) if content else None
        if served.demanded and not binds(parsed, served.demanded):
            raise InvalidRequest(
                f"collection {collection!r} demands a filter that binds {served.demanded!r} by eq or in", "filter"
            )
        if parsed is not None:
            check_filter(parsed, {name: AttributeType(kind) for name, kind in served.attributes.items()})

    def identities(self, collection: str) -> tuple[str, ...]:
        """Return the identities of the builds that some pool serves."""
        return tuple(self._builds.get(collection, ()))

    def shards(self, collection: str) -> int:
        """Return a collection's number of shards; 0 if no pool that serves it is up. Raises as `choose`."""
        self._check(collection)
        return max((len(build.pools) for build in self._builds.get(collection, {}).values()), default=0)

    def pools(self, collection: str, identity: str, shard: int) -> Pools:
        """Return the pools that serve this shard of this build."""
        build = self._builds.get(collection, {}).get(identity)
        return build.pools[shard] if build is not None and shard < len(build.pools) else ()

    def has_shard(self, collection: str, shard: int) -> bool:
        """Return whether a pool serves this shard of any build."""
        return any(self.pools(collection, identity, shard) for identity in self.identities(collection))

    def choose(self, collection: str, accept: AcceptBuild | None) -> Pools:
        """Return the pools that may answer a query on a collection with one shard, of any accepted build.

        Raises `InvalidRequest` if there is no such collection, `Unavailable` if its pools report that they cannot serve
        it, `CollectionReplaced` if there are builds and none of them is accepted.
        """
        builds = self._accepted(collection, accept)
        if len(builds) == 1:
            return builds[0][1].pools[0]
        return tuple(sorted(number for _, build in builds for number in build.pools[0]))

    def whole_build(self, collection: str, accept: AcceptBuild | None) -> str | None:
        """Return the identity of the complete accepted build with the most replicas; None if there is none.

        Raises as `choose`.
        """
        builds = [(min(map(len, b.pools)), name) for name, b in self._accepted(collection, accept) if b.whole]
        return max(builds)[1] if builds else None

    def is_whole(self, collection: str, identity: str) -> bool:
        """Return whether every shard of this build is served."""
        build = self._builds.get(collection, {}).get(identity)
        return build is not None and build.whole

    def _accepted(self, collection: str, accept: AcceptBuild | None) -> list[tuple[str, _Build]]:
        self._check(collection)
        builds = list(self._builds.get(collection, {}).items())
        if accept is None or not builds:
            return builds
        accepted = [(identity, build) for identity, build in builds if accept(identity)]
        if not accepted and collection not in self._awaited:
            raise CollectionReplaced(
                f"collection {collection!r} was replaced by another build: retry, or reload it first"
            )
        return accepted

    def _check(self, collection: str) -> None:
        if self._no_pool or collection in self._builds or collection in self._awaited:
            return
        if collection in self._unserved:
            raise Unavailable(f"collection {collection!r} is unavailable: {self._unserved[collection]}", "collection")
        raise InvalidRequest(f"no collection {collection!r}; there are {sorted({*self._builds, *self._unserved})}")


def only_of(names: Sequence[str]) -> str:
    """Return the collection of a query that names none. Raises `InvalidRequest`, `Unavailable`."""
    if len(names) == 1:
        return names[0]
    if not names:
        raise Unavailable("collection is missing, and no pool is up that could report the only one")
    raise InvalidRequest(f"collection is missing; there are {sorted(names)}", "collection")
