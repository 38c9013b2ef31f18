"""Registry of a node's collections in a client process: open documents and embedders, without search.

The pools report which build of a collection they serve; the registry keeps the documents of that build open, or the
reason why it cannot. A result's ids are resolved only in the build that the result comes from.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

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
from runtime.retrieval.attributes.filters import decode_filter
from runtime.retrieval.background_task import BackgroundTask
from runtime.retrieval.collection_builds import CollectionBuilds
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.description import read_identity
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.embedding.embedder import Embedder, EmbedderSpec, Vectors, embedder_name
from runtime.retrieval.embedding.loading import EmbedderLocation, LazyEmbedder, embedder_location, load_embedder
from runtime.retrieval.neighbors import FUSION_DEPTH, Neighbors, fuse_ranks
from runtime.retrieval.passages import OnRead, Passage, check_size, size_of
from runtime.retrieval.search.query import AcceptBuild, SearchResult

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeywordQuery:
    """Keyword search for one text in one build's documents, for hybrid queries.

    `search` needs the text's vector, runs on a thread, and returns at most `depth` rows.
    """

    identity: str
    depth: int
    search: Callable[[Vectors], Neighbors]


class DocumentLookup(msgspec.Struct, frozen=True, eq=False):
    """The documents of a search result, to be read on any thread. build: the open one that the result is from."""

    build: CollectionDocuments
    rows: list[int]

    def read(self, on_read: OnRead) -> Sequence[Document | None] | CollectionError:
        """Return the documents, None for those deleted since; or why they cannot be read.

        Raises `ResponseTooLarge`, and the errors of `on_read`.
        """
        try:
            return self.build.get(self.rows, self._count(on_read))
        except CollectionError as error:
            return error

    def known(self, on_read: OnRead, since_ns: int, now_ns: int) -> Sequence[Document | None] | CollectionError | None:
        """As `read`, of documents that are in memory; None if `read` has to be called. Never waits.

        `on_read` is called once: nothing is read. `since_ns`, `now_ns`: see `CollectionDocuments.get_known`."""
        try:
            known = self.build.get_known(self.rows, since_ns, now_ns)
        except CollectionError as error:
            return error
        if known is None:
            return None
        documents, size = known
        check_size(size, len(self.rows))
        on_read(size)
        return documents

    def _count(self, on_read: OnRead) -> Callable[[Document], None]:
        """Return a function that counts the size of the documents that it was called with. It raises
        `ResponseTooLarge` at the first too many."""
        size = 0

        def count(document: Document) -> None:
            nonlocal size
            size += size_of(document.id, document.title, document.text, document.attributes)
            check_size(size, len(self.rows))
            on_read(size)

        return count


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

    def keyword_query(
        self, collection: str, text: str, k: int, filter: bytes, deadline_ns: int, identity: str = ""
    ) -> KeywordQuery:
        """Return a keyword search for a text in the build `identity`, or in the one that the pools serve now.

        Raises `CollectionReplaced` for a build that is not open.
        """
        builds = self.builds_of(collection)
        build = builds.by_identity.get(identity) if identity else builds.current
        if build is None:
            raise CollectionReplaced(f"collection {collection!r}: the keyword index of this build is not open")
        depth = min(FUSION_DEPTH * k, max(self._max_k, k))
        parsed = decode_filter(filter) if filter else None

        def search(vector: Vectors) -> Neighbors:
            try:
                return build.search_keywords(text, vector, depth, parsed, deadline_ns)
            except CollectionError as error:
                raise Unavailable(
                    f"collection {collection!r}: its keyword index cannot be searched: {error.message}"
                ) from error

        return KeywordQuery(build.identity, depth, search)

    def fuse(self, collection: str, result: SearchResult, keywords: Neighbors, k: int, weight: float) -> SearchResult:
        """Fuse a search result with one of a keyword search in the same build. Raises as `found`."""
        build = self._build_of(collection, result)
        try:
            by_vector, by_words = build.align((result.ids, result.distances), keywords)
        except CollectionError as error:
            raise Unavailable(f"collection {collection!r} is unavailable: {error.message}") from error
        ids, distances = fuse_ranks(by_vector, by_words, k, weight)
        return msgspec.structs.replace(result, ids=ids, distances=distances)

    def _build_of(self, collection: str, result: SearchResult) -> CollectionDocuments:
        build = self.builds_of(collection).by_identity.get(result.identity)
        if build is None:
            raise CollectionReplaced(f"collection {collection!r}: the build of this result is not open any more")
        return build

    def lookup(self, collection: str, result: SearchResult) -> DocumentLookup:
        """Return the documents of a search result, not read yet. Raises `CollectionReplaced` if its build is closed."""
        return DocumentLookup(self._build_of(collection, result), [row for row in result.ids.tolist() if row >= 0])

    def found(
        self,
        collection: str,
        result: SearchResult,
        lookup: DocumentLookup,
        documents: Sequence[Document | None] | CollectionError,
    ) -> tuple[Passage, ...]:
        """Return the passages of a search result, whose documents these are, without those deleted since, and without
        title and text for a collection of bare vectors. Raises `Unavailable` if they cannot be read."""
        if isinstance(documents, CollectionError):  # only this collection fails, until its file is whole again
            self.builds_of(collection).discard(lookup.build, documents.message)
            raise Unavailable(f"collection {collection!r} is unavailable: {documents.message}") from documents
        return tuple([
            Passage(document.id, document.title, distance, document.text, document.attributes)
            for document, distance in zip(documents, result.distances.tolist(), strict=False)
            if document is not None
        ])  # fmt: skip
