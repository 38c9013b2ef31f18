"""Description of a collection, which never changes; checksums of files and of descriptions."""

import errno
import hashlib
import os
import secrets
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from gpu.index.rows import DTYPES, MAX_DIM, METRICS
from runtime.errors import CollectionError
from runtime.files import open_regular, read_regular
from runtime.retrieval.attributes.schema import AttributeType
from runtime.retrieval.embedding.embedder import EmbedderSpec

DESCRIPTION, DOCUMENTS, INDEX = "collection.json", "documents.sqlite", "index"
ATTRIBUTES, KEYWORDS = "attributes.msgpack", "keywords.sqlite"
MAX_SHARDS = 8
MAX_ROWS = 1 << 62
SEGMENTS_FORMAT = "trinity-live-collection"  # of manifests
_FORMAT, _VERSION = "trinity-collection", 1
_MAX_BYTES = 1 << 20
_Identity = Annotated[str, Meta(pattern="^([0-9a-f]{32}|[0-9a-f]{64})$")]
_Dim = Annotated[int, Meta(ge=1, le=MAX_DIM)]
_Degree = Annotated[int, Meta(ge=2, le=512)]
_Shards = Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
_T = TypeVar("_T", bound=msgspec.Struct)


class FileChecksum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's size and the SHA-256 of its content, in hexadecimal."""

    bytes: int
    sha256: str


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `collection.json`: what never changes.

    embedder: null if queries and documents must be vectors. shards: number of shards, one a pool worker. nonce: the
    identity. demanded: an attribute that the filter of every search must bind (a tenant). declared: attributes whose
    types were given at creation. size, files: rows and files of a flat bulk load. Fields that do not apply are
    omitted, so that collections of earlier versions keep their checksums.
    """

    size: Annotated[int, Meta(ge=0, le=MAX_ROWS)] | msgspec.UnsetType = msgspec.UNSET
    dim: _Dim
    metric: str
    dtype: str
    degree: _Degree
    embedder: EmbedderSpec | None
    files: dict[str, FileChecksum] | msgspec.UnsetType = msgspec.UNSET
    shards: _Shards | msgspec.UnsetType = msgspec.UNSET
    format: str = _FORMAT
    version: int = _VERSION
    sha256: str = ""  # checksum of this struct, encoded with this field empty
    nonce: _Identity | msgspec.UnsetType = msgspec.UNSET
    demanded: str | msgspec.UnsetType = msgspec.UNSET
    declared: dict[str, AttributeType] | msgspec.UnsetType = msgspec.UNSET

    @property
    def identity(self) -> str:
        """Identifies the collection, whatever is written to it: see `identified`."""
        return self.sha256 if self.nonce is msgspec.UNSET else self.nonce

    def identified(self, segments: Sequence[msgspec.Struct]) -> "Description":
        """Return it with an identity: a checksum of the segments of a bulk load, or without any a random number.

        Two bulk loads have the same one if and only if all of their files are equal: the checksum of a segment is that
        of its description, which contains those of its documents and of its index's description, which contains those
        of the arrays.
        """
        if not segments:
            return msgspec.structs.replace(self, nonce=secrets.token_hex(16))
        return msgspec.structs.replace(self, nonce=hashlib.sha256(msgspec.json.encode((self, segments))).hexdigest())

    @property
    def flat_rows(self) -> int:
        """Rows of a flat bulk load; 0: it is none."""
        return 0 if self.size is msgspec.UNSET else self.size

    @property
    def flat_files(self) -> dict[str, FileChecksum]:
        """The files of a flat bulk load."""
        return {} if self.files is msgspec.UNSET else self.files

    @property
    def shard_count(self) -> int:
        return 1 if self.shards is msgspec.UNSET else self.shards

    @property
    def schema(self) -> dict[str, AttributeType]:
        """The attributes whose types were given at creation."""
        return {} if self.declared is msgspec.UNSET else self.declared

    @property
    def demands(self) -> str | None:
        """The attribute that the filter of every search must bind."""
        return None if self.demanded is msgspec.UNSET else self.demanded

    def shard_of(self, name: str) -> int:
        """Return the shard of the document with this id, if it is not in the bulk load. It never changes."""
        return zlib.crc32(name.encode()) % self.shard_count


class _OldDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a collection that an earlier version made empty."""

    identity: _Identity
    dim: _Dim
    metric: str
    dtype: str = "float32"
    degree: _Degree = 32
    embedder: EmbedderSpec | None = None
    demanded: str | None = None
    schema: dict[str, AttributeType] = {}
    kind: Literal["live"] = "live"
    format: str = SEGMENTS_FORMAT
    version: int = _VERSION
    sha256: str = ""
    shards: _Shards | msgspec.UnsetType = msgspec.UNSET


