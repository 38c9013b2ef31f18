"""`collection.json`, which is immutable, and `MANIFEST`, which is replaced atomically."""

import re
import secrets
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpu.index.rows import DTYPES, MAX_DIM, METRICS
from runtime.errors import CollectionError
from runtime.files import read_regular
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
    """Immutable description of a live collection.

    embedder: null if documents come with vectors. demanded: an attribute that the filter of every search must bind (a
    tenant), or null. schema: attributes whose types were given at creation. shards: number of shards, one a pool
    worker; omitted for one shard, so that collections of earlier versions keep their checksums.
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
        """Return the shard of the document with this id. It never changes, so an upsert replaces within its shard."""
        return zlib.crc32(name.encode()) % self.shard_count


class SegmentInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sealed segment: the number of its directory, its rows, the checksum of its description, and its shard."""

    number: int
    size: int
    sha256: str
    shard: int = 0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a collection's segments.

    sequence: the first log record that the segments do not contain, which begins a log file. next_row, next_segment:
    the lowest numbers that were never used. introduced: by attribute, the owner (`AttributeBinding.text`) who was
    the first to write it; omitted without any, so that collections of earlier versions keep their checksums.
    """

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
    introduced: dict[str, str] | msgspec.UnsetType = msgspec.UNSET

    def tombstones_path(self, directory: Path) -> Path:
        return directory / "tombstones" / f"{self.generation}.npy"


def new_identity() -> str:
    return secrets.token_hex(16)


def write_with_checksum(disk: Disk, path: Path, content: Description | Manifest) -> None:
    """Replace a file durably by this struct with its checksum. Raises `OSError`."""
    disk.write_file(path, encode_with_checksum(content))


def is_live(directory: Path) -> bool:
    """Return whether the directory is a live collection, intact or damaged."""
    try:
        return f'"{FORMAT}"'.encode() in read_regular(directory / DESCRIPTION, _MAX_BYTES)
    except OSError:
        return False


def read_description(directory: Path) -> Description:
    """Read and check the description. Raises `CollectionError`."""
    path = directory / DESCRIPTION
    if is_collection(directory):
        raise CollectionError(f"{directory} is not a live collection, but one of `trinity index build`")
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
    """Read and check the manifest. Raises `CollectionError`."""
    path = directory / MANIFEST
    found = _read(path, Manifest)
    numbers = [segment.number for segment in found.segments]
    sound = len(numbers) <= MAX_SEGMENTS and len(set(numbers)) == len(numbers) and len(found.schema) <= MAX_ATTRIBUTES
    if not sound or min([found.sequence, found.next_row, found.next_segment, found.generation, *numbers]) < 0:
        raise CollectionError(f"{path} is damaged: its numbers are inconsistent")
    return found


def _read(path: Path, struct: type[_T]) -> _T:
    try:
        content = read_regular(path, _MAX_BYTES)
    except FileNotFoundError as error:
        raise CollectionError(f"{path.parent} is not a live collection: it has no file {path.name}") from error
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    try:
        found: Any = msgspec.json.decode(content, type=struct)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CollectionError(f"{path} is damaged: {error}") from error
    if found.format != FORMAT or found.version != VERSION:
        raise CollectionError(f"{path} has format {found.format!r:.40} {found.version}; this Trinity reads {VERSION}")
    if found.sha256 != compute_digest(found):
        raise CollectionError(f"{path} is damaged: its checksum does not match its content")
    return found  # type: ignore[no-any-return]
