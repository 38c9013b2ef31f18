"""Making, describing and verifying a live collection."""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpu.build.params import BuildParams, check_within
from gpu.index.rows import MAX_DIM
from runtime.errors import CollectionError, OutputRefused
from runtime.retrieval.attributes.schema import AttributeType, Schema
from runtime.retrieval.collections.collection import Collection, CollectionInfo, check_arguments
from runtime.retrieval.collections.manifest import MAX_SHARDS
from runtime.retrieval.embedding.embedder import EmbedderSpec
from runtime.retrieval.live.state import replay
from runtime.retrieval.live.storage.disk import Disk, storage_error
from runtime.retrieval.live.storage.log import LogWriter, log_path
from runtime.retrieval.live.storage.manifest import (
    DESCRIPTION,
    MANIFEST,
    Description,
    Manifest,
    is_live,
    new_identity,
    read_description,
    read_manifest,
    write_with_checksum,
)
from runtime.retrieval.live.storage.segment import verify_segment


@dataclass(frozen=True)
class LiveInfo:
    """What a live collection is and holds. growing: rows of the log, deleted ones with them. torn_bytes: what the next
    writer will cut from the end of the log."""

    description: Description
    documents: int
    segments: list[tuple[int, int, int]]  # number, rows, deleted ones among them
    growing: int
    schema: Schema
    log_bytes: int
    disk_bytes: int
    torn_bytes: int


def create(
    directory: Path,
    dim: int,
    *,
    metric: str = "cosine",
    dtype: str = "float32",
    degree: int = 32,
    embedder: EmbedderSpec | None = None,
    demanded: str | None = None,
    schema: Schema | None = None,
    shards: int = 1,
    disk: Disk | None = None,
) -> None:
    """Make an empty collection. demanded: an attribute (string) that every search must bind by its filter.
    shards: split it for so many pool workers, by the documents' ids.

    Raises `BuildRefused`, `OutputRefused` for what is there already, `CollectionError`, `NoRoom`.
    """
    disk = disk or Disk()
    check_arguments(BuildParams, metric, degree, dtype, dtype != "int8")
    check_arguments(check_within, "dim", dim, 1, MAX_DIM)
    check_arguments(check_within, "shards", shards, 1, MAX_SHARDS)
    known = dict(schema or {})
    if demanded is not None:
        known.setdefault(demanded, AttributeType.STRING)
    identity = new_identity()
    try:
        directory.mkdir(parents=True)
    except FileExistsError as error:
        raise OutputRefused(f"{directory} exists already") from error
    except OSError as error:
        raise storage_error(error, f"{directory} cannot be made") from error
    try:
        for folder in ("log", "segments", "tombstones"):
            (directory / folder).mkdir()
        LogWriter(disk, log_path(directory, 0), identity, 0).close()
        write_with_checksum(disk, directory / MANIFEST, Manifest(0, [], 0, 0, 0, known))
        description = Description(
            identity, dim, metric, dtype, degree, embedder, demanded, known,
            shards=msgspec.UNSET if shards == 1 else shards,
        )  # fmt: skip
        write_with_checksum(disk, directory / DESCRIPTION, description)
        disk.sync_directory(directory)
        disk.sync_directory(directory.absolute().parent)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise storage_error(error, f"{directory} cannot be made") from error


def info(directory: Path) -> LiveInfo:
    """Raises `CollectionError`."""
    found = replay(directory)
    state = found.state
    with contextlib.closing(state):
        return LiveInfo(
            state.description,
            state.count,
            [(s.info.number, s.size, int(s.size - s.alive.sum())) for s in state.segments],
            state.growing.count,
            state.schema,
            sum(path.stat().st_size for path in (directory / "log").iterdir()),
            sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
            found.torn_bytes,
        )


def collection_info(directory: Path) -> CollectionInfo:
    """`Collection.info` of a live collection too. Raises `CollectionError`."""
    if not is_live(directory):
        return Collection.info(directory)
    found = info(directory)
    told = found.description
    return CollectionInfo(
        directory, found.documents, told.dim, told.metric, told.dtype, told.degree, told.shard_count,
        told.embedder,
        index_bytes=found.disk_bytes, document_bytes=0,
    )  # fmt: skip


def verify(directory: Path) -> str:
    """Read everything. Raises `CollectionError` that names what is damaged. What a crash left, in words; or ""."""
    description, manifest = read_description(directory), read_manifest(directory)
    for info in manifest.segments:
        verify_segment(directory, info, description, manifest.schema)
    found = replay(directory)
    found.state.close()
    if read_manifest(directory).generation != manifest.generation:
        raise CollectionError(f"{directory} was written to meanwhile: verify it again")
    if not found.torn_bytes:
        return ""
    return f"the last {found.torn_bytes} bytes of the log are no whole record; they will be cut when it is written to"
