"""`collection.json`: what a collection is, and the checksums of its files.

collection.json     this manifest, with a checksum of itself
documents.sqlite    the documents (not in a collection of bare vectors)
words.sqlite        their words, for hybrid searches (not in collections from before there were any)
attributes.msgpack  the documents' attributes, by column, for filters (where a document has any)
index/meta.json     the index's own description, which has the checksums of its arrays
index/*.npy
index-0/ …          instead of index/, in a collection split into shards: an index for each
"""

import hashlib
import os
import re
import stat
from pathlib import Path

import msgspec

from runtime.errors import CollectionError
from runtime.retrieval.embedding.embedder import EmbedderSpec

MANIFEST, DOCUMENTS, INDEX = "collection.json", "documents.sqlite", "index"
ATTRIBUTES, WORDS = "attributes.msgpack", "words.sqlite"
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
    """The content of `collection.json`. `embedder` is null where queries must come as vectors.

    `shards` is not written for a collection in one piece, so that those of earlier versions keep their checksums.
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
    sha256: str = ""  # of this manifest, encoded with this field empty

    @property
    def identity(self) -> str:
        """Names the collection's content: equal for two if and only if all of their files are.

        It is the checksum of this manifest, which has those of the documents and of each index's description, and that
        has those of the arrays.
        """
        return self.sha256

    @property
    def indexes(self) -> tuple[str, ...]:
        """The folders of its indexes, one a shard."""
        return index_folders(1 if self.shards is msgspec.UNSET else self.shards)


def index_folders(shards: int) -> tuple[str, ...]:
    """Where a collection of so many shards keeps its indexes."""
    return (INDEX,) if shards == 1 else tuple(f"{INDEX}-{shard}" for shard in range(shards))


def checksum_file(path: Path) -> FileChecksum:
    """A file's size and checksum, from reading all of it. Raises `CollectionError`."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileChecksum(file.tell(), digest)
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Seal `directory`: nothing in it may change after this."""
    (directory / MANIFEST).write_bytes(encode_with_checksum(manifest))


def encode_with_checksum(content: msgspec.Struct) -> bytes:
    """A file of this, with a checksum of itself in its field `sha256`."""
    whole = msgspec.structs.replace(content, sha256=compute_digest(content))
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def compute_digest(content: msgspec.Struct) -> str:
    """What its field `sha256` is to be."""
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(content, sha256=""))).hexdigest()


def read_identity(directory: Path) -> str:
    """Of the build that lies in a directory now, as its manifest has it; "" if that cannot be read."""
    try:
        return read_manifest(directory).identity
    except CollectionError:
        return ""


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a collection whose files are there and have their sizes; contents are not read.

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
        raise CollectionError(f"{directory} is a live collection: `trinity live` has the commands for it")
    if not _has_format(content):
        raise CollectionError(f"{directory} is not a collection: {path} was not written by Trinity")
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CollectionError(f"{path} is damaged: {error}") from error
    if manifest.version != _VERSION:
        raise CollectionError(f"{path} has version {manifest.version}, this Trinity reads {_VERSION}: build it again")
    if manifest.sha256 != compute_digest(manifest):
        raise CollectionError(f"{path} is damaged: its checksum does not fit its content")
    if manifest.shards is not msgspec.UNSET and not 1 <= manifest.shards <= MAX_SHARDS:
        raise CollectionError(f"{path} is damaged: shards is {manifest.shards}, outside 1..{MAX_SHARDS}")
    if lacking := {f"{folder}/meta.json" for folder in manifest.indexes} - set(manifest.files):
        raise CollectionError(f"{path} is damaged: it does not list {', '.join(sorted(lacking))}")
    if strange := [name for name in manifest.files if not _NAME.fullmatch(name)]:
        raise CollectionError(f"{path} is damaged: it lists {strange[0][:64]!r}, which is no file of a collection")
    for name, checksum in manifest.files.items():
        status = _status(directory / name)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise CollectionError(f"{directory / name} is missing")
        if status.st_size != checksum.bytes:
            raise CollectionError(f"{directory / name} is damaged: it has {status.st_size} bytes, not {checksum.bytes}")
    return manifest


def is_collection(directory: Path) -> bool:
    """Whether Trinity wrote this directory, damaged or not."""
    try:
        return _has_format(_bytes(directory / MANIFEST))
    except CollectionError:
        return False


def _has_format(content: bytes, wanted: str = _FORMAT) -> bool:
    class Format(msgspec.Struct):
        format: str

    try:
        return msgspec.json.decode(content, type=Format).format == wanted
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


def _status(path: Path) -> os.stat_result | None:
    """What is there, None for nothing. Raises `CollectionError` where that cannot be seen: permissions, mostly."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error


def _bytes(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # in a pipe reading would wait for ever
            raise CollectionError(f"{path.parent} is not a collection: {path} is not a regular file")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise CollectionError(f"{path.parent} is not a collection: {path} is longer than {_MAX_BYTES} bytes")
    return content
