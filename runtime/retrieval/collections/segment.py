"""A sealed segment: an index whose ids are row numbers, documents and attributes, in an immutable directory.

segment.json         its size, and the checksums of the other files
index/               see `gpu.index.storage`
documents.sqlite     see `documents`
attributes.msgpack   see `Columns.encode`

The segments of a bulk load are beside the collection's description, which has their checksums: see `manifest`.
"""

import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu import GpuError, GraphIndex
from gpu.build.params import Checkpoint
from gpu.index.data import bitmap
from runtime.errors import CollectionError, NoRoom
from runtime.files import open_regular, read_regular, set_modes
from runtime.retrieval.attributes.columns import Bits, Columns, FilterCache
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import AttributeBinding, Filter
from runtime.retrieval.attributes.schema import Schema
from runtime.retrieval.collections.disk import Disk, storage_error
from runtime.retrieval.collections.documents import BareRows, Document, Documents, DocumentStore, Sources
from runtime.retrieval.collections.manifest import (
    ATTRIBUTES,
    DOCUMENTS,
    INDEX,
    Description,
    FileChecksum,
    SegmentInfo,
    checksum_file,
    checksum_of,
    has_checksum,
    index_folders,
)
from runtime.retrieval.collections.sources import Progress, no_progress

_DESCRIPTION = "segment.json"
_FILES = (DOCUMENTS, ATTRIBUTES, f"{INDEX}/meta.json")
_MAX_BYTES = 1 << 16
_OWNERS_KEPT = 64


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    files: dict[str, FileChecksum]


def segment_path(directory: Path, info: SegmentInfo) -> Path:
    """Return the folder of a segment's files."""
    return directory if info.bulk else directory / "segments" / str(info.number)


def building_path(directory: Path, number: int) -> Path:
    """Return the temporary path of a segment that is being written."""
    return directory / "segments" / f".building-{number}"


