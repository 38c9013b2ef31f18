"""Write-ahead log of a collection: the writes that its sealed segments do not contain yet.

    header  8s magic, 16s identity of the collection, u64 sequence number of the first record, u32 checksum
    record  u32 mark, u32 payload bytes, u64 sequence number, u32 checksum, payload

Little-endian. The payload is a list of operations in MessagePack, which are applied as one. Checksums are CRC-32 and
start with the identity, so that a record of another collection, or bytes of a document's text, are not mistaken for a
record. A record is written and synced before the next one begins, so after a crash only the last record of the last
file can be torn. It was never acknowledged, and is cut. Damage before complete records is an error.
"""

import contextlib
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError
from runtime.files import open_regular
from runtime.retrieval.collections.disk import Disk, storage_error, storage_errors
from runtime.retrieval.passages import Attributes

MAGIC = b"TRNYLOG1"
MAX_PAYLOAD = 256 << 20
HEADER = struct.Struct("<8s16sQI")
RECORD = struct.Struct("<IIQI")
MARK = 0x43455254  # "TREC"
MAX_LOG_BYTES = 1 << 40  # of one file, which is read record by record
_SCANNED_BYTES = 1 << 20
_MARK_BYTES = struct.pack("<I", MARK)


class Upsert(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Documents under consecutive rows from `first` on; `replaced` are the rows of the documents that they replace.

    successors: the rows that replace these; empty in logs of older versions. vectors: float32 [documents, d] as bytes,
    normalised for cosine.
    """

    first: int
    ids: list[str]
    titles: list[str]
    texts: list[str]
    attributes: list[Attributes]
    vectors: bytes
    replaced: list[int]
    successors: list[int] = []


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Deleted rows."""

    rows: list[int]


Operation = Upsert | Delete


def encode(operations: list[Operation]) -> bytes:
    return msgspec.msgpack.encode(operations)


def decode(payload: bytes, dim: int) -> list[Operation]:
    """Decode a payload. Raises `CollectionError` if it is damaged or its vectors do not have this dimension."""
    try:
        operations: list[Any] = msgspec.msgpack.decode(payload, type=list[Upsert | Delete])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CollectionError(f"a record of the log cannot be read: {error}") from error
    for operation in operations:
        if isinstance(operation, Upsert):
            count = len(operation.ids)
            same = count == len(operation.titles) == len(operation.texts) == len(operation.attributes)
            same &= len(operation.successors) in (0, len(operation.replaced))
            if not same or len(operation.vectors) != count * dim * 4 or operation.first < 0:
                raise CollectionError("a record of the log is damaged: its fields are inconsistent")
    return operations


def decode_vectors(operation: Upsert, dim: int) -> NDArray[np.float32]:
    """Return the vectors, float32 [documents, d]."""
    return np.frombuffer(operation.vectors, np.float32).reshape(-1, dim)


# ---- files


def log_path(directory: Path, first: int) -> Path:
    """Return the path of the file whose first record has this sequence number."""
    return directory / "log" / f"{first:020d}.log"


def log_files(directory: Path) -> list[tuple[int, Path]]:
    """Return the log files with the sequence numbers of their first records, in order."""
    names: list[Path] = []
    with storage_errors(f"{directory / 'log'} cannot be read"), contextlib.suppress(FileNotFoundError):
        names = [path for path in (directory / "log").iterdir() if path.suffix == ".log" and path.stem.isdigit()]
    return sorted((int(path.stem), path) for path in names)


def log_bytes(directory: Path) -> int:
    """Return the size of the log files."""
    return sum(path.stat().st_size for _, path in log_files(directory) if path.exists())


def header_of(identity: str, first: int) -> bytes:
    name = bytes.fromhex(identity)
    return HEADER.pack(MAGIC, name, first, zlib.crc32(MAGIC + name + first.to_bytes(8, "little")))


def record_of(identity: str, sequence: int, payload: bytes) -> bytes:
    checksum = _checksum(identity, sequence, payload)
    return RECORD.pack(MARK, len(payload), sequence, checksum) + payload


def _checksum(identity: str, sequence: int, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(bytes.fromhex(identity) + sequence.to_bytes(8, "little")))


def _payload_at(file: BinaryIO, begin: int, end: int, identity: str, sequence: int | None) -> bytes | None:
    if end - begin < RECORD.size:
        return None
    file.seek(begin)
    mark, size, number, checksum = RECORD.unpack(file.read(RECORD.size).ljust(RECORD.size, b"\0"))
    begin += RECORD.size
    if mark != MARK or size > min(MAX_PAYLOAD, end - begin) or sequence not in (None, number):
        return None
    payload = file.read(size)
    return payload if _checksum(identity, number, payload) == checksum else None


def contains_record(file: BinaryIO, begin: int, end: int, identity: str) -> bool:
    """Return whether any complete record of this collection follows: then the bytes before it are damaged, not torn."""
    while end - begin >= RECORD.size:
        file.seek(begin)
        if not (content := file.read(min(_SCANNED_BYTES, end - begin))):
            return False  # it was cut
        for mark in re.finditer(_MARK_BYTES, content):
            if _payload_at(file, begin + mark.start(), end, identity, None) is not None:
                return True
        begin += max(len(content) - len(_MARK_BYTES), 0) + 1  # a mark may begin in the last bytes
    return False


def begin_log_file(disk: Disk, directory: Path, identity: str, first: int) -> None:
    """Write an empty log file, or one anew. Raises `OSError`."""
    disk.write_file(log_path(directory, first), header_of(identity, first))


class LogWriter:
    """Appends records to the last file of a log."""

    def __init__(self, disk: Disk, directory: Path, identity: str, first: int, end: int) -> None:
        """Append at `end` of the file that begins at record `first`, cutting the bytes behind it. Raises `OSError`."""
        self._disk, self._identity = disk, identity
        self.path, self.first, self.end = log_path(directory, first), first, max(end, HEADER.size)
        self._torn = False  # bytes follow the last record
        if not end:  # its header is torn
            begin_log_file(disk, directory, identity, first)
        self._fd = open_regular(self.path, os.O_RDWR)
        try:
            self.cut()
            disk.sync(self._fd)
            disk.sync_directory(self.path.parent)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, sequence: int, payload: bytes) -> None:
        """Write a record; `sync` makes it durable. Raises `OSError`, with the records as before."""
        if self._torn:
            self.cut()
        record = record_of(self._identity, sequence, payload)
        try:
            self._torn = True
            self._disk.write(self._fd, record)
        except OSError:
            with contextlib.suppress(OSError):  # else before the next record
                self.cut()
            raise
        self.end, self._torn = self.end + len(record), False

    def cut(self) -> None:
        """Remove what is behind the last record, of one that could not be written. Raises `OSError`."""
        self._disk.truncate(self._fd, self.end)
        self._torn = False

    @property
    def is_current(self) -> bool:
        """Whether the open file is still the file at its path, with all records."""
        with contextlib.suppress(OSError):
            there = os.stat(self.path)
            return os.path.samestat(os.fstat(self._fd), there) and there.st_size >= self.end
        return False

    def sync(self) -> None:
        """Make the records durable. Raises `OSError`; whether the last record is durable is then unknown."""
        self._disk.sync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class LogFollower:
    """Reads a log that another process writes, from the start of one of its files on."""

    def __init__(self, directory: Path, identity: str, first: int) -> None:
        """Open the file that begins at record `first`; -1: there is no log (yet), and no record. Raises
        `CollectionError`."""
        self._directory, self._identity = directory, identity
        self._fd, self.sequence = -1, first  # number of the next record
        self.first, self.end = max(first, 0), 0  # first record of the file, and position of the next record
        if first < 0:
            return
        with storage_errors(f"the log of {directory} cannot be read at record {first}"):
            self._open(first)

    def _open(self, first: int) -> None:
        path = log_path(self._directory, first)
        fd = open_regular(path, max_bytes=MAX_LOG_BYTES)
        self.close()
        self._fd, self._file, self._path = fd, os.fstat(fd), os.fspath(path)
        self.first, self.end = first, 0  # first record of the file, and position of the next record
        self._torn = False  # bytes follow the last complete record: one is being written, or was torn by a crash

    @property
    def torn_bytes(self) -> int:
        """Bytes behind the last complete record, or of a torn header."""
        return os.fstat(self._fd).st_size - self.end if self.sequence >= 0 else 0

    def poll(self) -> list[bytes]:
        """Return the payloads of the records since the last call; two system calls if there are none.

        Raises `CollectionError` for damage before complete records, at every call.
        """
        payloads: list[bytes] = []
        while self.sequence >= 0:
            payloads += self._read()
            if not self._is_followed():
                break
            payloads += self._read()  # the writer completed this file before it created the next
            if self._torn:
                raise self._damaged(self.end, ", and is not the last file of the log")
            try:
                self._open(self.sequence)
            except FileNotFoundError:  # it was sealed: the manifest has the next position
                break
            except OSError as error:
                if payloads:
                    break  # the next call tries again
                raise storage_error(error, f"{log_path(self._directory, self.sequence)} cannot be read") from error
        return payloads

    def _is_followed(self) -> bool:
        """Whether there is a file behind the open one, as far as was read. Raises `CollectionError`."""
        if self._torn:
            return any(first > self.first for first, _ in log_files(self._directory))
        return self.sequence != self.first and log_path(self._directory, self.sequence).exists()

    @property
    def at_end(self) -> bool:
        """Whether the open file is the one at its path, and `poll` would read nothing: a system call."""
        return self.sequence < 0 or (self._size_there() == self.end and not self._is_followed())

    @property
    def is_current(self) -> bool | None:
        """Whether the open file is still the file at its path, with all records read. None if the path is gone."""
        size = self.end if self.sequence < 0 else self._size_there()
        return None if size is None else size >= self.end

    def _size_there(self) -> int | None:
        """Return the size of the file at the path of the open one; -1 if it is another one, None if it is gone."""
        try:
            there = os.stat(self._path)
        except OSError:
            return None
        return there.st_size if os.path.samestat(there, self._file) else -1

    def _read(self) -> list[bytes]:
        if self._fd < 0:
            raise CollectionError(f"{self._directory} was closed")
        size = os.fstat(self._fd).st_size
        if self.end == 0:
            if os.pread(self._fd, HEADER.size, 0) != header_of(self._identity, self.first):
                if size > HEADER.size:
                    raise self._damaged(0, ": its header does not match this collection and record")
                return []
            self.end = HEADER.size
        self._torn = size > self.end
        if not self._torn:
            return []
        payloads, end = list[bytes](), self.end
        with open(self._fd, "rb", closefd=False) as file:
            while (record := _payload_at(file, end, size, self._identity, self.sequence + len(payloads))) is not None:
                payloads.append(record)
                end += RECORD.size + len(record)
            self._torn = end < size
            if self._torn and contains_record(file, end, size, self._identity):
                raise self._damaged(end, ": complete records follow")
        self.end = end
        self.sequence += len(payloads)
        return payloads

    def _damaged(self, at: int, detail: str) -> CollectionError:
        return CollectionError(f"{log_path(self._directory, self.first)} is damaged at byte {at}{detail}")

    def close(self) -> None:
        """Close the file; `poll` raises `CollectionError` then. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
