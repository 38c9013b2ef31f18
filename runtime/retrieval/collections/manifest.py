"""`collection.json`: the manifest of a collection, with the checksums of its files.

collection.json     this manifest, with a checksum of itself
documents.sqlite    the documents (not in a collection of bare vectors)
keywords.sqlite     their keyword index, for hybrid searches (missing in collections of older versions)
attributes.msgpack  the documents' attributes, by column, for filters (if any document has one)
index/meta.json     the index's own description, with the checksums of its arrays
index/*.npy
index-0/ …          instead of index/ in a sharded collection: one index a shard
"""

import errno
import hashlib
import os
import re
import stat
from pathlib import Path

import msgspec

from runtime.errors import CollectionError
from runtime.files import open_regular, read_regular
from runtime.retrieval.embedding.embedder import EmbedderSpec

MANIFEST, DOCUMENTS, INDEX = "collection.json", "documents.sqlite", "index"
ATTRIBUTES, KEYWORDS = "attributes.msgpack", "keywords.sqlite"
OLD_KEYWORDS = "words.sqlite"  # of an earlier version; not read
_FORMAT, _VERSION = "trinity-collection", 1
LIVE_FORMAT = "trinity-live-collection"
_MAX_BYTES = 1 << 16
_NAME = re.compile(r"(index(-\d)?/)?[a-z]{1,32}\.[a-z]{1,8}")
MAX_SHARDS = 8


class FileChecksum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's size and the SHA-256 of its content, in hexadecimal."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `collection.json`. `embedder` is null if queries must be vectors.

    `shards` is omitted for an unsharded collection, so that collections of earlier versions keep their checksums.
    """

    size: int
    dim: int
    metric: str
    dtype: str
    degree: int
    embedder: EmbedderSpec | None
    files: dict[str, FileChecksum]
    shards: int | msgspec.UnsetType = msgspec.UNSET
    format: str = _FORMAT
    version: int = _VERSION
    sha256: str = ""  # checksum of this manifest, encoded with this field empty

    @property
    def identity(self) -> str:
        """Hash of the collection's content: equal for two collections if and only if all of their files are equal.

        It is the checksum of this manifest, which contains the checksums of the documents and of each index's
        description, which contains the checksums of the arrays.
        """
        return self.sha256

    @property
    def indexes(self) -> tuple[str, ...]:
        """The folders of the indexes, one a shard."""
        return index_folders(1 if self.shards is msgspec.UNSET else self.shards)


def index_folders(shards: int) -> tuple[str, ...]:
    """Return the folders of the indexes of a collection with this many shards."""
    return (INDEX,) if shards == 1 else tuple(f"{INDEX}-{shard}" for shard in range(shards))


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


def has_checksum(path: Path, known: FileChecksum) -> bool:
    """Return whether a file has this size, which is compared first, and checksum. Raises `CollectionError`."""
    status = _status(path)
    return status is not None and status.st_size == known.bytes and checksum_file(path) == known


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, which seals `directory`: its files are immutable from then on."""
    (directory / MANIFEST).write_bytes(encode_with_checksum(manifest))


def encode_with_checksum(content: msgspec.Struct) -> bytes:
    """Encode a struct as a JSON file, with its own checksum in its field `sha256`."""
    whole = msgspec.structs.replace(content, sha256=compute_digest(content))
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def compute_digest(content: msgspec.Struct) -> str:
    """Compute the value of the field `sha256`."""
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(content, sha256=""))).hexdigest()


def read_identity(directory: Path) -> str:
    """Return the identity of the build in a directory; "" if its manifest cannot be read."""
    try:
        return read_manifest(directory).identity
    except CollectionError:
        return ""


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a collection, and check that its files exist and have the right sizes.

    Raises `CollectionError` for a directory that is missing, foreign, of another version, incomplete or damaged.
    """
    path = directory / MANIFEST
    status = _status(directory)
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise CollectionError(f"there is no collection at {directory}")
    if _status(path) is None:
        raise CollectionError(f"{directory} is not a collection: {path} is missing")
    content = _bytes(path)
    if _has_format(content, LIVE_FORMAT):
        raise CollectionError(f"{directory} is a live collection: use the commands of `trinity live`")
    if not _has_format(content):
        raise CollectionError(f"{directory} is not a collection: {path} was not written by Trinity")
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CollectionError(f"{path} is damaged: {error}") from error
    if manifest.version != _VERSION:
        raise CollectionError(f"{path} has version {manifest.version}; this Trinity reads {_VERSION}: build it again")
    if manifest.sha256 != compute_digest(manifest):
        raise CollectionError(f"{path} is damaged: its checksum does not match its content")
    if manifest.shards is not msgspec.UNSET and not 1 <= manifest.shards <= MAX_SHARDS:
        raise CollectionError(f"{path} is damaged: shards is {manifest.shards}, outside 1..{MAX_SHARDS}")
    if missing := {f"{folder}/meta.json" for folder in manifest.indexes} - set(manifest.files):
        raise CollectionError(f"{path} is damaged: it does not list {', '.join(sorted(missing))}")
    if foreign := [name for name in manifest.files if not _NAME.fullmatch(name)]:
        raise CollectionError(f"{path} is damaged: it lists {foreign[0][:64]!r}, which is not a file of a collection")
    for name, checksum in manifest.files.items():
        status = _status(directory / name)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise CollectionError(f"{directory / name} is missing")
        if status.st_size != checksum.bytes:
            raise CollectionError(f"{directory / name} is damaged: it has {status.st_size} bytes, not {checksum.bytes}")
    return manifest


def is_collection(directory: Path) -> bool:
    """Whether Trinity wrote this directory, intact or damaged."""
    try:
        return _has_format(_bytes(directory / MANIFEST))
    except CollectionError:
        return False


def _has_format(content: bytes, expected: str = _FORMAT) -> bool:
    class Format(msgspec.Struct):
        format: str

    try:
        return msgspec.json.decode(content, type=Format).format == expected
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


def _status(path: Path) -> os.stat_result | None:
    """Stat a path; None if it does not exist. Raises `CollectionError` on other errors, mostly permissions."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path, _MAX_BYTES)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise CollectionError(f"{path.parent} is not a collection: {path}: {error.strerror}") from error
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error
