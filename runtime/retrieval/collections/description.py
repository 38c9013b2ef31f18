"""What a collection's directory contains: an immutable description, and the segments and the log that documents are in.

collection.json     what never changes (`Description`), with a checksum of itself
MANIFEST            the segments, and the log's position behind them (`Manifest`)
log/                write-ahead log of upserts and deletes, which acknowledges them (`log`)
segments/<number>/  sealed: an index with row numbers as ids, documents, attributes (`segment`)
tombstones/         <generation>.npy: int64, the deleted rows of the manifest's segments
served/             the log position of each process that serves the collection (`reader_barrier`)
writer.lock         lock of the only writing process

A document gets a row number when it is stored; row numbers are never reused. An upsert of an existing id stores the
document under a new row and deletes the old one. A row number therefore denotes one text permanently, and a result
cannot mix texts.

Bulk loads of earlier versions have another layout until they are first written to: see `upgrade`.
"""

import hashlib
import io
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from gpu.index.rows import DTYPES, MAX_DIM, METRICS
from runtime.errors import CollectionError
from runtime.files import open_regular, read_regular
from runtime.retrieval.attributes.schema import MAX_ATTRIBUTES, AttributeType
from runtime.retrieval.collections.disk import storage_errors
from runtime.retrieval.embedding.embedder import EmbedderSpec

DESCRIPTION, MANIFEST, DOCUMENTS, INDEX = "collection.json", "MANIFEST", "documents.sqlite", "index"
ATTRIBUTES, KEYWORDS = "attributes.msgpack", "keywords.sqlite"
MAX_SHARDS = 8
MAX_ROWS = 1 << 62
MAX_SEGMENTS = 512
FORMAT, VERSION = "trinity-collection", 1
_MANIFEST_FORMAT = "trinity-live-collection"  # also of the descriptions of collections that earlier versions made empty
_MAX_BYTES = 1 << 20
_Identity = Annotated[str, Meta(pattern="^([0-9a-f]{32}|[0-9a-f]{64})$")]
_Dim = Annotated[int, Meta(ge=1, le=MAX_DIM)]
_Degree = Annotated[int, Meta(ge=2, le=512)]
_Number = Annotated[int, Meta(ge=0)]
_Shards = Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
_CHUNK_BYTES = 1 << 18  # takes 0.15 ms: the longest delay of a pool loop on the same core
_T = TypeVar("_T", bound=msgspec.Struct)
Throttle = Callable[[int], None]
"""Called with the number of bytes that were just read; may sleep to limit the read rate."""


def unthrottled(read_bytes: int) -> None:
    """A `Throttle` that never sleeps: for callers that wait for the result."""


