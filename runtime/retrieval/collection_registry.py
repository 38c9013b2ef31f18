"""The collections of a node as its clients see them: documents and embedders, but no search.

The pools say which build of a collection they serve; the library has the documents of that build open, or says why it
has not. A result's ids are looked up in the build that the result is from, and in no other.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from runtime.node.config import Verify
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.attributes.filters import decode_filter
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.embedding.embedder import Embedder, EmbedderSpec, Vectors, embedder_name
from runtime.retrieval.embedding.loading import EmbedderLocation, LazyEmbedder, embedder_location, load_embedder
from runtime.retrieval.live.reader import LiveDocumentStore
from runtime.retrieval.neighbors import FUSION_DEPTH, Neighbors
from runtime.retrieval.open_build import OpenBuild, directory_identity, documents_stamp, open_build
from runtime.retrieval.passages import Passage
from runtime.retrieval.search.query import AcceptBuild, SearchResult

_KEPT = 4  # builds that no pool offers any more and whose last answers may be on their way
_RETRY_NS = 1_000_000_000  # how often it is looked whether documents that were not there are there now

log = logging.getLogger(__name__)


class CollectionBuilds:
    """A collection's builds that are open, those used last at the end.

    Documents are compared with their checksum beside everything else, as the pools compare the index; after there was
    trouble with them, before they are used.
    """

    def __init__(self, name: str, directory: Path, verify: Verify, clock: Callable[[], int]) -> None:
        self._name, self.directory, self._verify, self._clock = name, directory, verify, clock
        self.builds: dict[str, OpenBuild] = {}
        self.current: OpenBuild | None = None
        self.trouble = ""
        self._offered: frozenset[str] = frozenset()
        self._damaged: tuple[int, ...] = ()  # the file whose checksum was wrong: not to be tried again
        self._refused = ("", 0)  # the identity that was not there last, and until when that is not looked at again

    def has(self, identity: str) -> bool:
        """Whether this build's documents are open; opens them if they are what lies in the directory now."""
        if identity in self.builds:
            return self._usable(self.builds[identity])
        now, (refused, until_ns) = self._clock(), self._refused
        if identity == refused and now < until_ns:
            return False
        self._refused = identity, now + _RETRY_NS
        if self._damaged and documents_stamp(self.directory) == self._damaged:
            return False
        try:
            found = self.open()
        except CollectionError as error:
            self.complain(error.message)
            return False
        if found.identity != identity:
            self.complain(
                f"{self.directory} holds another build than the pools serve: `trinity index reload` has them serve it"
            )
            return False
        return self._usable(found)

    def _usable(self, build: OpenBuild) -> bool:
        check = build.check
        if check is None or not check.done:
            return not build.first_checked
        if check.error_message:
            self._damaged = build.file
            self.drop(build, check.error_message)
            return False
        return True

    def drop(self, build: OpenBuild, trouble: str) -> None:
        """Documents that are of no use: they are opened anew, and compared first."""
        self.builds.pop(build.identity, None)
        build.close()
        if self.current is build:
            self.current = None
        self.complain(trouble)

    def open(self) -> OpenBuild:
        """Open what lies in the directory now. Raises `CollectionError`."""
        first_checked = self._verify == "start" or bool(self.trouble)
        found = open_build(self.directory, self._verify, first_checked)
        if found.identity in self.builds:
            found.close()
        return self.builds.setdefault(found.identity, found)

    def opened_and_checked(self) -> OpenBuild:
        """`open`, and wait for the checksum where that is to be compared at start. Raises `CollectionError`."""
        found = self.open()
        if found.first_checked and found.check is not None:
            found.check.join()
            if not self._usable(found):
                raise CollectionError(self.trouble)
        return found

    def follow(self, offered: Sequence[str]) -> None:
        """The pools offer these builds: answers are from them, but for some that are on their way."""
        for identity in set(offered) - self._offered:
            self._renew(identity)
        self._offered = frozenset(offered)
        had = [identity for identity in offered if self.has(identity)]
        if not offered:
            return
        if not had:
            self.current = None
            return
        self.trouble = ""
        if self.current is None or self.current.identity not in had:
            self.current = self.builds[had[-1]]
        for identity in had:
            self.builds[identity] = self.builds.pop(identity)
        for identity in list(self.builds)[: -len(had) - _KEPT]:
            self.builds.pop(identity).close()

    def _renew(self, identity: str) -> None:
        """A build is offered that was not: what is open of it may be another file than the one that the pools found."""
        build = self.builds.get(identity)
        if (
            build is None
            or isinstance(build.documents, LiveDocumentStore)
            or build.file == documents_stamp(self.directory)
        ):
            return
        try:
            found = open_build(self.directory, self._verify, first_checked=True)
        except CollectionError:  # what is open is all that there is of it
            return
        if found.identity != identity:
            found.close()
            return
        self.builds[identity] = found
        self.current = found if self.current is build else self.current
        build.close()

    def complain(self, trouble: str) -> None:
        """Say once why the documents cannot be used."""
        if trouble != self.trouble:
            log.error("collection %s: its documents cannot be used: %s", self._name, trouble)
        self.trouble = trouble