# ---- checksums


def checksum_file(path: Path) -> FileChecksum:
    """Read a file and return its size and checksum. Raises `CollectionError`."""
    try:
        with open(open_regular(path), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileChecksum(file.tell(), digest)
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error


def checksum_of(content: bytes) -> FileChecksum:
    """Return the size and checksum of a file with this content."""
    return FileChecksum(len(content), hashlib.sha256(content).hexdigest())


def encode_with_checksum(content: msgspec.Struct) -> bytes:
    """Encode a struct as a JSON file, with its own checksum in its field `sha256`."""
    whole = msgspec.structs.replace(content, sha256=_digest(content))
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def _digest(content: msgspec.Struct) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(content, sha256=""))).hexdigest()


# ---- reading


def is_collection(directory: Path) -> bool:
    """Whether Trinity wrote this directory, intact or damaged."""
    try:
        return _format_of(read_bytes(directory / DESCRIPTION)) in (_FORMAT, SEGMENTS_FORMAT)
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
    match _format_of(content):
        case "trinity-collection":
            found = decoded(path, content, Description)
        case "trinity-live-collection":
            found = _converted(decoded(path, content, _OldDescription))
        case _:
            raise CollectionError(f"{directory} is not a collection: {path} was not written by Trinity")
    if found.dtype == "int8":
        raise CollectionError(f"{path} is of int8 rows, which no longer exist: build it anew (float16 is smaller)")
    if found.metric not in METRICS or found.dtype not in DTYPES:
        raise CollectionError(f"{path} is damaged: metric {found.metric!r:.40}, dtype {found.dtype!r:.40}")
    return found


def check_sizes(directory: Path, files: Mapping[str, FileChecksum]) -> None:
    """Check that files exist and have the right sizes. Raises `CollectionError`."""
    for name, checksum in files.items():
        status = status_of(directory / name)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise CollectionError(f"{directory / name} is missing")
        if status.st_size != checksum.bytes:
            raise CollectionError(f"{directory / name} is damaged: it has {status.st_size} bytes, not {checksum.bytes}")


def _converted(old: _OldDescription) -> Description:
    return Description(
        dim=old.dim,
        metric=old.metric,
        dtype=old.dtype,
        degree=old.degree,
        embedder=old.embedder,
        shards=old.shards,
        nonce=old.identity,
        demanded=old.demanded or msgspec.UNSET,
        declared=old.schema,
    )


def decoded(path: Path, content: bytes, struct: type[_T]) -> _T:
    """Decode and check a struct that `encode_with_checksum` encoded. Raises `CollectionError`."""
    try:
        found: Any = msgspec.json.decode(content, type=struct)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CollectionError(f"{path} is damaged: {error}") from error
    if found.version != _VERSION:
        raise CollectionError(f"{path} has version {found.version}; this Trinity reads {_VERSION}: build it again")
    if found.sha256 != _digest(found):
        raise CollectionError(f"{path} is damaged: its checksum does not match its content")
    return found  # type: ignore[no-any-return]


def _format_of(content: bytes) -> str:
    class Format(msgspec.Struct):
        format: str

    try:
        return msgspec.json.decode(content, type=Format).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def status_of(path: Path) -> os.stat_result | None:
    """Stat a path; None if it does not exist. Raises `CollectionError` on other errors, mostly permissions."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error


def read_bytes(path: Path) -> bytes:
    """Read a small file. Raises `CollectionError`."""
    try:
        return read_regular(path, _MAX_BYTES)
    except FileNotFoundError as error:
        raise CollectionError(f"{path.parent} is damaged: it has no file {path.name}") from error
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise CollectionError(f"{path.parent} is not a collection: {path}: {error.strerror}") from error
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error