class FileChecksum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's size and the SHA-256 of its content, in hexadecimal."""

    bytes: int
    sha256: str


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The content of `collection.json`: what never changes.

    embedder: null if queries and documents must be vectors. shards: number of shards, one a pool worker. nonce: the
    identity. demanded: an attribute that the filter of every search must bind (a tenant). declared: attributes whose
    types were given at creation. size, files: rows and files of a flat bulk load. sha256: checksum of this struct,
    encoded with this field empty.
    """

    size: Annotated[int, Meta(ge=0, le=MAX_ROWS)] = 0
    dim: _Dim
    metric: str
    dtype: str
    degree: _Degree
    embedder: EmbedderSpec | None
    files: dict[str, FileChecksum] = {}
    shards: _Shards = 1
    format: str
    version: int
    sha256: str
    nonce: _Identity | None = None
    demanded: str | None = None
    declared: dict[str, AttributeType] = {}

    @property
    def identity(self) -> str:
        """Identifies the collection, whatever is written to it: see `identified`."""
        return self.nonce or self.sha256

    def identified(self, segments: Sequence[msgspec.Struct]) -> "Description":
        """Return it with an identity: a checksum of the segments of a bulk load, or without any a random number.

        Two bulk loads have the same one if and only if all of their files are equal: the checksum of a segment is that
        of its description, which contains those of its documents and of its index's description, which contains those
        of the arrays.
        """
        if not segments:
            return msgspec.structs.replace(self, nonce=secrets.token_hex(16))
        return msgspec.structs.replace(self, nonce=hashlib.sha256(msgspec.json.encode((self, segments))).hexdigest())

    def shard_of(self, name: str) -> int:
        """Return the shard of the document with this id, if it is not in the bulk load. It never changes."""
        return zlib.crc32(name.encode()) % self.shards


class SegmentInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sealed segment: the number of its directory, its rows, the checksum of its description, and its shard."""

    number: _Number
    size: _Number
    sha256: str
    shard: int = 0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a collection's segments.

    sequence: the first log record that the segments do not contain, which begins a log file. next_row, next_segment:
    the lowest numbers that were never used. introduced: of earlier versions, which counted the attributes of tenants.
    """

    generation: _Number
    segments: Annotated[list[SegmentInfo], Meta(max_length=MAX_SEGMENTS)]
    sequence: _Number
    next_row: _Number
    next_segment: _Number
    schema: Annotated[dict[str, AttributeType], Meta(max_length=MAX_ATTRIBUTES)]
    tombstones: FileChecksum | None = None
    format: str = _MANIFEST_FORMAT
    version: int = 1
    sha256: str = ""
    introduced: dict[str, str] | msgspec.UnsetType = msgspec.UNSET

    def tombstones_path(self, directory: Path) -> Path:
        return directory / "tombstones" / f"{self.generation}.npy"


# ---- checksums


def checksum_file(path: Path, throttle: Throttle = unthrottled) -> FileChecksum:
    """Read a file and return its size and checksum. Raises `CollectionError`."""
    digest, size = hashlib.sha256(), 0
    with storage_errors(f"{path} cannot be read"), open(open_regular(path), "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            throttle(len(chunk))
    return FileChecksum(size, digest.hexdigest())


def verify_file(path: Path, known: FileChecksum, throttle: Throttle = unthrottled) -> None:
    """Read a file. Raises `CollectionError` if it does not have this checksum."""
    if checksum_file(path, throttle) != known:
        raise CollectionError(f"{path} is damaged: its checksum is not the one it was built with")


def checksum_of(content: bytes) -> FileChecksum:
    """Return the size and checksum of a file with this content."""
    return FileChecksum(len(content), hashlib.sha256(content).hexdigest())


def encode_with_checksum(content: msgspec.Struct) -> bytes:
    """Encode a struct as a JSON file, with its own checksum in its field `sha256`."""
    fields = msgspec.json.decode(msgspec.json.encode(content), type=dict[str, Any])
    return msgspec.json.format(msgspec.json.encode(fields | {"sha256": _digest(fields)}), indent=1) + b"\n"


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(fields | {"sha256": ""})).hexdigest()


# ---- writing


def make_folders(directory: Path) -> None:
    """Make the folders of a collection. Raises `OSError`."""
    for folder in ("log", "segments", "tombstones"):
        (directory / folder).mkdir(mode=0o700, exist_ok=True)


def tombstones_content(rows: NDArray[np.int64]) -> tuple[bytes, FileChecksum]:
    """Encode a tombstones file; also return its checksum."""
    file = io.BytesIO()
    np.save(file, np.sort(rows), allow_pickle=False)
    content = file.getvalue()
    return content, checksum_of(content)


# ---- reading


def is_collection(directory: Path) -> bool:
    """Whether Trinity wrote this directory, intact or damaged."""
    try:
        return _format_of(read_bytes(directory / DESCRIPTION)) in (FORMAT, _MANIFEST_FORMAT)
    except CollectionError:
        return False


def read_identity(directory: Path) -> str:
    """Return the identity of the collection in a directory; "" if its description cannot be read."""
    try:
        return read_description(directory).identity
    except CollectionError:
        return ""


def read_description(directory: Path) -> Description:
    """Read and check the description.

    Raises `CollectionError` for a directory that is missing, foreign, of another version or damaged.
    """
    path = directory / DESCRIPTION
    status = status_of(directory)
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise CollectionError(f"there is no collection at {directory}")
    if status_of(path) is None:
        raise CollectionError(f"{directory} is not a collection: {path} is missing")
    content = read_bytes(path)
    if _format_of(content) not in (FORMAT, _MANIFEST_FORMAT):
        raise CollectionError(f"{directory} is not a collection: {path} was not written by Trinity")
    description = decoded(path, content, Description)
    if description.dtype == "int8":
        raise CollectionError(f"{path} is of int8 rows, which no longer exist: build it anew (float16 is smaller)")
    if description.metric not in METRICS or description.dtype not in DTYPES:
        raise CollectionError(f"{path} is damaged: metric {description.metric!r:.40}, dtype {description.dtype!r:.40}")
    return description


def read_manifest_file(directory: Path) -> Manifest:
    """Read and check the manifest, which a flat bulk load has not: see `upgrade`. Raises `CollectionError`."""
    path = directory / MANIFEST
    manifest = decoded(path, read_bytes(path), Manifest)
    if len({segment.number for segment in manifest.segments}) != len(manifest.segments):
        raise CollectionError(f"{path} is damaged: segments have the same number")
    return manifest


def read_tombstones(directory: Path, manifest: Manifest) -> NDArray[np.int64]:
    """Read the deleted rows of a manifest's segments. Raises `CollectionError`."""
    if manifest.tombstones is None:
        return np.empty(0, np.int64)
    path = manifest.tombstones_path(directory)
    content = read_known(path, manifest.tombstones.sha256, manifest.tombstones.bytes)
    try:
        rows = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise CollectionError(f"{path} is damaged: {error}") from error
    if rows.ndim != 1 or rows.dtype != np.int64:
        raise CollectionError(f"{path} is damaged: it contains {rows.dtype} of shape {list(rows.shape)}")
    return np.asarray(rows)


