"""Creating, describing and verifying a live collection."""

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
    """Description and contents of a live collection.

    growing: rows in the log, including deleted ones. torn_bytes: incomplete end of the log, which the next writer cuts.
    """

    description: Description
    documents: int
    segments: list[tuple[int, int, int]]  # number, rows, deleted rows
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
    """Create an empty collection. demanded: a string attribute that the filter of every search must bind.
    shards: number of shards, each for one pool worker; documents are assigned by a hash of their ids.

    Raises `BuildRefused`, `OutputRefused` if the directory exists, `CollectionError`, `NoRoom`.
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
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:
        raise OutputRefused(f"{directory} already exists") from error
    except OSError as error:
        raise storage_error(error, f"{directory} cannot be made") from error
    try:
        for folder in ("log", "segments", "tombstones"):
            (directory / folder).mkdir(mode=0o700)
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
    """Describe a live collection. Raises `CollectionError`."""
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
    """Describe a built or live collection. Raises `CollectionError`."""
    if not is_live(directory):
        return Collection.info(directory)
    found = info(directory)
    description = found.description
    return CollectionInfo(
        directory=directory,
        size=found.documents,
        dim=description.dim,
        metric=description.metric,
        dtype=description.dtype,
        degree=description.degree,
        shards=description.shard_count,
        embedder=description.embedder,
        index_bytes=found.disk_bytes,
        document_bytes=0,
    )


def verify(directory: Path) -> str:
    """Verify all files; return a message if a crash left an incomplete record, else "".

    Raises `CollectionError` that names the damaged file.
    """
    description, manifest = read_description(directory), read_manifest(directory)
    for info in manifest.segments:
        verify_segment(directory, info, description, manifest.schema)
    found = replay(directory)
    found.state.close()
    if read_manifest(directory).generation != manifest.generation:
        raise CollectionError(f"{directory} was written to during the verification: verify it again")
    if not found.torn_bytes:
        return ""
    return f"the last {found.torn_bytes} bytes of the log are an incomplete record; the next writer cuts them"
