"""Builds of segments, and the files of a new one, which belongs to the collection once a manifest names it."""

import contextlib
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu import GraphIndex
from gpu.build.params import Progress, no_progress
from runtime.errors import CollectionError
from runtime.files import set_modes
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.attributes.schema import Schema
from runtime.retrieval.collections.description import (
    ATTRIBUTES,
    DOCUMENTS,
    INDEX,
    KEYWORDS,
    Manifest,
    SegmentInfo,
    checksum_file,
    checksum_of,
)
from runtime.retrieval.collections.disk import Disk, storage_errors
from runtime.retrieval.collections.documents import Document, DocumentStore, Sources
from runtime.retrieval.collections.log import log_files
from runtime.retrieval.collections.part import Part
from runtime.retrieval.collections.segment import CONTENTS, FILES, Contents, index_errors, sources_of
from runtime.retrieval.collections.state import State, vectors_of
from runtime.retrieval.keywords.index import KeywordFile

_FLAT_FILES = (DOCUMENTS, ATTRIBUTES, KEYWORDS, "words.sqlite")  # of a flat bulk load, beside its indexes


class BuildJob(msgspec.Struct, frozen=True):
    """A segment to build, with the rows of one shard.

    Its source is the segments that `merged` names, or else the growing rows before `next_row`.
    """

    number: int
    next_row: int
    merged: list[int]
    threads: int = 1
    shard: int = 0


def build(disk: Disk, state: State, job: BuildJob, progress: Progress = no_progress) -> SegmentInfo | None:
    """Build a segment; None if all of its rows are deleted. Raises `CollectionError`, `NoRoom`."""
    merged = [segment for segment in state.segments if segment.info.number in job.merged]
    for number, segment in enumerate(merged):
        progress("rows", number / len(merged))
        segment.verify()  # a damaged one must not be sealed again under a new checksum
    with state.lock:
        parts: Sequence[Part] = merged or (state.growing,)
        if not merged and state.growing.next_row < job.next_row:
            raise CollectionError(f"the log ends before row {job.next_row}")
        alive = [part.alive_rows() for part in parts]
    found: dict[int, Document] = {}
    for part, living in zip(parts, alive, strict=True):
        found |= part.find(living.tolist())
    documents = [found[row] for row in sorted(found)]
    if not merged:
        shard_of = state.description.shard_of
        documents = [one for one in documents if one.row < job.next_row and shard_of(one.id) == job.shard]
    rows = np.array([one.row for one in documents], np.int64)
    progress("rows", 1.0)
    if not documents:
        return None
    about, bits = state.description, code_bits(state)
    with new_segment(disk, state.directory, job.number) as folder:
        write_documents(folder, documents, dict(state.schema), sources_of(merged))
        _, info = index_and_seal(
            disk,
            folder,
            job.shard,
            vectors_of(parts, rows, about.dim),
            progress,
            metric=about.metric,
            degree=about.degree,
            dtype=about.dtype,
            neighbor_codes=bits is not None,
            code_bits=bits or 0,
            ids=rows,
            threads=job.threads,
        )
    return info


def code_bits(state: State) -> int | None:
    """Return the bits of the neighbour codes of the largest segment, which were chosen when it was built.

    0: none was built; None: without codes.
    """
    largest = max(state.segments, key=lambda segment: segment.size, default=None)
    if largest is None:
        return 0
    codes = largest.index.data.codes
    return None if codes is None else codes.bits


# ---- files


@contextlib.contextmanager
def new_segment(disk: Disk, directory: Path, number: int) -> Iterator[Path]:
    """Yield an empty folder for a segment's files, which `seal_segment` completes; removed if the block raises.

    Raises `CollectionError`, `NoRoom`.
    """
    folder = directory / "segments" / str(number)
    try:
        with storage_errors(f"{folder} cannot be written"), index_errors():
            disk.remove(folder)  # of a build that was killed
            folder.mkdir(mode=0o700)
            yield folder
    except BaseException:
        disk.remove(folder)
        raise


def write_documents(
    folder: Path, documents: Iterable[Document], schema: Schema, sources: Sources | None = None
) -> None:
    """Write the documents of a new segment, with their attributes as far as a schema has them and their keyword index.

    documents, sources: see `DocumentStore.write`. schema: read when all documents were. Raises as that does, and
    `OSError`.
    """
    DocumentStore.write(folder / DOCUMENTS, documents, sources=sources)
    with DocumentStore(folder / DOCUMENTS) as store:
        columns = Columns.from_documents((one.attributes for one in store.all()), schema)
        if columns.schema:
            (folder / ATTRIBUTES).write_bytes(columns.encode())
        KeywordFile.create(folder / KEYWORDS, ((one.title, one.text) for one in store.all()))


def index_and_seal(
    disk: Disk, folder: Path, shard: int, vectors: NDArray[Any], progress: Progress, **options: Any
) -> tuple[GraphIndex, SegmentInfo]:
    """Build the index of a new segment, whose documents are there, and seal it; `options` are those of
    `GraphIndex.build`. Raises as `seal_segment`."""
    with index_errors():
        index = GraphIndex.build(vectors, progress=progress, **options)
        progress("write", 0.0)
        index.save(folder / INDEX)
    progress("write", 0.5)
    info = seal_segment(disk, folder, index.size, shard)
    progress("write", 1.0)
    return index, info


def seal_segment(disk: Disk, folder: Path, size: int, shard: int = 0) -> SegmentInfo:
    """Complete a new segment, durably, which then belongs to a collection as soon as a manifest names it.

    Raises `OSError`, `CollectionError`.
    """
    files = {name: checksum_file(folder / name) for name in FILES if (folder / name).exists()}
    text = msgspec.json.encode(Contents(size, files))
    (folder / CONTENTS).write_bytes(text)
    set_modes(folder, stat.S_IMODE(folder.parent.stat().st_mode))
    disk.sync_tree(folder)
    disk.sync_directory(folder.parent)
    return SegmentInfo(int(folder.name), size, checksum_of(text).sha256, shard)


def obsolete_files(directory: Path, manifest: Manifest, building: Collection[int]) -> list[Path]:
    """Return the files that a manifest does not need: merged segments, sealed log files, leftovers of killed builds.

    Excludes the segments that are being built, by number.
    """
    numbers = {info.number for info in manifest.segments}.union(building)
    in_use = {directory / "segments" / str(number) for number in numbers} | {manifest.tombstones_path(directory)}
    obsolete: list[Path] = []
    with contextlib.suppress(OSError):
        for folder in ("segments", "tombstones"):
            obsolete += [path for path in (directory / folder).iterdir() if path not in in_use]
        obsolete += [path for first, path in log_files(directory) if first < manifest.sequence]
        flat = [*directory.glob(f"{INDEX}*"), *(directory / name for name in _FLAT_FILES)]  # before an upgrade
        obsolete += [path for path in flat if path.exists()]
    return obsolete
