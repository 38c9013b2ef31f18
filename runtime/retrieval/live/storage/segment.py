"""A sealed segment: an index whose ids are row numbers, documents and attributes, in an immutable directory.

segment.json         its size, and the checksums of the other files
index/               see `gpu.index.storage`
documents.sqlite     see `documents`
attributes.msgpack   see `Columns.encode`
"""

import hashlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu import GpuError, GraphIndex
from gpu.build.params import Checkpoint
from gpu.index.data import bitmap
from runtime.errors import CollectionError, NoRoom
from runtime.files import read_regular, set_modes
from runtime.retrieval.attributes.columns import Bits, Columns, FilterCache
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import AttributeBinding, Filter
from runtime.retrieval.attributes.schema import Schema
from runtime.retrieval.collections.manifest import FileChecksum, checksum_file, checksum_of, has_checksum
from runtime.retrieval.collections.sources import Progress, no_progress
from runtime.retrieval.live.storage.disk import Disk, storage_error
from runtime.retrieval.live.storage.documents import SegmentDocuments, StoredDocument
from runtime.retrieval.live.storage.manifest import Description, SegmentInfo

_DESCRIPTION, DOCUMENTS, _ATTRIBUTES, _INDEX = "segment.json", "documents.sqlite", "attributes.msgpack", "index"
_FILES = (DOCUMENTS, _ATTRIBUTES, f"{_INDEX}/meta.json")
_MAX_BYTES = 1 << 16
_OWNERS_KEPT = 64


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    files: dict[str, FileChecksum]


def segment_path(directory: Path, number: int) -> Path:
    return directory / "segments" / str(number)


def building_path(directory: Path, number: int) -> Path:
    """Return the temporary path of a segment that is being written."""
    return directory / "segments" / f".building-{number}"


class Segment:
    """An open segment. `rows`: int64 [size], ascending. `alive`: bool [size], whether each row is not deleted.

    `files`: the checksums of its files, by their paths within the segment.
    """

    def __init__(
        self,
        info: SegmentInfo,
        index: GraphIndex,
        columns: Columns,
        documents: SegmentDocuments,
        files: dict[str, FileChecksum],
    ) -> None:
        """Use `load`."""
        assert index.data.ids is not None
        self.info, self.index, self.columns, self.documents, self.files = info, index, columns, documents, files
        self.rows: NDArray[np.int64] = index.data.ids
        self.alive: Bits = np.ones(index.size, bool)
        self.deletions = 0
        """Number of changes of `alive`, so that data derived from it can be invalidated."""
        self.count = index.size
        """Number of rows that are not deleted."""
        self._bits: NDArray[np.uint64] | None = None  # `alive`, once it was asked for
        self._passing = FilterCache(columns)
        self.held_by: Callable[[AttributeBinding], Bits] = lru_cache(_OWNERS_KEPT)(columns.held_by)
        """Returns whether each row belongs to an owner; an LRU cache of the last owners."""

    @classmethod
    def load(cls, directory: Path, info: SegmentInfo, description: Description, schema: Schema) -> "Segment":
        """Open a segment of the collection at `directory`. Raises `CollectionError`."""
        path = segment_path(directory, info.number)
        contents = _contents(path, info)
        try:
            index = GraphIndex.load(path / _INDEX)
            index.check_graph()
            arrays = {f"{_INDEX}/{name}": FileChecksum(*checksum) for name, checksum in index.files().items()}
        except GpuError as error:
            raise CollectionError(str(error)) from error
        ids = index.data.ids
        if ids is None or len(ids) != info.size or ids[0] < 0 or (np.diff(ids) <= 0).any():
            raise CollectionError(f"{path / _INDEX} is damaged: its ids are not the rows of {info.size} documents")
        if (index.dim, index.metric) != (description.dim, description.metric):
            raise CollectionError(f"{path / _INDEX} is not an index of this collection")
        columns = Columns.decode(_attributes(path / _ATTRIBUTES, contents.files[_ATTRIBUTES]), schema)
        if columns.size != info.size:
            raise CollectionError(f"{path / _ATTRIBUTES} has {columns.size} rows, not {info.size}")
        return cls(info, index, columns, SegmentDocuments(path / DOCUMENTS), {**contents.files, **arrays})

    @property
    def size(self) -> int:
        return self.index.size

    def passing(self, filter: Filter, work: Work | None = None) -> Bits:
        """Return whether each row passes a filter, bool [size]; the last filters are cached. On any thread."""
        return self._passing.matching(filter, work)

    def positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of those rows that are in this segment."""
        return locate_rows(self.rows, rows)[1]

    def delete(self, rows: NDArray[np.int64]) -> None:
        """Mark those of the rows that are in this segment as deleted."""
        positions = np.unique(self.positions(rows))
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
        rows = self.index.data.rows
        codes = rows.codes if rows.full is None else rows.full
        found: NDArray[np.float32] = codes[positions, : rows.dim].astype(np.float32) / np.float32(rows.scale)
        return found


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
    documents: Sequence[StoredDocument],
    vectors: NDArray[np.float32],
    description: Description,
    schema: Schema,
    threads: int = 1,
    progress: Progress = no_progress,
    checkpoint: Checkpoint | None = None,
) -> SegmentInfo:
    """Seal documents, by ascending row, and their vectors float32 [n, d], atomically and durably.

    Raises `CollectionError`, `NoRoom`.
    """
    building = building_path(directory, number)
    path = segment_path(directory, number)
    try:
        disk.remove(building)
        building.mkdir(mode=0o700)
        SegmentDocuments.write(building / DOCUMENTS, documents)
        columns = Columns.from_documents((document.attributes for document in documents), schema)
        (building / _ATTRIBUTES).write_bytes(columns.encode())
        index = GraphIndex.build(
            vectors,
            metric=description.metric,  # type: ignore[arg-type]
            degree=description.degree,
            dtype=description.dtype,  # type: ignore[arg-type]
            neighbor_codes=description.dtype != "int8",
            ids=np.array([document.row for document in documents], np.int64),
            threads=threads,
            progress=progress,
            checkpoint=checkpoint,
        )
        progress("write", 0.0)
        index.save(building / _INDEX)
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


def verify_segment(directory: Path, info: SegmentInfo, description: Description, schema: Schema) -> None:
    """Verify all files of a segment. Raises `CollectionError` that names the damaged one."""
    path = segment_path(directory, info.number)
    for name, known in _contents(path, info).files.items():
        if not has_checksum(path / name, known):
            raise CollectionError(f"{path / name} is damaged: its checksum is not the one it was sealed with")
    segment = Segment.load(directory, info, description, schema)
    try:
        segment.index.verify()
        if [document.row for document in segment.documents.all()] != segment.rows.tolist():
            raise CollectionError(f"{path / DOCUMENTS} does not have the documents of the index")
    except GpuError as error:
        raise CollectionError(str(error)) from error
    finally:
        segment.documents.close()


def _attributes(path: Path, known: FileChecksum) -> bytes:
    try:
        content = read_regular(path, known.bytes)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    if checksum_of(content) != known:
        raise CollectionError(f"{path} is damaged: its checksum is not the one it was sealed with")
    return content


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
