"""Files into a collection, and into one that is there: what has not changed is neither read nor embedded again.

ingested = ingest([Path("handbook")], Path("docs"), spec, embedder)     # a new collection
ingested = add([Path("handbook")], Path("docs"))                        # once more: what changed since
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import BuildRefused, CollectionError, ResourceBusy
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.collections.documents import Document, Sources
from runtime.retrieval.collections.sources import Progress, no_progress, read_documents
from runtime.retrieval.embedding.embedder import Embedder, EmbedderSpec, Vectors, embedding_text
from runtime.retrieval.embedding.loading import EmbedderLocation, load_embedder
from runtime.retrieval.ingestion.isolated_reader import IsolatedReader
from runtime.retrieval.ingestion.readers import PLAIN, check_packages, read_file
from runtime.retrieval.ingestion.sections import Section, UnreadableFile, split
from runtime.retrieval.ingestion.source_files import SourceFile, checksum, common_root, find_files, read_bytes
from runtime.retrieval.passages import Attribute

PASSAGE_TOKENS = 192  # four of them are what a prompt has room for by default
MIN_PASSAGE_TOKENS = 16
_SHORT = 0.25  # of a passage: a section shorter than this goes on with the next
_ROWS_AT_ONCE = 256


@dataclass(slots=True)
class IngestReport:
    """What became of the files. `skipped`: why, by path. Passages `kept` have the vectors that they had. `words`: an
    index of words was made where there was none."""

    read: int = 0
    unchanged: int = 0
    gone: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    embedded: int = 0
    kept: int = 0
    words: bool = False

    @property
    def changed(self) -> bool:
        """Whether there is anything new to build."""
        return bool(self.read or self.gone or self.words)


def ingest(
    paths: Sequence[Path],
    out: Path,
    spec: EmbedderSpec,
    embedder: Embedder,
    *,
    passage_tokens: int = 0,
    progress: Progress = no_progress,
    **options: Any,
) -> IngestReport:
    """Build a collection of files and folders at `out`; `options` are those of `Collection.build`.

    passage_tokens: of a passage at most, as the embedder counts them; 0: 192, or three quarters of what it reads.
    Raises as `Collection.build` does, `BuildRefused` for a wrong number or a package that is missing.
    """
    limit = _passage_tokens(passage_tokens, embedder)
    root = common_root(paths)
    with IsolatedReader() as reader:
        job = _IngestJob(paths, Sources(str(root), limit), embedder, None, reader, progress)
        Collection.build(
            job.documents(), out, embedder=spec, model=embedder, sources=job.sources, progress=progress, **options
        )
        return job.done


def add(
    paths: Sequence[Path],
    out: Path,
    *,
    location: EmbedderLocation | None = None,
    threads: int = 1,
    progress: Progress = no_progress,
    load: Callable[..., Embedder] = load_embedder,
) -> IngestReport:
    """Bring the collection at `out` up to date with files and folders: new and changed files are read and their
    passages embedded, as far as these changed; what is gone from the folders goes; all else stays.

    The collection is built anew with what it was built with and replaced whole, unless nothing changed and it has an
    index of words. Raises as `ingest` does, `ResourceBusy` while another does this to the same collection.
    """
    with _lock_collection(out), Collection.open(out) as old, IsolatedReader() as reader:
        if old.embedder is None or old.documents is None:
            raise BuildRefused(f"{out} was built from vectors: files cannot be added to it")
        embedder = load(old.embedder, threads=threads, location=location or EmbedderLocation(), for_build=True)
        before = old.documents.sources()
        root = Path(before.root) if before else common_root(paths)
        limit = before.passage_tokens if before else _passage_tokens(0, embedder)
        folders = [Path(os.path.abspath(path)) for path in paths]
        job = _IngestJob(
            paths, Sources(str(root), limit), embedder, _ExistingCollection(old, folders, root), reader, progress
        )
        info = Collection.info(out)
        job.done.words = not info.word_bytes
        if not job.look() and not job.done.words:
            return job.done
        codes = old.shards[0].data.codes
        as_before: dict[str, Any] = {
            "metric": info.metric,
            "degree": info.degree,
            "dtype": info.dtype,
            "neighbor_codes": codes is not None,
            "code_bits": 0 if codes is None else codes.bits,
            "shards": info.shards,
        }
        Collection.build(
            job.documents(),
            out,
            embedder=old.embedder,
            model=embedder,
            sources=job.sources,
            known_vectors=job.known,
            threads=threads,
            force=True,
            progress=progress,
            **as_before,
        )
        return job.done


class _ExistingCollection:
    """What a collection held, and which of its files ought to be found again below `folders`."""

    def __init__(self, collection: Collection, folders: Sequence[Path], root: Path) -> None:
        assert collection.documents is not None, "looked at before"
        self.collection = collection
        self.documents = collection.documents
        sources = self.documents.sources()
        self.files = sources.files if sources else {}
        self.rows = self.documents.rows_by_file()
        self.expected = {path for path in self.files if any(_within(root / path, folder) for folder in folders)}

    def get(self, rows: Sequence[int]) -> Iterator[tuple[int, Document]]:
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[begin : begin + _ROWS_AT_ONCE]
            yield from zip(some, self.documents.get(some), strict=True)


class _IngestJob:
    """One ingestion: `documents` of all files, with notes on which rows have a vector already."""

    def __init__(
        self,
        paths: Sequence[Path],
        sources: Sources,
        embedder: Embedder,
        before: _ExistingCollection | None,
        reader: IsolatedReader,
        progress: Progress,
    ) -> None:
        self.sources = sources
        self.done = IngestReport()
        self._paths = paths
        self._files: list[SourceFile] = []
        self._embedder = embedder
        self._before = before
        self._reader = reader
        self._progress = progress
        self._checksums: dict[str, str] = {}  # of files that are there and did not change
        self._gone: set[str] = set()
        self._unread: dict[str, str] = {}  # folders that could not be looked into
        self._rows: list[int] = []  # by new row: the old one with its vector, or -1

    def look(self) -> bool:
        """Whether anything changed."""
        assert self._before is not None, "there is nothing to compare with"
        self._find()
        for number, found in enumerate(self._files):
            self._progress("compare", number / len(self._files))
            try:
                digest = checksum(found)
            except UnreadableFile as error:
                self._skip(found, error)
                continue
            if self._before.files.get(found.source) == digest:
                self._checksums[found.source] = digest
        self._progress("compare", 1.0)
        there = {found.source for found in self._files}
        self._gone = {path for path in self._before.expected - there if not self._is_unread(path)}
        self.done.gone, self.done.unchanged = len(self._gone), len(self._checksums)
        return bool(self._gone) or bool(there - set(self._checksums) - set(self.done.skipped))

    def documents(self) -> Iterator[Document]:
        """Those that stay, then those of files that are new or changed."""
        if self._before is not None:
            yield from self._kept(self._before)
        else:
            self._find()
        wanted = [f for f in self._files if f.source not in self._checksums and f.source not in self.done.skipped]
        for number, found in enumerate(wanted):
            self._progress("read", number / len(wanted))
            old = list(self._before.get(self._before.rows.get(found.source, []))) if self._before else []
            try:
                digest, passages = self._read(found)
            except UnreadableFile as error:
                self._skip(found, error)
                if old and self._before:  # what was there stays, and the file is tried again the next time
                    self.sources.files[found.source] = self._before.files[found.source]
                    yield from (self._told(document, row) for row, document in old)
                continue
            self.sources.files[found.source] = digest
            self.done.read += 1
            rows = {embedding_text(document.title, document.text): row for row, document in old}
            for document in passages:
                yield self._told(document, rows.get(embedding_text(document.title, document.text), -1))
        self._progress("read", 1.0)
        if not self._rows:
            raise CollectionError(
                "there are no documents" + "".join(f"; {n}: {w}" for n, w in list(self.done.skipped.items())[:1])
            )

    def _find(self) -> None:
        self._files = find_files(self._paths, Path(self.sources.root), self._unread)
        self.done.skipped |= self._unread
        check_packages(found.source for found in self._files)

    def _is_unread(self, path: str) -> bool:
        """Whether the file may be there, in a folder that could not be looked into."""
        return any(folder == "." or path.startswith(f"{folder}/") for folder in self._unread)

    def known(self) -> tuple[NDArray[np.int64], Vectors]:
        """See `Collection.build`."""
        assert self._before is not None, "there is nothing to take over"
        rows = np.array(self._rows, np.int64)
        had = np.flatnonzero(rows >= 0)
        return had, self._before.collection.vectors(rows[had])

    def _kept(self, before: _ExistingCollection) -> Iterator[Document]:
        again = {found.source for found in self._files} - set(self._checksums) - set(self.done.skipped)
        left_out = {row for file in again | self._gone for row in before.rows.get(file, [])}
        for row, document in before.get([row for row in range(before.documents.size) if row not in left_out]):
            if document.file:
                self.sources.files[document.file] = before.files[document.file]
            yield self._told(document, row)

    def _told(self, document: Document, row: int) -> Document:
        self._rows.append(row)
        self.done.kept += row >= 0
        self.done.embedded += row < 0
        return document

    def _skip(self, found: SourceFile, error: UnreadableFile) -> None:
        self.done.skipped[found.source] = str(error)

    def _read(self, found: SourceFile) -> tuple[str, Iterator[Document]]:
        """A file's checksum and passages; those of lines are read while they are asked for. Raises `UnreadableFile`."""
        if found.is_lines:
            digest, lines = checksum(found), read_documents(found.path, self._progress)
            return digest, (Document(line.id, line.title, line.text, line.attributes, found.source) for line in lines)
        content = read_bytes(found)  # once: what is kept is the checksum of what was read
        return hashlib.sha256(content).hexdigest(), self._passages(found, content)

    def _passages(self, found: SourceFile, content: bytes) -> Iterator[Document]:
        read = (read_file if found.source.lower().endswith(PLAIN) else self._reader.read)(found.source, content)
        title = read.title.strip()[:200] or found.path.stem
        passages: list[Document] = []
        for section in self._joined(read.sections):
            heading = section.heading.strip()[:300]
            whole = f"{title}: {heading}" if heading and heading != title else title
            limit = max(self.sources.passage_tokens - self._embedder.count_tokens(whole), MIN_PASSAGE_TOKENS)
            attributes: dict[str, Attribute] = {"source": found.source}
            if heading:
                attributes["heading"] = heading
            if section.page:
                attributes["page"] = section.page
            for piece in split(section.text.strip(), limit, self._embedder.count_tokens):
                name = f"{found.source}#{len(passages) + 1}"
                passages.append(Document(name, whole, piece, attributes, found.source))
        if not passages:
            raise UnreadableFile("there is no text in it")
        return iter(passages)

    def _joined(self, sections: Sequence[Section]) -> list[Section]:
        """Short sections of one page with those that follow, whose headings become text."""
        joined: list[Section] = []
        short = _SHORT * self.sources.passage_tokens
        for section in sections:
            last = joined[-1] if joined else None
            if last is None or last.page != section.page or self._embedder.count_tokens(last.text) >= short:
                joined.append(section)
                continue
            own = section.heading.rpartition(" › ")[2]
            text = "\n\n".join(filter(None, (last.text, own, section.text)))
            joined[-1] = Section(text, last.heading, last.page)
        return joined


def _passage_tokens(given: int, embedder: Embedder) -> int:
    most = embedder.max_tokens
    if given == 0:
        return max(min(PASSAGE_TOKENS, most * 3 // 4), MIN_PASSAGE_TOKENS)
    if not MIN_PASSAGE_TOKENS <= given <= most:
        raise BuildRefused(
            f"passage_tokens is {given}, outside {MIN_PASSAGE_TOKENS}..{most}: {embedder.name} reads no more of a text"
        )
    return given


def _within(path: Path, folder: Path) -> bool:
    return Path(os.path.normpath(path)).is_relative_to(folder)


@contextmanager
def _lock_collection(out: Path) -> Iterator[None]:
    """Nobody else changes this collection meanwhile. The lock is the directory's, and goes when that is replaced."""
    try:
        fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CollectionError(f"there is no collection at {out}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResourceBusy(f"{out} is being changed by another process: try again when that is done") from error
        if not os.path.samestat(os.stat(out), os.fstat(fd)):
            raise ResourceBusy(f"{out} was replaced just now: try again")
        yield
    finally:
        os.close(fd)
