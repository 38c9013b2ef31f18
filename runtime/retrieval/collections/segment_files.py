"""The files of a sealed segment, in an immutable directory that is written atomically.

segment.json         its size, and the checksums of the other files (`Contents`)
index/               an index whose ids are row numbers: see `gpu.index.storage`
documents.sqlite     see `documents`; missing for bare vectors
attributes.msgpack   see `Columns.encode`; missing if no document has one
keywords.sqlite      see `keywords.index`; missing for bare vectors, and in segments that earlier versions sealed
"""

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from gpu import GpuError
from runtime.errors import CollectionError
from runtime.files import read_regular, set_modes
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.attributes.schema import Schema
from runtime.retrieval.collections.description import (
    ATTRIBUTES,
    DOCUMENTS,
    INDEX,
    KEYWORDS,
    FileChecksum,
    Manifest,
    SegmentInfo,
    check_sizes,
    checksum_file,
    checksum_of,
)
from runtime.retrieval.collections.disk import Disk, storage_errors
from runtime.retrieval.collections.documents import Document, DocumentStore, Sources
from runtime.retrieval.collections.log import log_files
from runtime.retrieval.keywords.index import KeywordFile

CONTENTS, META = "segment.json", f"{INDEX}/meta.json"
_FILES = (DOCUMENTS, ATTRIBUTES, KEYWORDS, META)
_FLAT_FILES = (DOCUMENTS, ATTRIBUTES, KEYWORDS, "words.sqlite")  # of a flat bulk load, beside its indexes
_MAX_BYTES = 1 << 16


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `segment.json`."""

    size: int
    files: dict[str, FileChecksum]


def segment_path(directory: Path, info: SegmentInfo) -> Path:
    """Return the folder of a segment's files."""
    return directory / "segments" / str(info.number)


def building_path(directory: Path, number: int) -> Path:
    """Return the temporary path of a segment that is being written."""
    return directory / "segments" / f".building-{number}"


def files_of(directory: Path, info: SegmentInfo) -> dict[str, FileChecksum]:
    """Return the checksums of a segment's files, which exist and have the right sizes; one is its index's `meta.json`.

    Raises `CollectionError`.
    """
    path = segment_path(directory, info)
    files = _read_contents(path, info).files
    check_sizes(path, files)
    return files


def _read_contents(path: Path, info: SegmentInfo) -> Contents:
    with storage_errors(f"{path / CONTENTS} cannot be read"):
        text = read_regular(path / CONTENTS, _MAX_BYTES)
    if checksum_of(text).sha256 != info.sha256:
        raise CollectionError(f"{path / CONTENTS} is damaged: its checksum differs from the manifest's")
    try:
        contents = msgspec.json.decode(text, type=Contents)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CollectionError(f"{path / CONTENTS} is damaged: {error}") from error
    if contents.size != info.size or META not in contents.files or not set(contents.files) <= set(_FILES):
        raise CollectionError(f"{path / CONTENTS} is damaged: it has {contents.size} rows, not {info.size}")
    return contents


@contextlib.contextmanager
def building_segment(disk: Disk, directory: Path, number: int) -> Iterator[Path]:
    """Yield an empty folder for a segment's files, which `seal_segment` completes; removed if the block raises.

    Raises `CollectionError`, `NoRoom`.
    """
    building = building_path(directory, number)
    target = building.with_name(str(number))
    try:
        with storage_errors(f"{target} cannot be written"):
            disk.remove(building)
            building.mkdir(mode=0o700)
            yield building
    except BaseException as error:
        disk.remove(building)
        if isinstance(error, GpuError):
            raise CollectionError(f"{target} cannot be built: {error}") from error
        raise


def write_documents(
    building: Path, documents: Iterable[Document], schema: Schema, sources: Sources | None = None
) -> None:
    """Write the documents of a new segment, with their attributes as far as a schema has them and their keyword index.

    documents, sources: see `DocumentStore.write`. schema: read when all documents were. Raises as that does, and
    `OSError`.
    """
    DocumentStore.write(building / DOCUMENTS, documents, sources=sources)
    with DocumentStore.open(building / DOCUMENTS) as store:
        columns = Columns.from_documents((one.attributes for one in store.all()), schema)
        if columns.schema:
            (building / ATTRIBUTES).write_bytes(columns.encode())
        KeywordFile.create(building / KEYWORDS, ((one.title, one.text) for one in store.all()))


def seal_segment(
    disk: Disk, building: Path, size: int, shard: int = 0, known: Mapping[str, FileChecksum] | None = None
) -> SegmentInfo:
    """Put the files of a new segment in place, durably. known: checksums that need not be computed. Raises `OSError`,
    `CollectionError`."""
    number = int(building.name.rpartition("-")[2])
    path = building.with_name(str(number))
    files = {name: (known or {}).get(name) or checksum_file(building / name) for name in _present(building)}
    text = msgspec.json.encode(Contents(size, files))
    (building / CONTENTS).write_bytes(text)
    set_modes(building, stat.S_IMODE(building.parent.stat().st_mode))
    disk.sync_tree(building)
    disk.remove(path)  # of a build that was not installed
    os.rename(building, path)
    disk.sync_directory(path.parent)
    return SegmentInfo(number, size, checksum_of(text).sha256, shard)


def _present(building: Path) -> Iterator[str]:
    return (name for name in _FILES if (building / name).exists())


def obsolete_files(directory: Path, manifest: Manifest, building: Collection[int]) -> list[Path]:
    """Return the files that a manifest does not need: merged segments, sealed log files, leftovers of killed builds.

    Excludes the segments that are being built, by number.
    """
    kept = {segment_path(directory, info) for info in manifest.segments}
    for number in building:
        kept |= {directory / "segments" / str(number), building_path(directory, number)}
    kept.add(manifest.tombstones_path(directory))
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for folder in ("segments", "tombstones"):
            found += [path for path in (directory / folder).iterdir() if path not in kept]
        found += [path for first, path in log_files(directory) if first < manifest.sequence]
        flat = [*directory.glob(f"{INDEX}*"), *(directory / name for name in _FLAT_FILES)]  # before an upgrade
        found += [path for path in flat if path.exists()]
    return found
