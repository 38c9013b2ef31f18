"""An open build of a collection in a client process: its documents, its keyword index, its embedder's description."""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from runtime.errors import CollectionError
from runtime.node.config import Verify
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.background_task import BackgroundTask
from runtime.retrieval.collections.checksums import Checksums, open_consistent
from runtime.retrieval.collections.documents import DocumentStore
from runtime.retrieval.collections.keyword_search import KeywordSearch
from runtime.retrieval.collections.manifest import DOCUMENTS, KEYWORDS, MANIFEST, Manifest, read_identity
from runtime.retrieval.embedding.embedder import EmbedderSpec, embedder_name
from runtime.retrieval.live.reader import LiveDocumentStore
from runtime.retrieval.live.storage.checksums import LiveChecksums
from runtime.retrieval.live.storage.manifest import is_live, read_description
from runtime.retrieval.neighbors import Neighbors
from runtime.retrieval.search.query import SearchResult, fuse_keywords


@dataclass(frozen=True)
class OpenBuild:
    """One build of a collection: its open documents (None: bare vectors), its keyword index (None: built without), and
    the embedder it was built with.

    `stamp`: `documents_stamp` at the time of opening. `check` verifies the documents' checksums; None: not verified.
    `verify_first`: the documents must not be used before the check has ended.
    """

    identity: str
    documents: DocumentStore | LiveDocumentStore | None
    keywords: KeywordSearch | LiveDocumentStore | None
    embedder: EmbedderSpec | None
    dim: int
    summary: CollectionSummary
    stamp: tuple[int, ...]
    check: "BackgroundTask[None] | LiveVerification | None"
    verify_first: bool

    @property
    def current_summary(self) -> CollectionSummary:
        """The summary as of now: a live collection grows."""
        documents = self.documents
        if not isinstance(documents, LiveDocumentStore):
            return self.summary
        return replace(self.summary, size=documents.size, files=documents.size)

    def fuse(self, result: SearchResult, keywords: Neighbors, k: int, weight: float) -> SearchResult:
        """Fuse a result of the pools with one of a keyword search. Raises `CollectionError`."""
        if isinstance(self.documents, LiveDocumentStore):
            (ids, distances), keywords = self.documents.align((result.ids, result.distances), keywords)
            result = structs.replace(result, ids=ids, distances=distances)
        return fuse_keywords(result, keywords, k, weight)

    def close(self) -> None:
        """Stop the check and close the files."""
        if self.check is not None:
            self.check.cancel()
        if self.documents is not None:
            self.documents.close()
        if self.keywords is not None and self.keywords is not self.documents:  # a live collection is both
            self.keywords.close()


def directory_identity(directory: Path) -> str:
    """Return the identity of the build that a directory contains now; "" if it cannot be read."""
    try:
        return read_description(directory).identity if is_live(directory) else read_identity(directory)
    except CollectionError:
        return ""


def documents_stamp(directory: Path) -> tuple[int, ...]:
    """Return device, inode, size, mtime and ctime of each file that contains documents; () if there is none."""
    paths = [directory / DOCUMENTS, *sorted(directory.glob(f"segments/*/{DOCUMENTS}"))]
    stamp: list[int] = []
    for path in paths:
        with suppress(OSError):
            found = os.stat(path)
            stamp += (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return tuple(stamp)


def _built_at(directory: Path) -> int:
    try:
        return int(os.stat(directory / MANIFEST).st_mtime)
    except OSError:
        return 0


def open_build(directory: Path, verify: Verify, verify_first: bool) -> OpenBuild:
    """Open the build that a directory contains now. Raises `CollectionError`."""
    if is_live(directory):
        return _open_live(directory, verify, verify_first)

    def opened(manifest: Manifest) -> OpenBuild:
        stamp, check, documents, keywords = documents_stamp(directory), None, None, None
        if (facts := manifest.files.get(DOCUMENTS)) is not None:
            documents = DocumentStore.open(directory / DOCUMENTS, manifest.size)
            try:
                keywords = KeywordSearch(directory, manifest) if KEYWORDS in manifest.files else None
                if verify != "never":
                    files = {directory / name: manifest.files.get(name) for name in (DOCUMENTS, KEYWORDS)}
                    sums = Checksums({path: expected for path, expected in files.items() if expected is not None})
                    check = BackgroundTask(
                        "documents", lambda work: sums.verify(work.check_cancelled if verify_first else work.throttle)
                    )
            except CollectionError:
                documents.close()
                if keywords is not None:
                    keywords.close()
                raise
        summary = CollectionSummary(
            is_open=True,
            size=manifest.size,
            files=(documents.file_count if documents else 0) or manifest.size,
            document_bytes=facts.bytes if facts else 0,
            created_at=_built_at(directory),
            dim=manifest.dim,
            metric=manifest.metric,
            embedder="" if manifest.embedder is None else embedder_name(manifest.embedder),
        )
        return OpenBuild(
            manifest.identity, documents, keywords, manifest.embedder, manifest.dim, summary, stamp, check,
            verify_first and check is not None,
        )  # fmt: skip

    return open_consistent(directory, opened, OpenBuild.close)


def check_documents(directory: Path, identity: str) -> None:
    """Open the documents of a build once. Raises `CollectionError` if they are damaged or of another build."""
    found = open_build(directory, "never", verify_first=False)
    found.close()
    if found.identity != identity:
        raise CollectionError(f"{directory} was replaced by another collection while it was opened")


class LiveVerification:
    """Background verification of a live collection's documents, segment by segment, including segments added later.

    `done`: the segments that existed at first have been verified.
    """

    def __init__(self, checksums: LiveChecksums, *, verify_first: bool) -> None:
        self._checksums = checksums
        self._work = BackgroundTask(
            "documents", lambda work: checksums.verify(work.check_cancelled if verify_first else work.throttle)
        )
        self._first_done = False

    @property
    def done(self) -> bool:
        """Also starts verification of the segments added since."""
        if not self._work.done:
            return self._first_done
        self._first_done = True
        if self._checksums.pending and not self._work.error_message:
            self._work = BackgroundTask("documents", lambda work: self._checksums.verify(work.throttle))
        return True

    @property
    def error_message(self) -> str:
        """What is damaged; "" as long as nothing was found."""
        return self._work.error_message if self._work.done else ""

    def cancel(self) -> None:
        """Request an early end of the verification."""
        self._work.cancel()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the running verification."""
        self._work.join(timeout_s)


def _open_live(directory: Path, verify: Verify, verify_first: bool) -> OpenBuild:
    """Open a live collection. It is one build for its lifetime: a row stands for one text."""
    stamp, documents = documents_stamp(directory), LiveDocumentStore(directory)
    description = documents.description
    summary = CollectionSummary(
        is_open=True,
        size=documents.size,
        files=documents.size,
        created_at=_built_at(directory),
        dim=description.dim,
        metric=description.metric,
        embedder="" if description.embedder is None else embedder_name(description.embedder),
    )
    check = None if verify == "never" else LiveVerification(documents.checksums, verify_first=verify_first)
    return OpenBuild(
        description.identity, documents, documents, description.embedder, description.dim, summary, stamp, check,
        verify_first and check is not None,
    )  # fmt: skip