class Segment:
    """An open segment. `alive`: bool [size], whether each row is not deleted.

    `files`: the checksums of its files, by their paths within `path`. Attributes are read when they are first used.
    """

    def __init__(
        self,
        info: SegmentInfo,
        path: Path,
        index: GraphIndex,
        documents: "Callable[[Segment], Documents]",
        attributes: "_Attributes",
        files: dict[str, FileChecksum],
    ) -> None:
        """Use `load`."""
        self.info, self.path, self.index, self.files = info, path, index, files
        self.alive: Bits = np.ones(index.size, bool)
        self.deletions = 0
        """Number of changes of `alive`, so that data derived from it can be invalidated."""
        self.count = index.size
        """Number of rows that are not deleted."""
        self._bits: NDArray[np.uint64] | None = None  # `alive`, once it was asked for
        self._attributes = attributes
        self.documents = documents(self)

    @classmethod
    def load(cls, directory: Path, info: SegmentInfo, description: Description, schema: Schema | None) -> "Segment":
        """Open a segment of the collection at `directory`. schema: the attributes to read; None: all.

        Its graph is not checked: see `check`. Raises `CollectionError`.
        """
        path, folder = segment_path(directory, info), INDEX
        if info.bulk:
            folder = index_folders(description.shard_count)[info.shard]
            files = {
                name: one for name, one in description.files.items() if "/" not in name or name.startswith(f"{folder}/")
            }
        else:
            files = _contents(path, info).files
        meta = f"{folder}/meta.json"
        if not has_checksum(path / meta, files[meta]):
            raise CollectionError(f"{path / meta} is damaged: its checksum is not the one it was built with")
        try:
            index = GraphIndex.load(path / folder)
            arrays = {f"{folder}/{name}": FileChecksum(*checksum) for name, checksum in index.files().items()}
        except GpuError as error:
            raise CollectionError(str(error)) from error
        ids = index.data.ids
        if index.size != info.size or not _are_rows(ids, info):
            raise CollectionError(f"{path / folder} is damaged: its ids are not the rows of {info.size} documents")
        if (index.dim, index.metric) != (description.dim, description.metric):
            raise CollectionError(f"{path / folder} is not an index of this collection")
        store = DocumentStore.open(path / DOCUMENTS) if DOCUMENTS in files else None
        last = description.size - 1 if info.bulk or ids is None else int(ids[-1])
        try:
            if store is not None and store.last_row != last:
                raise CollectionError(f"{path / DOCUMENTS} is damaged: its last row is {store.last_row}, not {last}")
            rows = description.size if info.bulk and ATTRIBUTES in files else info.size
            attributes = _Attributes(path / ATTRIBUTES, files.get(ATTRIBUTES), rows, schema)
        except CollectionError:
            if store is not None:
                store.close()
            raise
        shared = info.bulk and description.shard_count > 1

        def documents(segment: Segment) -> Documents:
            if store is None:
                return BareRows(lambda: segment.rows, segment.has)
            return _OfShard(store, segment.has) if shared else store

        return cls(info, path, index, documents, attributes, {**files, **arrays})

    @property
    def size(self) -> int:
        return self.index.size

    @property
    def index_folder(self) -> Path:
        return self.path / next(name for name in self.files if name.endswith("/meta.json")).partition("/")[0]

    def check(self) -> None:
        """Check that the edges of the graph lead to rows of it, as searches rely on, and read the attributes.

        Raises `CollectionError`.
        """
        try:
            self.index.check_graph()
        except GpuError as error:
            raise CollectionError(str(error)) from error
        _ = self.schema

    # ---- rows

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The row of each position, int64 [size]: ascending, except in a bulk load of vectors with ids."""
        ids = self.index.data.ids
        return np.arange(self.size, dtype=np.int64) if ids is None else ids

    @cached_property
    def _order(self) -> NDArray[np.int64] | None:
        """The positions by row; None if the rows ascend."""
        ids = self.index.data.ids
        return None if ids is None or (np.diff(ids) > 0).all() else np.argsort(ids, kind="stable")

    @property
    def last_row(self) -> int:
        """The highest row."""
        ids = self.index.data.ids
        return self.size - 1 if ids is None else int(ids[-1] if self._order is None else ids.max())

    def locate(self, rows: NDArray[np.int64]) -> tuple[Bits, NDArray[np.int64]]:
        """Return which of some rows are in this segment, and the positions of those."""
        if self.index.data.ids is None:
            here = (rows >= 0) & (rows < self.size)
            return here, rows[here]
        if self._order is None:
            return locate_rows(self.rows, rows)
        here, places = locate_rows(self.rows[self._order], rows)
        return here, self._order[places]

    def has(self, row: int) -> bool:
        """Return whether a row is in this segment."""
        return bool(self.locate(np.array([row], np.int64))[0][0])

    def positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of those rows that are in this segment."""
        return self.locate(rows)[1]

    def delete(self, rows: NDArray[np.int64]) -> None:
        """Mark those of the rows that are in this segment as deleted."""
        positions = np.unique(self.positions(rows)) if len(rows) else rows
        if len(positions):
            self.count -= int(np.count_nonzero(self.alive[positions]))
            self.alive[positions] = False
            self.deletions += 1
            if self._bits is not None:
                places, bits = np.divmod(positions.astype(np.uint64), np.uint64(64))
                np.bitwise_and.at(self._bits, places, ~(np.uint64(1) << bits))

    def alive_bits(self) -> NDArray[np.uint64]:
        """Return a copy of `alive` as a bitmap (`gpu.index.data.bitmap`): much cheaper than to pack it again."""
        if self._bits is None:
            self._bits = bitmap(self.alive, self.size)
        return self._bits.copy()

    def vectors(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors at some positions, float32 [n, d], as upserted except for rounding under float16."""
        return self.index.vectors(positions)

    # ---- attributes

    @property
    def schema(self) -> Schema:
        """The attributes that occur, and their types."""
        return self._attributes.columns.schema

    def keep(self, schema: Schema) -> None:
        """Drop the attributes that are not in a schema, or have another type there."""
        self._attributes.keep(schema)

    def occurring(self) -> list[str]:
        """Return the attributes that a row that is not deleted has."""
        return self._attributes.columns.occurring(self._spread(self.alive))

    def passing(self, filter: Filter, work: Work | None = None) -> Bits:
        """Return whether each row passes a filter, bool [size]; the last filters are cached. On any thread."""
        return self._own(self._attributes.cache.matching(filter, work))

    def held_by(self, owner: AttributeBinding) -> Bits:
        """Return whether each row belongs to an owner; an LRU cache of the last owners."""
        return self._own(self._attributes.held_by(owner))

    def _own(self, bits: Bits) -> Bits:
        """Return the entries of this segment's rows: the shards of a bulk load share their attributes."""
        return bits if len(bits) == self.size else bits[self.rows]

    def _spread(self, bits: Bits) -> Bits:
        """Return bits of this segment's rows as bits of the attributes' rows, the inverse of `_own`."""
        if self._attributes.size == self.size:
            return bits
        found = np.zeros(self._attributes.size, bool)
        found[self.rows] = bits
        return found

    def close(self) -> None:
        """Close the files; the index's memory is freed with its last reference."""
        self.documents.close()
        self._attributes.close()


class _Attributes:
    """The attributes of `size` rows in a file, which is read when they are first used. Thread-safe."""

    def __init__(self, path: Path, known: FileChecksum | None, size: int, schema: Schema | None) -> None:
        """Open the file, which may be removed later; `known` is its checksum, None: there is none. Raises
        `CollectionError`."""
        self.size, self._path, self._known, self._schema = size, path, known, schema
        self._lock = threading.RLock()
        self._columns: Columns | None = None
        self.held_by: Callable[[AttributeBinding], Bits] = lru_cache(_OWNERS_KEPT)(lambda o: self.columns.held_by(o))
        try:
            self._fd = -1 if known is None else open_regular(path)
        except OSError as error:
            raise storage_error(error, f"{path} cannot be read") from error

    @property
    def columns(self) -> Columns:
        with self._lock:
            if self._columns is None:
                self._columns = self._read()
                self.close()
            return self._columns

    @cached_property
    def cache(self) -> FilterCache:
        return FilterCache(self.columns)

    def keep(self, schema: Schema) -> None:
        with self._lock:
            self._schema = schema
            if self._columns is not None:
                self._columns.keep(schema)

    def _read(self) -> Columns:
        if self._known is None:
            return Columns.empty(self.size)
        content = b""
        while part := os.pread(self._fd, self._known.bytes + 1 - len(content), len(content)):
            content += part
        if checksum_of(content) != self._known:
            raise CollectionError(f"{self._path} is damaged: its checksum is not the one it was built with")
        columns = Columns.decode(content, self._schema)
        if columns.size != self.size:
            raise CollectionError(f"{self._path} has {columns.size} rows, not {self.size}")
        return columns

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class _OfShard:
    """The documents of one shard of a bulk load, in the store of all of them."""

    def __init__(self, store: DocumentStore, has: Callable[[int], bool]) -> None:
        self._store, self._has = store, has
        self.file_count = 0

    def find(self, row: int) -> Document | None:
        return self._store.find(row) if self._has(row) else None

    def get(
        self, rows: Sequence[int] | NDArray[np.int64], on_read: Callable[[Document], None] = lambda _: None
    ) -> list[Document]:
        return self._store.get(rows, on_read)

    def all(self, first: int = 0) -> Iterator[Document]:
        return (document for document in self._store.all(first) if self._has(document.row))

    def texts(self, first: int = 0) -> Iterator[tuple[int, str, str]]:
        return (one for one in self._store.texts(first) if self._has(one[0]))

    def rows_of(self, ids: Sequence[str]) -> dict[str, int]:
        return {name: row for name, row in self._store.rows_of(ids).items() if self._has(row)}

    def sources(self) -> Sources | None:
        return self._store.sources()

    def rows_by_file(self) -> dict[str, list[int]]:
        found = self._store.rows_by_file()
        return {path: [row for row in rows if self._has(row)] for path, rows in found.items()}

    def close(self) -> None:
        self._store.close()


def sources_of(segments: Sequence[Segment]) -> Sources | None:
    """Return the files that the documents of some segments were read from; None if none were."""
    found = [sources for segment in segments if (sources := segment.documents.sources()) is not None]
    if not found:
        return None
    files = {path: checksum for sources in found for path, checksum in sources.files.items()}
    return Sources(found[0].root, found[0].passage_tokens, files)


def _are_rows(ids: NDArray[np.int64] | None, info: SegmentInfo) -> bool:
    if ids is None or info.bulk:
        return info.bulk and (ids is None or int(ids.min()) >= 0)
    return int(ids[0]) >= 0 and bool((np.diff(ids) > 0).all())


def locate_rows(rows: NDArray[np.int64], queried: NDArray[np.int64]) -> tuple[Bits, NDArray[np.int64]]:
    """Return which of the queried rows are among `rows`, which ascend, and the positions of those."""
    found = np.searchsorted(rows, queried)
    here = found < len(rows)
    here[here] = rows[found[here]] == queried[here]
    return here, found[here]


def write_segment(
    disk: Disk,
    directory: Path,
    number: int,
    documents: Sequence[Document],
    vectors: NDArray[np.float32],
    description: Description,
    schema: Schema,
    threads: int = 1,
    progress: Progress = no_progress,
    checkpoint: Checkpoint | None = None,
    *,
    code_bits: int | None = 0,
    sources: Sources | None = None,
) -> SegmentInfo:
    """Seal documents, by ascending row, and their vectors float32 [n, d], atomically and durably.

    code_bits: of neighbour codes, 0: as many as suit the dimension, None: no codes. sources: of the documents' files.

    Raises `CollectionError`, `NoRoom`.
    """
    building = building_path(directory, number)
    path = building.with_name(str(number))
    try:
        disk.remove(building)
        building.mkdir(mode=0o700)
        DocumentStore.write(building / DOCUMENTS, documents, sources=sources)
        columns = Columns.from_documents((document.attributes for document in documents), schema)
        (building / ATTRIBUTES).write_bytes(columns.encode())
        index = GraphIndex.build(
            vectors,
            metric=description.metric,  # type: ignore[arg-type]
            degree=description.degree,
            dtype=description.dtype,  # type: ignore[arg-type]
            neighbor_codes=code_bits is not None,
            code_bits=code_bits or 0,
            ids=np.array([document.row for document in documents], np.int64),
            threads=threads,
            progress=progress,
            checkpoint=checkpoint,
        )
        progress("write", 0.0)
        index.save(building / INDEX)
        progress("write", 0.5)
        contents = _Contents(len(documents), {name: checksum_file(building / name) for name in _FILES})
        text = msgspec.json.encode(contents)
        (building / _DESCRIPTION).write_bytes(text)
        set_modes(building)
        disk.sync_tree(building)
        disk.remove(path)  # of a build that was not installed
        os.rename(building, path)
        disk.sync_directory(path.parent)
        progress("write", 1.0)
    except OSError as error:
        disk.remove(building)
        raise storage_error(error, f"{path} cannot be written") from error
    except (sqlite3.Error, MemoryError) as error:
        disk.remove(building)
        raise NoRoom(f"{path} cannot be written: {error}") from error
    except GpuError as error:
        disk.remove(building)
        raise CollectionError(f"{path} cannot be built: {error}") from error
    return SegmentInfo(number, len(documents), hashlib.sha256(text).hexdigest())


def verify_segment(directory: Path, info: SegmentInfo, description: Description) -> None:
    """Verify all files of a segment. Raises `CollectionError` that names the damaged one."""
    segment = Segment.load(directory, info, description, None)
    try:
        for name, known in segment.files.items():
            if not has_checksum(segment.path / name, known):
                raise CollectionError(
                    f"{segment.path / name} is damaged: its checksum is not the one it was built with"
                )
        segment.index.verify()
        _ = segment.schema
        if isinstance(segment.documents, DocumentStore):
            rows = (document.row for document in segment.documents.all())
            if not np.array_equal(np.fromiter(rows, np.int64), np.sort(segment.rows)):
                raise CollectionError(f"{segment.path / DOCUMENTS} does not have the documents of the index")
    except GpuError as error:
        raise CollectionError(str(error)) from error
    finally:
        segment.close()


def _contents(path: Path, info: SegmentInfo) -> _Contents:
    try:
        text = read_regular(path / _DESCRIPTION, _MAX_BYTES)
        if hashlib.sha256(text).hexdigest() != info.sha256:
            raise CollectionError(f"{path / _DESCRIPTION} is damaged: its checksum differs from the manifest's")
        contents = msgspec.json.decode(text, type=_Contents)
        if contents.size != info.size or set(contents.files) != set(_FILES):
            raise CollectionError(f"{path / _DESCRIPTION} is damaged: it has {contents.size} rows, not {info.size}")
        for name, known in contents.files.items():
            if (path / name).stat().st_size != known.bytes:
                raise CollectionError(f"{path / name} is damaged: it does not have {known.bytes} bytes")
    except OSError as error:
        raise storage_error(error, f"{error.filename} cannot be read") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CollectionError(f"{path / _DESCRIPTION} is damaged: {error}") from error
    return contents
