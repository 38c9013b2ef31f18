"""Ingestion of files into a new collection, and incremental updates of an existing one.

report = ingest([Path("handbook")], Path("docs"), spec, embedder)     # create a collection
report = add([Path("handbook")], Path("docs"))                        # read and embed what changed since
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu.build.params import Progress, no_progress
from runtime.errors import BuildRefused, CollectionError
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import DOCUMENTS
from runtime.retrieval.collections.disk import writing
from runtime.retrieval.collections.documents import Document, Sources
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.segment import sources_of
from runtime.retrieval.collections.segment_build import code_bits
from runtime.retrieval.embedding.embedder import Embedder, EmbedderSpec, Vectors, embedding_text
from runtime.retrieval.embedding.loading import load_embedder
from runtime.retrieval.ingestion.build_inputs import read_documents
from runtime.retrieval.ingestion.isolated_reader import IsolatedReader
from runtime.retrieval.ingestion.passages import file_passages, passage_limit
from runtime.retrieval.ingestion.readers import PLAIN, check_packages, read_file
from runtime.retrieval.ingestion.sections import UnreadableFile
from runtime.retrieval.ingestion.source_files import (
    SUPPORTED,
    SourceFile,
    checksum,
    common_root,
    find_files,
    read_bytes,
)
from runtime.retrieval.passages import Attribute

_ROWS_AT_ONCE = 256
_load_for_documents = partial(load_embedder, for_build=True)


@dataclass(slots=True)
class IngestReport:
    """Report of an ingestion, in files and passages. `skipped`: reasons by path. `kept`: passages whose vectors were
    reused."""

    read: int = 0
    unchanged: int = 0
    gone: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    embedded: int = 0
    kept: int = 0

    @property
    def changed(self) -> bool:
        """Whether the collection must be rebuilt."""
        return bool(self.read or self.gone)


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
    """Build a collection of files and folders at `out`; `options` are those of `bulk_load.build`.

    passage_tokens: maximum per passage, as counted by the embedder; 0: 192, or three quarters of its limit if less.
    Raises as `bulk_load.build`, and `BuildRefused` for an invalid number or a missing package.
    """
    limit = passage_limit(passage_tokens, embedder)
    root = common_root(paths)
    with IsolatedReader() as reader:
        job = _IngestJob(paths, Sources(str(root), limit), embedder, None, reader, progress)
        bulk_load.build(
            job.documents(), out, embedder=spec, model=embedder, sources=job.sources, progress=progress, **options
        )
        return job.report


def add(
    paths: Sequence[Path],
    out: Path,
    *,
    load: Callable[[EmbedderSpec], Embedder] = _load_for_documents,
    threads: int = 1,
    device: Literal["cpu", "cuda"] = "cpu",
    progress: Progress = no_progress,
) -> IngestReport:
    """Update the collection at `out` from files and folders: new and changed files are read, changed passages embedded,
    files missing from the folders removed; everything else is kept.

    The collection is rebuilt with its own settings and replaced atomically, unless nothing changed. `load` loads its
    embedder; `device` builds the graph. Raises as `ingest`, and `CollectionBusy` while another process writes to the
    collection.
    """
    with writing(out), CollectionReader(out) as old, IsolatedReader() as reader:
        if old.embedder is None or any(DOCUMENTS not in segment.files for segment in old.state.segments):
            raise BuildRefused(f"{out} was built from vectors: files cannot be added to it")
        embedder = load(old.embedder)
        before = sources_of(old.state.segments)
        root = Path(before.root) if before else common_root(paths)
        limit = before.passage_tokens if before else passage_limit(0, embedder)
        folders = [Path(os.path.abspath(path)) for path in paths]
        job = _IngestJob(
            paths, Sources(str(root), limit), embedder, _ExistingCollection(old, folders, root), reader, progress
        )
        about = old.description
        if not job.find_changes():
            return job.report
        bits = code_bits(old.state)
        as_before: dict[str, Any] = {
            "metric": about.metric,
            "degree": about.degree,
            "dtype": about.dtype,
            "neighbor_codes": bits is not None,
            "code_bits": bits or 0,
            "shards": about.shards,
            "demanded": about.demanded,
            "schema": about.declared,
        }
        bulk_load.build(
            job.documents(),
            out,
            embedder=old.embedder,
            model=embedder,
            sources=job.sources,
            known_vectors=job.known,
            threads=threads,
            device=device,
            force=True,
            locked=True,
            progress=progress,
            **as_before,
        )
        return job.report


class _ExistingCollection:
    """The collection before an update: its `rows`, and those `by_file`.

    `expected`: its files below `folders`, which should still exist.
    """

    def __init__(self, collection: CollectionReader, folders: Sequence[Path], root: Path) -> None:
        self.collection = collection
        sources = sources_of(collection.state.segments)
        self.files = sources.files if sources else {}
        self.rows = sorted(collection.state.alive_rows().tolist())
        self.by_file: dict[str, list[int]] = {}
        alive = set(self.rows)
        for segment in collection.state.segments:
            for path, rows in (segment.store.rows_by_file() if segment.store else {}).items():
                self.by_file.setdefault(path, []).extend(row for row in rows if row in alive)
        self.expected = {path for path in self.files if any(_within(root / path, folder) for folder in folders)}

    def loose(self) -> list[int]:
        """Return the rows of documents of no file."""
        of_files = set(itertools.chain.from_iterable(self.by_file.values()))
        return [row for row in self.rows if row not in of_files]

    def get(self, rows: Sequence[int]) -> Iterator[tuple[int, Document]]:
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[begin : begin + _ROWS_AT_ONCE]
            documents = self.collection.documents(some)
            yield from ((row, one) for row, one in zip(some, documents, strict=True) if one is not None)


class _IngestJob:
    """One ingestion: yields the documents of all files, and records which rows have a vector already."""

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
        self.report = IngestReport()
        self._paths = paths
        self._files: list[SourceFile] = []
        self._embedder = embedder
        self._before = before
        self._reader = reader
        self._progress = progress
        self._checksums: dict[str, str] = {}  # of unchanged files
        self._gone: set[str] = set()
        self._unread: dict[str, str] = {}  # folders that could not be listed
        self._rows: list[int] = []  # new row → old row with the same vector, or -1

    def find_changes(self) -> bool:
        """Compare files with the collection; return whether anything changed."""
        assert self._before is not None, "only an update compares"
        self._find()
        for number, file in enumerate(self._files):
            self._progress("compare", number / len(self._files))
            try:
                digest = checksum(file)
            except UnreadableFile as error:
                self._skip(file, error)
                continue
            if self._before.files.get(file.source) == digest:
                self._checksums[file.source] = digest
        self._progress("compare", 1.0)
        present = {file.source for file in self._files}
        self._gone = {path for path in self._before.expected - present if not self._is_unread(path)}
        self.report.gone, self.report.unchanged = len(self._gone), len(self._checksums)
        return bool(self._gone) or bool(present - set(self._checksums) - set(self.report.skipped))

    def documents(self) -> Iterator[Document]:
        """Yield the documents of unchanged files, those of new and changed ones, and those of no file, which were
        written one by one: a document that is read replaces one with its id."""
        loose = self._before.loose() if self._before else []
        if self._before is not None:
            yield from self._kept(self._before)
        else:
            self._find()
        read = set[str]()
        to_read = [f for f in self._files if f.source not in self._checksums and f.source not in self.report.skipped]
        for number, file in enumerate(to_read):
            self._progress("read", number / len(to_read))
            old = list(self._before.get(self._before.by_file.get(file.source, []))) if self._before else []
            try:
                digest, passages = self._read(file)
            except UnreadableFile as error:
                self._skip(file, error)
                if old and self._before:  # its old passages are kept, and the file is retried next time
                    self.sources.files[file.source] = self._before.files[file.source]
                    yield from (self._record(document, row) for row, document in old)
                continue
            self.sources.files[file.source] = digest
            self.report.read += 1
            rows = {embedding_text(document.title, document.text): row for row, document in old}
            for document in passages:
                if loose:
                    read.add(document.id)
                yield self._record(document, rows.get(embedding_text(document.title, document.text), -1))
        for row, document in self._before.get(loose) if self._before else ():
            if document.id not in read:
                yield self._record(document, row)
        self._progress("read", 1.0)
        if not self._rows:
            reasons = [f"; {name}: {reason}" for name, reason in self.report.skipped.items()]
            if not self._files:
                reasons.append(f": no file there ends in {', '.join(SUPPORTED)}")
            raise CollectionError("there are no documents" + "".join(reasons[:1]))

    def _find(self) -> None:
        self._files = find_files(self._paths, Path(self.sources.root), self._unread)
        self.report.skipped |= self._unread
        check_packages(file.source for file in self._files)

    def _is_unread(self, path: str) -> bool:
        """Return whether a file is in a folder that could not be listed."""
        return any(folder == "." or path.startswith(f"{folder}/") for folder in self._unread)

    def known(self) -> tuple[NDArray[np.int64], Vectors]:
        """See `bulk_load.build`."""
        assert self._before is not None, "only an update reuses vectors"
        rows = np.array(self._rows, np.int64)
        had = np.flatnonzero(rows >= 0)
        return had, self._before.collection.state.vectors(rows[had])

    def _kept(self, before: _ExistingCollection) -> Iterator[Document]:
        again = {source_file.source for source_file in self._files} - set(self._checksums) - set(self.report.skipped)
        kept = (rows for file, rows in before.by_file.items() if file not in again | self._gone)
        for row, document in before.get(sorted(itertools.chain.from_iterable(kept))):
            self.sources.files[document.file] = before.files[document.file]
            yield self._record(document, row)

    def _record(self, document: Document, row: int) -> Document:
        self._rows.append(row)
        self.report.kept += row >= 0
        self.report.embedded += row < 0
        return msgspec.structs.replace(document, row=-1)

    def _skip(self, file: SourceFile, error: UnreadableFile) -> None:
        self.report.skipped[file.source] = str(error)

    def _read(self, file: SourceFile) -> tuple[str, Iterator[Document]]:
        """Return a file's checksum and passages; those of JSON lines are read lazily. Raises `UnreadableFile`."""
        if file.is_jsonl:
            digest, lines = checksum(file), read_documents(file.path, self._progress)
            return digest, (Document(line.id, line.title, line.text, line.attributes, file.source) for line in lines)
        content = read_bytes(file)  # read once, so that the checksum is that of the passages' text
        return hashlib.sha256(content).hexdigest(), self._passages(file, content)

    def _passages(self, file: SourceFile, content: bytes) -> Iterator[Document]:
        read = (read_file if file.source.lower().endswith(PLAIN) else self._reader.read)(file.source, content)
        passages: list[Document] = []
        for passage in file_passages(read, file.path.stem, self.sources.passage_tokens, self._embedder.count_tokens):
            attributes: dict[str, Attribute] = {"source": file.source}
            if passage.heading:
                attributes["heading"] = passage.heading
            if passage.page:
                attributes["page"] = passage.page
            name = f"{file.source}#{len(passages) + 1}"
            passages.append(Document(name, passage.title, passage.text, attributes, file.source))
        if not passages:
            raise UnreadableFile("there is no text in it")
        return iter(passages)


def _within(path: Path, folder: Path) -> bool:
    return Path(os.path.normpath(path)).is_relative_to(folder)
