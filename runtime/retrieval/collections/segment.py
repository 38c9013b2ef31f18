"""A sealed segment: an index whose ids are row numbers, documents and attributes, in an immutable directory.

segment.json         its size, and the checksums of the other files (`Contents`)
index/               an index whose ids are row numbers: see `gpu.index.storage`
documents.sqlite     see `documents`; missing for bare vectors
attributes.msgpack   see `Columns.encode`; missing if no document has one
keywords.sqlite      see `keywords.index`; missing for bare vectors, and in segments that earlier versions sealed

The shards of a bulk load of an earlier version share the last three, which have the rows of all: see `upgrade`.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from weakref import finalize

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu import GpuError, GraphIndex
from runtime.errors import CollectionError, Unavailable
from runtime.files import open_regular
from runtime.retrieval.attributes.columns import Bits, Columns, FilterCache
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.collections.description import (
    ATTRIBUTES,
    DOCUMENTS,
    INDEX,
    KEYWORDS,
    Description,
    FileChecksum,
    SegmentInfo,
    Throttle,
    check_sizes,
    checksum_of,
    is_flat,
    read_known,
    unthrottled,
    verify_file,
)
from runtime.retrieval.collections.disk import storage_errors
from runtime.retrieval.collections.documents import Document, DocumentStore, Sources
from runtime.retrieval.collections.part import OnDocument, Part, Rows, ignore
from runtime.retrieval.keywords.index import KeywordFile, Searched

CONTENTS, META = "segment.json", f"{INDEX}/meta.json"
FILES = (DOCUMENTS, ATTRIBUTES, KEYWORDS, META)
_MAX_BYTES = 1 << 16
_T = TypeVar("_T")


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `segment.json`."""

    size: int
    files: dict[str, FileChecksum]


@contextlib.contextmanager
def index_errors() -> Iterator[None]:
    """Raise `GpuError` as `CollectionError`."""
    try:
        yield
    except GpuError as error:
        raise CollectionError(str(error)) from error


class File(NamedTuple):
    """A file of a segment, and the size and checksum that it was built with."""

    path: Path
    known: FileChecksum


def segment_path(directory: Path, info: SegmentInfo) -> Path:
    """Return the folder of a segment's files."""
    return directory / "segments" / str(info.number)


def flat_files(directory: Path, description: Description, shard: int) -> dict[str, File]:
    """Return a segment's files in a flat bulk load, by their names in a segment's folder. Raises `CollectionError`."""
    index = INDEX if description.shards == 1 else f"{INDEX}-{shard}"
    names = {name: name.replace(INDEX, index, 1) if name == META else name for name in FILES}
    if names[META] not in description.files:
        raise CollectionError(f"{directory} is damaged: its description does not list {names[META]}")
    known = description.files
    return {name: File(directory / flat, known[flat]) for name, flat in names.items() if flat in known}


def files_of(directory: Path, info: SegmentInfo, description: Description) -> dict[str, File]:
    """Return a segment's files, which exist and have the right sizes, by their names in its folder; one is its index's
    `meta.json`. Raises `CollectionError`."""
    if is_flat(directory, description):
        files = flat_files(directory, description, info.shard)
    else:
        folder = segment_path(directory, info)
        contents = _read_contents(folder / CONTENTS, info)
        files = {name: File(folder / name, known) for name, known in contents.files.items()}
    check_sizes({file.path: file.known for file in files.values()})
    return files


def _read_contents(path: Path, info: SegmentInfo) -> Contents:
    try:
        contents = msgspec.json.decode(read_known(path, info.sha256, _MAX_BYTES), type=Contents)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CollectionError(f"{path} is damaged: {error}") from error
    if contents.size != info.size or META not in contents.files or not set(contents.files) <= set(FILES):
        raise CollectionError(f"{path} is damaged: it has {contents.size} rows, not {info.size}")
    return contents


