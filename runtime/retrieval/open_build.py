"""One build of a collection as its clients have it open: its documents, and what it was embedded with."""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.errors import CollectionError
from runtime.node.config import Verify
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.background_task import BackgroundTask
from runtime.retrieval.collections.checksums import Checksums, open_consistent
from runtime.retrieval.collections.documents import DocumentStore
from runtime.retrieval.collections.keyword_search import KeywordSearch
from runtime.retrieval.collections.manifest import DOCUMENTS, MANIFEST, WORDS, Manifest, read_identity
from runtime.retrieval.embedding.embedder import EmbedderSpec, embedder_name
from runtime.retrieval.live.reader import LiveDocumentStore
from runtime.retrieval.live.storage.checksums import LiveChecksums
from runtime.retrieval.live.storage.manifest import is_live, read_description


@dataclass(frozen=True)
class OpenBuild:
    """One build of a collection: its documents, open (None: bare vectors), their words (None: a build without), and
    what it was embedded with.

    `file`: what the documents' file was when it was opened. `check` compares their checksums; None: nobody does.
    `first_checked`: the documents are of no use before that has ended.
    """

    identity: str
    documents: DocumentStore | LiveDocumentStore | None
    words: KeywordSearch | LiveDocumentStore | None
    embedder: EmbedderSpec | None
    dim: int
    about: CollectionSummary
    file: tuple[int, ...]
    check: "BackgroundTask[None] | LiveVerification | None"
    first_checked: bool

    @property
    def now(self) -> CollectionSummary:
        """What it is by now: a live collection grows."""
        documents = self.documents
        if not isinstance(documents, LiveDocumentStore):
            return self.about
        return replace(self.about, size=documents.size, files=documents.size)

    def close(self) -> None:
        if self.check is not None:
            self.check.cancel()
        if self.documents is not None:
            self.documents.close()
        if self.words is not None and self.words is not self.documents:  # a live collection is both
            self.words.close()


def directory_identity(directory: Path) -> str:
    """Of what lies in a directory now; "" if that cannot be read."""
    try:
        return read_description(directory).identity if is_live(directory) else read_identity(directory)
    except CollectionError:
        return ""


def documents_stamp(directory: Path) -> tuple[int, ...]:
    """Which files hold the documents now, and when they were last written; () if there are none."""
    paths = [directory / DOCUMENTS, *sorted(directory.glob(f"segments/*/{DOCUMENTS}"))]
    told: list[int] = []
    for path in paths:
        with suppress(OSError):
            found = os.stat(path)
            told += (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return tuple(told)


def _built_at(directory: Path) -> int:
    try:
        return int(os.stat(directory / MANIFEST).st_mtime)
    except OSError:
        return 0


def open_build(directory: Path, verify: Verify, first_checked: bool) -> OpenBuild:
    """The build that lies in a directory now. Raises `CollectionError`."""
    if is_live(directory):
        return _open_live(directory, verify, first_checked)

    def opened(manifest: Manifest) -> OpenBuild:
        file, check, documents, words = documents_stamp(directory), None, None, None
        if (checksum := manifest.files.get(DOCUMENTS)) is not None:
            documents = DocumentStore.open(directory / DOCUMENTS, manifest.size)
            try:
                words = KeywordSearch(directory, manifest) if WORDS in manifest.files else None
                if verify != "never":
                    files = {directory / name: manifest.files.get(name) for name in (DOCUMENTS, WORDS)}
                    sums = Checksums({path: told for path, told in files.items() if told is not None})
                    check = BackgroundTask(
                        "documents", lambda work: sums.verify(work.check_cancelled if first_checked else work.throttle)
                    )
            except CollectionError:
                documents.close()
                if words is not None:
                    words.close()
                raise
        waits = first_checked and check is not None
        about = CollectionSummary(
            here=True,
            size=manifest.size,
            files=(documents.file_count if documents else 0) or manifest.size,
            document_bytes=checksum.bytes if checksum else 0,
            created_at=_built_at(directory),
            dim=manifest.dim,
            metric=manifest.metric,
            embedder="" if manifest.embedder is None else embedder_name(manifest.embedder),
        )
        return OpenBuild(
            manifest.identity, documents, words, manifest.embedder, manifest.dim, about, file, check, waits
        )

    return open_consistent(directory, opened, OpenBuild.close)


def check_documents(directory: Path, identity: str) -> None:
    """Open the documents of a build. Raises `CollectionError` for what is wrong with them, or if another lies there."""
    found = open_build(directory, "never", first_checked=False)
    found.close()
    if found.identity != identity:
        raise CollectionError(f"{directory} was replaced by another collection while it was opened")


class LiveVerification:
    """Compares the documents of a live collection beside everything else: of each segment, those that come later too.

    `done`: those that were there at first are compared.
    """

    def __init__(self, checksums: LiveChecksums, *, hurry: bool) -> None:
        self._checksums = checksums
        self._work = BackgroundTask(
            "documents", lambda work: checksums.verify(work.check_cancelled if hurry else work.throttle)
        )
        self._first_done = False

    @property
    def done(self) -> bool:
        """Also begins with what has come since."""
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
        """Have it end soon."""
        self._work.cancel()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for what runs."""
        self._work.join(timeout_s)


def _open_live(directory: Path, verify: Verify, first_checked: bool) -> OpenBuild:
    """A live collection is one build for ever: a row stands for one text."""
    file, documents = documents_stamp(directory), LiveDocumentStore(directory)
    told = documents.description
    about = CollectionSummary(
        here=True,
        size=documents.size,
        files=documents.size,
        created_at=_built_at(directory),
        dim=told.dim,
        metric=told.metric,
        embedder="" if told.embedder is None else embedder_name(told.embedder),
    )
    check = None if verify == "never" else LiveVerification(documents.checksums, hurry=first_checked)
    waits = first_checked and check is not None
    return OpenBuild(told.identity, documents, documents, told.embedder, told.dim, about, file, check, waits)
