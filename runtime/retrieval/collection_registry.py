"""Registry of a node's collections in a client process: open documents and embedders, without search.

The pools report which build of a collection they serve; the registry keeps the documents of that build open, or the
reason why it cannot. A result's ids are resolved only in the build that the result comes from.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from runtime.errors import (
    CollectionError,
    CollectionReplaced,
    EmbedderFailed,
    EmbedderUnreachable,
    InvalidRequest,
    Unavailable,
    UnknownCollection,
)
from runtime.node.placement.plan import NodePlan
from runtime.node.stores_config import STORES
from runtime.retrieval.attributes.filters import decode_filter
from runtime.retrieval.background_task import BackgroundTask
from runtime.retrieval.collection_builds import CollectionBuilds
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.description import read_identity
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.embedding.embedder import Embedder, EmbedderSpec, embedder_name
from runtime.retrieval.embedding.loading import EmbedderLocation, LazyEmbedder, embedder_location, load_embedder
from runtime.retrieval.neighbors import FUSION_DEPTH
from runtime.retrieval.search.query import AcceptBuild

log = logging.getLogger(__name__)


class CollectionRegistry:
    """The documents and embedders of a node's collections. `dims`: vector length by collection, 0 while unknown.

    Can be constructed whatever state the collections are in. `follow` keeps it in step with what the pools serve.
    """

    def __init__(
        self,
        plan: NodePlan,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        device: str = "cpu",
    ) -> None:
        """device: of the embedders. Raises `ModelError` for a missing embedder."""
        self._max_k = plan.max_k
        self._builds = {c.name: CollectionBuilds(c.name, Path(c.path), clock) for c in plan.config.searchable}
        self._locations = {c.name: embedder_location(c, device) for c in plan.config.searchable}
        self._embedders: dict[tuple[EmbedderSpec, EmbedderLocation], Embedder] = {}
        self._dims = dict.fromkeys(self._builds, 0)
        self.dims: Mapping[str, int] = MappingProxyType(self._dims)
        self.refresh()

    @classmethod
    def warm(cls, plan: NodePlan, device: str = "cpu") -> "CollectionRegistry":
        """Return a registry whose embedders have each been used once."""
        registry = cls(plan, device=device)
        registry.warm_up()
        return registry

    def refresh(self) -> None:
        """Open what the directories contain now; a collection may have been rebuilt. Raises `ModelError`."""
        for name, builds in self._builds.items():
            if name == STORES and not builds.directory.exists():
                continue  # a pool creates it, or reports why it cannot
            try:
                builds.current = builds.open()
            except CollectionError as error:
                builds.set_error(error.message)
                continue
            self._dims[name], spec, location = (
                builds.current.description.dim,
                builds.current.embedder,
                self._locations[name],
            )
            if spec is not None and (spec, location) not in self._embedders:
                self._embedders[spec, location] = load_embedder(spec, location=location)

    # ---- builds

    def builds_of(self, collection: str) -> CollectionBuilds:
        """Return the open builds of a collection. Raises `UnknownCollection`."""
        try:
            return self._builds[collection]
        except KeyError:
            known = ", ".join(sorted(self._builds)) or "none"
            raise UnknownCollection(
                f"no collection {collection!r} on this node; known: {known}", "collection"
            ) from None

    def follow(self, collection: str, served: Iterable[str]) -> None:
        """Follow the builds of a collection that the pools serve. Raises `UnknownCollection`."""
        builds = self.builds_of(collection)
        if builds.follow(tuple(served)) and builds.current is not None:
            self._dims[collection] = builds.current.description.dim

    def opening(self, collection: str) -> BackgroundTask[CollectionDocuments] | None:
        """Return the task that opens a build that the pools serve, if any. Raises `UnknownCollection`."""
        return self.builds_of(collection).opening

    def is_current(self, collection: str, served: Iterable[str]) -> bool:
        """Return whether the pools serve no build, or only the one in the directory and its documents are usable here.

        Reads the directory. Raises `UnknownCollection`.
        """
        builds, identities = self.builds_of(collection), tuple(served)
        return not identities or (identities == (read_identity(builds.directory),) and builds.has(identities[0]))

    def is_unusable(self, collection: str, served: Iterable[str]) -> bool:
        """Return whether the served build's documents cannot be used and the directory contains no other build.

        `unavailable` has the reason. Raises `UnknownCollection`.
        """
        builds, identities = self.builds_of(collection), tuple(served)
        if len(identities) != 1 or builds.has(identities[0]) or identities[0] in builds.by_identity or builds.opening:
            return False
        return read_identity(builds.directory) in ("", identities[0])

    def accept(self, collection: str, embedder: str = "", build: str = "") -> AcceptBuild:
        """Return a predicate on build identities: whether results of that build can be resolved here.

        With `embedder` the build must have been built with it; with `build` it must be that one.
        """
        builds = self.builds_of(collection)

        def accepts(identity: str) -> bool:
            if build not in ("", identity) or not builds.has(identity):
                return False
            spec = builds.by_identity[identity].embedder
            return not embedder or (spec is not None and embedder == embedder_name(spec))

        return accepts

    @property
    def unavailable(self) -> dict[str, str]:
        """Collections that cannot be queried because the documents of the served build are missing: the reasons."""
        return {name: builds.error for name, builds in self._builds.items() if builds.error}

    def summary(self, collection: str) -> CollectionSummary:
        """Return the size and properties of a collection. Raises `UnknownCollection`."""
        current = self.builds_of(collection).current
        return CollectionSummary() if current is None else current.summary

    def current(self, collection: str) -> CollectionDocuments:
        """Return the open build of a collection. Raises `UnknownCollection`, `Unavailable`."""
        builds = self.builds_of(collection)
        if builds.current is None:
            raise Unavailable(f"collection {collection!r} is unavailable: {builds.reason}")
        return builds.current

    # ---- embedders

    def embedder(self, collection: str) -> Embedder:
        """Return the collection's embedder.

        Raises `InvalidRequest` if it has none, `Unavailable` if its documents are not open.
        """
        spec, location = self.current(collection).embedder, self._locations[collection]
        if spec is None:
            raise InvalidRequest(
                f"collection {collection!r} was built from vectors and has no embedder: query it with a vector", "query"
            )
        if (spec, location) not in self._embedders:
            self._embedders[spec, location] = LazyEmbedder(spec, location)
        return self._embedders[spec, location]

    def embedders(self) -> dict[str, Embedder]:
        """Return the collections' embedders by short name, or by full name where two share one (`embedder_name`)."""
        by_name = {}
        for name, builds in self._builds.items():
            if builds.current is not None and builds.current.embedder is not None:
                embedder = self.embedder(name)
                by_name[embedder.name] = embedder
        short = Counter(name.partition("@")[0] for name in by_name)
        return {
            name.partition("@")[0] if short[name.partition("@")[0]] == 1 else name: e for name, e in by_name.items()
        }

    def warm_up(self) -> None:
        """Use every embedder once. A server that does not answer is logged: it may answer later."""
        for embedder in self._embedders.values():
            try:
                embedder.embed(["a first text"])
            except (EmbedderUnreachable, EmbedderFailed) as error:
                log.error("the embedder %s: %s", embedder.name, error.message)

    # ---- documents

    def has_attributes(self, collection: str, filter: bytes) -> bool:
        """Return whether the documents of a collection that was written to have, as of now, the attributes of a filter:
        the clients' sessions may not know them yet.

        Raises `InvalidFilter` if it lacks one, or has it with another type.
        """
        build = self.builds_of(collection).current
        if not filter or build is None or not build.was_written:
            return False
        try:
            build.check_filter(decode_filter(filter))
        except CollectionError:
            return False
        return True

    def build_of(self, collection: str, identity: str) -> CollectionDocuments:
        """Return an open build. Raises `UnknownCollection`, `CollectionReplaced` if it is not open."""
        build = self.builds_of(collection).by_identity.get(identity)
        if build is None:
            raise CollectionReplaced(f"collection {collection!r}: this build is not open any more")
        return build

    def depth(self, k: int) -> int:
        """Return how many results of each side are fused to `k`."""
        return min(FUSION_DEPTH * k, max(self._max_k, k))

    def unreadable(self, collection: str, build: CollectionDocuments, error: CollectionError) -> Unavailable:
        """Close a build whose documents cannot be read; return the error of the searches that needed them. Only this
        collection fails, until its file is whole again."""
        self.builds_of(collection).discard(build, error.message)
        return Unavailable(f"collection {collection!r} is unavailable: {error.message}")