def check_sizes(files: Mapping[Path, FileChecksum]) -> None:
    """Check that files exist and have the right sizes. Raises `CollectionError`."""
    for path, checksum in files.items():
        status = status_of(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise CollectionError(f"{path} is missing")
        if status.st_size != checksum.bytes:
            raise CollectionError(f"{path} is damaged: it has {status.st_size} bytes, not {checksum.bytes}")


def is_flat(directory: Path, description: Description) -> bool:
    """Whether it is a bulk load of an earlier version that was not converted. Raises `CollectionError`."""
    return description.size > 0 and status_of(directory / MANIFEST) is None


def decoded(path: Path, content: bytes, struct: type[_T]) -> _T:
    """Decode and check a struct that `encode_with_checksum` encoded. Raises `CollectionError`."""
    try:
        fields = msgspec.json.decode(content, type=dict[str, Any])
        value: Any = msgspec.convert(_present_names(fields), struct)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CollectionError(f"{path} is damaged: {error}") from error
    if value.version != VERSION:
        raise CollectionError(f"{path} has version {value.version}; this Trinity reads {VERSION}: build it again")
    if value.sha256 != _digest(fields):
        raise CollectionError(f"{path} is damaged: its checksum does not match its content")
    return value  # type: ignore[no-any-return]


def _present_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Rename the fields of the description of a collection that an earlier version made empty."""
    if fields.get("kind") != "live":
        return fields
    names = {"identity": "nonce", "schema": "declared"}
    return {names.get(name, name): value for name, value in fields.items() if name != "kind"}


class _Format(msgspec.Struct):
    format: str


def _format_of(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=_Format).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def status_of(path: Path) -> os.stat_result | None:
    """Stat a path; None if it does not exist. Raises `CollectionError` on other errors, mostly permissions."""
    with storage_errors(f"{path} cannot be read"):
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None


def read_bytes(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Read a small file. Raises `CollectionError`."""
    with storage_errors(f"{path} cannot be read"):
        return read_regular(path, max_bytes)


def read_known(path: Path, sha256: str, max_bytes: int) -> bytes:
    """Read a small file whose checksum the manifest has. Raises `CollectionError`."""
    content = read_bytes(path, max_bytes)
    if checksum_of(content).sha256 != sha256:
        raise CollectionError(f"{path} is damaged: its checksum differs from the manifest's")
    return content