class Segment(Part):
    """An open segment. Its rows ascend, except in a bulk load of vectors with ids.

    `files`: by their names within its folder, as they were when it was opened; `verified_bytes`: how much of them
    `verify` has read, None before it was called. Attributes are read when they are first used.
    `store`: None for a segment of bare vectors: the document of row 7 is an empty one with the id "7".
    `stored`: the rows of its documents, attributes and keyword index; more than `size` if shards share these.
    """

    def __init__(self, directory: Path, info: SegmentInfo, description: Description) -> None:
        """Open a segment of the collection at `directory`. Its graph is not checked: see `searchable`.

        Raises `CollectionError`.
        """
        self._directory, self.info, self.files = directory, info, files_of(directory, info, description)
        verify_file(*self.files[META])
        folder = self.files[META].path.parent
        with index_errors():
            self.index = index = GraphIndex.load(folder)
            arrays = index.files().items()
        super().__init__(index.size)
        ids, shards = index.data.ids, description.shards
        sound = index.size == info.size and (ids is None or int(ids.min()) >= 0)
        part, self.stored = (0, 1), index.size
        documents = self.files.get(DOCUMENTS)
        if shards > 1 and documents and documents.known == description.files.get(DOCUMENTS):
            part, self.stored = (info.shard, shards), description.size  # the shards share it
            sound &= ids is not None and np.array_equal(ids, np.arange(info.shard, self.stored, shards))
        if not sound:
            raise CollectionError(f"{folder} is damaged: its ids are not the rows of {info.size} documents")
        if (index.dim, index.metric) != (description.dim, description.metric):
            raise CollectionError(f"{folder} is not an index of this collection")
        self.store = DocumentStore(documents.path, part) if documents else None
        last = index.size - 1 if ids is None else int(ids[-1])
        if self.store is not None and self.store.last_row != last:
            raise CollectionError(f"{self.store.path} is damaged: its last row is {self.store.last_row}, not {last}")
        self._attributes = -1  # the file, open until it was read
        if ATTRIBUTES in self.files:
            with storage_errors("the attributes of a segment cannot be read"):
                self._attributes = open_regular(self.files[ATTRIBUTES].path)
        self._close_attributes = finalize(self, _close, self._attributes)
        self.files |= {f"{INDEX}/{name}": File(folder / name, FileChecksum(*known)) for name, known in arrays}
        self.verified_bytes: int | None = None
        self._columns: Columns | None = None
        self._keywords: KeywordFile | None = None
        self._lock = threading.Lock()

    @cached_property
    def searchable(self) -> GraphIndex:
        """The index, once it was checked that the edges of its graph lead to rows of it, as searches rely on.

        Raises `CollectionError`.
        """
        with index_errors():
            self.index.check_graph()
        return self.index

    def check(self) -> None:
        """Check the graph, and read the attributes. Raises `CollectionError`."""
        _ = self.searchable, self.columns

    def file_bytes(self, name: str = "") -> int:
        """Return the size of the files whose paths begin with a name, or its part of one that shards share; "": of all
        that `verify` reads."""
        size = sum(file.known.bytes for one, file in self.files.items() if one.startswith(name))
        return size * self.size // self.stored if name in (DOCUMENTS, KEYWORDS) else size

    def verify(self, throttle: Throttle = unthrottled) -> None:
        """Compare the checksums of all files. Raises `CollectionError`."""
        self.verified_bytes = 0

        def counted(read_bytes: int) -> None:
            self.verified_bytes = (self.verified_bytes or 0) + read_bytes
            throttle(read_bytes)

        for name, file in self.files.items():
            self._read(name, partial(verify_file, known=file.known, throttle=counted))

    def _read(self, name: str, read: Callable[[Path], _T]) -> _T:
        """Return what `read` returns of a file, which has moved if the collection was converted meanwhile."""
        path, moved = self.files[name].path, segment_path(self._directory, self.info) / name
        try:
            return read(path)
        except CollectionError:
            if moved == path or not moved.exists():
                raise
        return read(moved)

    # ---- rows

    @cached_property
    def rows(self) -> Rows:
        ids = self.index.data.ids
        return np.arange(self.size, dtype=np.int64) if ids is None else ids

    @cached_property
    def _order(self) -> NDArray[np.int64] | None:
        """The positions by row; None if the rows ascend."""
        ids = self.index.data.ids
        return None if ids is None or (np.diff(ids) > 0).all() else np.argsort(ids, kind="stable")

    def locate(self, rows: Rows) -> tuple[Bits, Rows]:
        if self.index.data.ids is None:
            here = (rows >= 0) & (rows < self.size)
            return here, rows[here]
        places = np.searchsorted(self.rows, rows, sorter=self._order)
        here = places < self.size
        positions = places[here] if self._order is None else self._order[places[here]]
        same = self.rows[positions] == rows[here]
        here[here] = same
        return here, positions[same]

    def vectors(self, positions: Rows) -> NDArray[np.float32]:
        return self.index.vectors(positions)

    # ---- documents

    @property
    def lacks_keywords(self) -> bool:
        """Whether it has documents without a keyword index, as an earlier version sealed them."""
        return self.store is not None and KEYWORDS not in self.files

    @property
    def keywords(self) -> KeywordFile | None:
        """Its keyword index, opened when it is first used, while its file is there; None for bare vectors.

        Raises `CollectionError`.
        """
        with self._lock:
            if self._keywords is None and KEYWORDS in self.files:
                self._keywords = self._read(KEYWORDS, partial(KeywordFile, size=self.stored))
            return self._keywords

    def searched(self, visible: Bits) -> Searched | None:
        if self.lacks_keywords:
            raise Unavailable(
                f"{self._directory} has a segment without a keyword index: `trinity index compact` makes one"
            )
        if self.keywords is None:
            return None
        if self.stored == self.size:
            return Searched(self.keywords, self.rows, visible)
        of_all = np.zeros(self.stored, bool)  # it has the rows of other shards, too
        of_all[self.rows] = visible
        return Searched(self.keywords, np.arange(self.stored), of_all)

    def find(self, rows: Sequence[int], on_read: OnDocument = ignore) -> dict[int, Document]:
        wanted = np.array(rows, np.int64)
        here = wanted[self.locate(wanted)[0]].tolist()
        if self.store is not None:
            return dict(zip(here, self.store.get(here, on_read), strict=True))
        return {row: Document(str(row), "", "", row=row) for row in here}

    def document_lookup(self) -> Callable[[int], Document | None]:
        find = self.find if self.store is None else self.store.find
        return lambda row: find([row]).get(row)

    def rows_of(self, ids: Sequence[str]) -> dict[str, int]:
        if self.store is not None:
            return self.store.rows_of(ids)
        numbers = {name: int(name) for name in ids if name.isascii() and name.isdecimal() and len(name) < 19}
        return {name: row for name, row in numbers.items() if str(row) == name and len(self.positions(np.array([row])))}

    # ---- attributes

    @property
    def columns(self) -> Columns:
        with self._lock:
            if self._columns is None:
                self._columns = self._read_columns()
                self._close_attributes()
            return self._columns

    def _read_columns(self) -> Columns:
        if self._attributes < 0:
            return Columns.empty(self.size)
        path, known = self.files[ATTRIBUTES]
        with open(self._attributes, "rb", closefd=False) as file:
            content = file.read(known.bytes + 1)
        if checksum_of(content) != known:
            raise CollectionError(f"{path} is damaged: its checksum is not the one it was built with")
        columns = Columns.decode(content)
        if columns.size != self.stored:
            raise CollectionError(f"{path} has {columns.size} rows, not {self.stored}")
        return columns if self.stored == self.size else columns.of_rows(self.rows)

    @cached_property
    def _filters(self) -> FilterCache:
        return FilterCache(self.columns)

    def passing(self, filter: Filter, work: Work | None = None, count: int | None = None) -> Bits:
        """The results for the last filters are cached."""
        return self._filters.matching(filter, work)

    def close(self) -> None:
        """Close the files; the index's memory is freed with its last reference."""
        if self.store is not None:
            self.store.close()
        if self._keywords is not None:
            self._keywords.close()
        self._close_attributes()


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def sources_of(segments: Sequence[Segment]) -> Sources | None:
    """Return the files that the documents of some segments were read from; None if none were."""
    of_segments = [sources for segment in segments if segment.store and (sources := segment.store.sources())]
    if not of_segments:
        return None
    files = {path: checksum for sources in of_segments for path, checksum in sources.files.items()}
    return Sources(of_segments[0].root, of_segments[0].passage_tokens, files)
