"""`collection.json`, which never changes, and `MANIFEST`, which is replaced whole."""

import re
import secrets
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpu.index.rows import DTYPES, MAX_DIM, METRICS
from runtime.errors import CollectionError
from runtime.retrieval.attributes.schema import MAX_ATTRIBUTES, AttributeType
from runtime.retrieval.collections.manifest import (
    LIVE_FORMAT,
    MAX_SHARDS,
    FileChecksum,
    compute_digest,
    encode_with_checksum,
    is_collection,
)
from runtime.retrieval.embedding.embedder import EmbedderSpec
from runtime.retrieval.live.storage.disk import Disk, storage_error

DESCRIPTION, MANIFEST = "collection.json", "MANIFEST"
FORMAT, VERSION = LIVE_FORMAT, 1
MAX_SEGMENTS = 512
_MAX_BYTES = 1 << 20
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_T = TypeVar("_T", "Description", "Manifest")


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a live collection is.

    embedder: null where vectors come ready. demanded: an attribute that every search must bind by its filter (a
    tenant), or null. schema: attributes whose types were given beforehand. shards: into how many it is split, for as
    many pool workers; not written for one in one piece, so that those of earlier versions keep their checksums.
    """

    identity: str
    dim: int
    metric: str
    dtype: str = "float32"
    degree: int = 32
    embedder: EmbedderSpec | None = None
    demanded: str | None = None
    schema: dict[str, AttributeType] = {}
    kind: str = "live"
    format: str = FORMAT
    version: int = VERSION
    sha256: str = ""
    shards: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def shard_count(self) -> int:
        return 1 if self.shards is msgspec.UNSET else self.shards

    def shard_of(self, name: str) -> int:
        """The shard of the document with this id: the same one for ever, so that a document replaces itself there."""
        return zlib.crc32(name.encode()) % self.shard_count


class SegmentInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sealed segment: its directory's number, its rows, the checksum of its own description, and its shard."""

    number: int
    size: int
    sha256: str
    shard: int = 0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a collection stands. sequence: the first record of the log that is not in the segments; a file of the log
    begins with it. next_row, next_segment: the first that were never used as of then."""

    generation: int
    segments: list[SegmentInfo]
    sequence: int
    next_row: int
    next_segment: int
    schema: dict[str, AttributeType]
    tombstones: FileChecksum | None = None
    format: str = FORMAT
    version: int = VERSION
    sha256: str = ""

    def tombstones_path(self, directory: Path) -> Path:
        return directory / "tombstones" / f"{self.generation}.npy"


def new_identity() -> str:
    return secrets.token_hex(16)


def write_with_checksum(disk: Disk, path: Path, content: Description | Manifest) -> None:
    """Replace a file by this, with a checksum of itself. Raises `OSError`."""
    disk.write_file(path, encode_with_checksum(content))


def is_live(directory: Path) -> bool:
    """Whether there is a live collection, damaged or not."""
    try:
        with (directory / DESCRIPTION).open("rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(_MAX_BYTES)
    except OSError:
        return False


def read_description(directory: Path) -> Description:
    """Raises `CollectionError`."""
    path = directory / DESCRIPTION
    if is_collection(directory):
        raise CollectionError(f"{directory} is no live collection, but one of `trinity index build`")
    found = _read(path, Description)
    if found.kind != "live" or not _IDENTITY.fullmatch(found.identity):
        raise CollectionError(f"{path} is damaged: it is of kind {found.kind!r:.40}")
    if found.metric not in METRICS or found.dtype not in DTYPES or not 1 <= found.dim <= MAX_DIM:
        raise CollectionError(f"{path} is damaged: metric {found.metric!r:.40}, dtype {found.dtype!r:.40}")
    if not 2 <= found.degree <= 512:
        raise CollectionError(f"{path} is damaged: degree is {found.degree}")
    if not 1 <= found.shard_count <= MAX_SHARDS:
        raise CollectionError(f"{path} is damaged: shards is {found.shard_count}, outside 1..{MAX_SHARDS}")
    return found


def read_manifest(directory: Path) -> Manifest:
    """Raises `CollectionError`."""
    path = directory / MANIFEST
    found = _read(path, Manifest)
    numbers = [segment.number for segment in found.segments]
    sound = len(numbers) <= MAX_SEGMENTS and len(set(numbers)) == len(numbers) and len(found.schema) <= MAX_ATTRIBUTES
    if not sound or min([found.sequence, found.next_row, found.next_segment, found.generation, *numbers]) < 0:
        raise CollectionError(f"{path} is damaged: its numbers do not fit together")
    return found


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        if not path.is_file():
            raise CollectionError(f"{path.parent} is not a live collection: there is no file {path.name}")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    try:
        found: Any = msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CollectionError(f"{path} is damaged: {error}") from error
    if found.format != FORMAT or found.version != VERSION:
        raise CollectionError(f"{path} has format {found.format!r:.40} {found.version}; this Trinity reads {VERSION}")
    if found.sha256 != compute_digest(found):
        raise CollectionError(f"{path} is damaged: its checksum does not fit its content")
    return found  # type: ignore[no-any-return]