@dataclass(frozen=True)
class KeywordSearch:
    """A text's words in one build's documents: `search` with its vector, on a thread, finds `depth` rows at most."""

    identity: str
    depth: int
    search: Callable[[Vectors], Neighbors]


class CollectionRegistry:
    """The documents and embedders of a node's collections. `dims`: vector length by collection, 0 where it is unknown.

    Made whatever state the collections are in. `follow` it with what the pools offer.
    """

    def __init__(self, plan: NodePlan, threads: int = 1, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Raises `ModelError` for an embedder that is not there."""
        self._threads, self._max_k = threads, plan.config.pool.max_k
        self._shelves = {
            c.name: CollectionBuilds(c.name, Path(c.path), c.verify, clock) for c in plan.config.collections
        }
        self._places = {c.name: embedder_location(c) for c in plan.config.collections}
        self._embedders: dict[tuple[EmbedderSpec, EmbedderLocation], Embedder] = {}
        self._dims = dict.fromkeys(self._shelves, 0)
        self.dims: Mapping[str, int] = MappingProxyType(self._dims)
        self.look_again()

    @classmethod
    def warm(cls, plan: NodePlan, threads: int = 1) -> "CollectionRegistry":
        """One whose embedders have all been used once."""
        library = cls(plan, threads)
        library.warm_up()
        return library

    def look_again(self) -> None:
        """Have what lies in the directories now, which may have been built anew. Raises `ModelError`."""
        for name, shelf in self._shelves.items():
            try:
                shelf.current = shelf.opened_and_checked()
            except CollectionError as error:
                shelf.complain(error.message)
                continue
            self._dims[name], spec, place = shelf.current.dim, shelf.current.embedder, self._places[name]
            if spec is not None and (spec, place) not in self._embedders:
                self._embedders[spec, place] = load_embedder(spec, threads=self._threads, place=place)

    # ---- which build

    def follow(self, collection: str, offered: Iterable[str]) -> None:
        """The pools serve these builds of a collection. Raises `UnknownCollection`."""
        shelf = self.shelf(collection)
        shelf.follow(tuple(offered))
        if shelf.current is not None:
            self._dims[collection] = shelf.current.dim

    def up_to_date(self, collection: str, offered: Iterable[str]) -> bool:
        """Whether the pools serve one build of a collection, if any: that which lies in its directory now, and its
        documents are open here. Reads the directory. Raises `UnknownCollection`."""
        shelf, builds = self.shelf(collection), tuple(offered)
        return not builds or (builds == (directory_identity(shelf.directory),) and shelf.has(builds[0]))

    def refused(self, collection: str, offered: Iterable[str]) -> bool:
        """Whether the documents of what the pools serve cannot be used, and no other build lies in the directory.

        One of the `troubles` says why. Raises `UnknownCollection`.
        """
        shelf, builds = self.shelf(collection), tuple(offered)
        if len(builds) != 1 or shelf.has(builds[0]) or builds[0] in shelf.builds:
            return False
        return directory_identity(shelf.directory) in ("", builds[0])

    def accept(self, collection: str, embedder: str = "", build: str = "") -> AcceptBuild:
        """Tells of a build whether its answers can be looked up here and, with an `embedder`, whether it is its; with a
        `build`, whether it is that one."""
        shelf = self.shelf(collection)

        def accepts(identity: str) -> bool:
            if build not in ("", identity) or not shelf.has(identity):
                return False
            spec = shelf.builds[identity].embedder
            return not embedder or (spec is not None and embedder == embedder_name(spec))

        return accepts

    @property
    def troubles(self) -> dict[str, str]:
        """The collections of which no pool can be asked, for the documents of what they serve are not here; and why."""
        return {name: shelf.trouble for name, shelf in self._shelves.items() if shelf.trouble}

    # ---- what is in it

    def fits(self, collection: str, wanted: bytes) -> bool:
        """Whether a live collection's documents, as they are by now, have what a filter compares."""
        build = self.shelf(collection).current
        documents = None if build is None else build.documents
        try:
            return bool(wanted) and isinstance(documents, LiveDocumentStore) and documents.fits(decode_filter(wanted))
        except CollectionError:
            return False

    def embedder(self, collection: str) -> Embedder:
        """The collection's own. Raises `InvalidRequest` if it has none, `Unavailable` if its documents are not here."""
        shelf = self.shelf(collection)
        if shelf.current is None:
            trouble = shelf.trouble or "the documents of the build that the pools serve are not open yet"
            raise Unavailable(f"collection {collection!r} is unavailable: {trouble}")
        spec, place = shelf.current.embedder, self._places[collection]
        if spec is None:
            raise InvalidRequest(f"collection {collection!r} was built from vectors: ask it with a vector", "query")
        if (spec, place) not in self._embedders:
            self._embedders[spec, place] = LazyEmbedder(spec, place, self._threads)
        return self._embedders[spec, place]

    def by_words(
        self, collection: str, text: str, k: int, wanted: bytes, deadline_ns: int, identity: str = ""
    ) -> "KeywordSearch":
        """What finds a text's words in the documents of this build, or of that which the pools serve now.

        Raises `InvalidRequest` for a build without words, `CollectionReplaced` where it is not here.
        """
        shelf = self.shelf(collection)
        build = shelf.builds.get(identity) if identity else shelf.current
        if build is None:
            raise CollectionReplaced(f"collection {collection!r}: the words of the build that is asked are not here")
        if build.words is None:
            raise InvalidRequest(
                f"collection {collection!r} has no index of words: "
                "`trinity index add` with its files, or `trinity index build --force`, makes one",
                "hybrid",
            )
        depth = min(FUSION_DEPTH * k, max(self._max_k, k))
        words, passing = build.words, decode_filter(wanted) if wanted else None

        def search(vector: Vectors) -> Neighbors:
            try:
                return words.nearest(text, vector, depth, passing, deadline_ns)
            except CollectionError as error:
                told = f"collection {collection!r}: its words cannot be searched: {error.message}"
                raise Unavailable(told) from error

        return KeywordSearch(build.identity, depth, search)

    def about(self, collection: str) -> CollectionSummary:
        """What a collection is. Raises `UnknownCollection`."""
        current = self.shelf(collection).current
        return CollectionSummary() if current is None else current.now

    def embedders(self) -> dict[str, Embedder]:
        """Those of the collections, by a short name where no two have it (see `specs.embedder_name`)."""
        found = {}
        for name, shelf in self._shelves.items():
            if shelf.current is not None and shelf.current.embedder is not None:
                embedder = self.embedder(name)
                found[embedder.name] = embedder
        short = Counter(name.partition("@")[0] for name in found)
        return {name.partition("@")[0] if short[name.partition("@")[0]] == 1 else name: e for name, e in found.items()}

    def warm_up(self) -> None:
        """Use every embedder once. A server that does not answer may do so later: that is logged."""
        for embedder in self._embedders.values():
            try:
                embedder.embed(["a first text"])
            except (EmbedderUnreachable, EmbedderFailed) as error:
                log.error("the embedder %s: %s", embedder.name, error.message)

    def passages(self, collection: str, result: SearchResult) -> tuple[Passage, ...]:
        """The documents of a search result; of a collection of bare vectors, passages without title and text.

        Those that are deleted by now are left out. Raises `CollectionReplaced` for a result from a build that is not
        here any more, `Unavailable` where documents cannot be read.
        """
        shelf = self.shelf(collection)
        build = shelf.builds.get(result.identity)
        if build is None:
            raise CollectionReplaced(f"collection {collection!r}: the documents of this answer are gone")
        rows = [int(row) for row in result.ids if row >= 0]
        found: Sequence[Document | None]
        if build.documents is None:
            found = [Document(str(row), "", "") for row in rows]
        else:
            try:
                found = build.documents.get(rows)
            except CollectionError as error:  # that collection's failure, until its file is whole again
                shelf.drop(build, error.message)
                raise Unavailable(f"collection {collection!r} is unavailable: {error.message}") from error
        return tuple(
            Passage(document.id, document.title, float(distance), document.text, document.attributes)
            for document, distance in zip(found, result.distances, strict=False)
            if document is not None
        )

    def shelf(self, collection: str) -> CollectionBuilds:
        try:
            return self._shelves[collection]
        except KeyError:
            known = ", ".join(sorted(self._shelves)) or "none"
            raise UnknownCollection(
                f"no collection {collection!r} on this node; known: {known}", "collection"
            ) from None
