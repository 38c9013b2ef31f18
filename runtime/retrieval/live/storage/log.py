"""Write-ahead log of a live collection: the writes that its sealed segments do not contain yet.

    header  8s magic, 16s identity of the collection, u64 sequence number of the first record, u32 checksum
    record  u32 mark, u32 payload bytes, u64 sequence number, u32 checksum, payload

Little-endian. Checksums are CRC-32 and start with the identity, so that a record of another collection, or bytes of a
document's text, are not mistaken for a record. A record is written and synced before the next one begins, so after a
crash only the last record of the last file can be torn. It was never acknowledged, and is cut. Damage before complete
records is an error.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from runtime.errors import CollectionError
from runtime.retrieval.live.storage.disk import Disk, storage_error

MAGIC = b"TRNYLOG1"
MAX_PAYLOAD = 256 << 20
HEADER = struct.Struct("<8s16sQI")
RECORD = struct.Struct("<IIQI")
MARK = 0x43455254  # "TREC"
_MARK_BYTES = struct.pack("<I", MARK)


class Record(NamedTuple):
    sequence: int
    payload: bytes


def log_path(directory: Path, first: int) -> Path:
    """Return the path of the file whose first record has this sequence number."""
    return directory / "log" / f"{first:020d}.log"


def log_files(directory: Path) -> list[tuple[int, Path]]:
    """Return the log files with the sequence numbers of their first records, in order."""
    try:
        names = [path for path in (directory / "log").iterdir() if path.suffix == ".log" and path.stem.isdigit()]
    except OSError as error:
        raise storage_error(error, f"{directory / 'log'} cannot be read") from error
    return sorted((int(path.stem), path) for path in names)


def header_of(identity: str, first: int) -> bytes:
    name = bytes.fromhex(identity)
    return HEADER.pack(MAGIC, name, first, zlib.crc32(MAGIC + name + first.to_bytes(8, "little")))


def record_of(identity: str, sequence: int, payload: bytes) -> bytes:
    checksum = _checksum(identity, sequence, payload)
    return RECORD.pack(MARK, len(payload), sequence, checksum) + payload


def _checksum(identity: str, sequence: int, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(bytes.fromhex(identity) + sequence.to_bytes(8, "little")))


def complete_records(content: bytes, identity: str, sequence: int) -> Iterator[tuple[Record, int]]:
    """Yield the complete records at the start of `content`, numbered from `sequence`, and the end of each."""
    offset = 0
    while (record := _record_at(content, offset, identity, sequence)) is not None:
        offset += RECORD.size + len(record.payload)
        sequence += 1
        yield record, offset


def _record_at(content: bytes, offset: int, identity: str, sequence: int | None) -> Record | None:
    if len(content) - offset < RECORD.size:
        return None
    mark, size, number, checksum = RECORD.unpack_from(content, offset)
    begin = offset + RECORD.size
    if mark != MARK or size > min(MAX_PAYLOAD, len(content) - begin) or (sequence is not None and number != sequence):
        return None
    payload = content[begin : begin + size]
    return Record(number, payload) if _checksum(identity, number, payload) == checksum else None


def contains_record(content: bytes, identity: str) -> bool:
    """Return whether any complete record of this collection follows: then the bytes before it are damaged, not torn."""
    at = content.find(_MARK_BYTES)
    while at >= 0:
        if _record_at(content, at, identity, None) is not None:
            return True
        at = content.find(_MARK_BYTES, at + 1)
    return False


class LogFile(NamedTuple):
    """Content of a file: its records, the end of the last one, and the number of bytes behind it, of a torn record."""

    records: list[Record]
    end: int
    torn_bytes: int


def read_log(path: Path, identity: str, first: int, *, last: bool) -> LogFile:
    """Read a file. `last`: it is the last one, which may be torn. Raises `CollectionError` for damage before records.

    A torn header has no records behind it: then `end` is 0.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    if content[: HEADER.size] != header_of(identity, first):
        if not last or contains_record(content, identity) or len(content) > HEADER.size:
            raise CollectionError(f"{path} is damaged: its header does not match this collection and record")
        return LogFile([], 0, len(content))
    found, end = [], HEADER.size
    for record, offset in complete_records(content[HEADER.size :], identity, first):
        found.append(record)
        end = HEADER.size + offset
    torn = len(content) - end
    if torn and not last:
        raise CollectionError(f"{path} is damaged at byte {end}, and is not the last file of the log")
    if torn and contains_record(content[end:], identity):
        raise CollectionError(f"{path} is damaged at byte {end}: complete records follow; nothing was cut")
    return LogFile(found, end, torn)


class LogWriter:
    """Appends records to one file."""

    def __init__(self, disk: Disk, path: Path, identity: str, first: int, *, end: int = 0) -> None:
        """Append at `end` of an existing file, cutting the bytes behind it, or create a file (0). Raises `OSError`."""
        self._disk, self._identity = disk, identity
        self.path, self.end = path, end
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(self._fd, end)
            os.lseek(self._fd, end, os.SEEK_SET)
            if not end:
                self._append(header_of(identity, first))
            disk.sync(self._fd)
            disk.sync_directory(path.parent)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, sequence: int, payload: bytes) -> None:
        """Write a record; `sync` makes it durable. Raises `OSError`, with the file as before."""
        self._append(record_of(self._identity, sequence, payload))

    def _append(self, content: bytes) -> None:
        try:
            self._disk.write(self._fd, content)
        except OSError:
            os.ftruncate(self._fd, self.end)
            os.lseek(self._fd, self.end, os.SEEK_SET)
            raise
        self.end += len(content)

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
        """Open the file that begins at record `first`. Raises `FileNotFoundError` if it does not exist."""
        self._directory, self._identity = directory, identity
        self.sequence = first  # number of the next record
        self.first, self._offset = first, 0  # first record of the file, and position of the next record
        self._torn = False  # bytes follow the last complete record: one is being written, or was torn by a crash
        self._fd = os.open(log_path(directory, first), os.O_RDONLY | os.O_CLOEXEC)

    def poll(self) -> list[Record]:
        """Return the records since the last call; two system calls if there are none.

        Raises `CollectionError` for damage before complete records, at every call.
        """
        found: list[Record] = []
        while True:
            found += self._read()
            if self._torn and any(first > self.first for first, _ in log_files(self._directory)):
                found += self._read()  # the writer completed this file before it created the next
                if self._torn:
                    raise self._damaged(self._offset, ", and is not the last file of the log")
            following = log_path(self._directory, self.sequence)
            if self.sequence == self.first or not following.exists():
                return found
            found += self._read()  # records that were written before the next file was created
            if log_path(self._directory, self.sequence) == following:
                try:
                    fd = os.open(following, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:  # sealed in the meantime: the manifest has the next position
                    return found
                os.close(self._fd)
                self._fd, self.first, self._offset = fd, self.sequence, 0

    @property
    def is_current(self) -> bool | None:
        """Whether the open file is still the file at its path, with all records read. None if the path is gone."""
        try:
            there = os.stat(log_path(self._directory, self.first))
        except OSError:
            return None
        return os.path.samestat(os.fstat(self._fd), there) and there.st_size >= self._offset

    def _read(self) -> list[Record]:
        size = os.fstat(self._fd).st_size
        if self._offset == 0:
            if os.pread(self._fd, HEADER.size, 0) != header_of(self._identity, self.first):
                if size > HEADER.size:
                    raise self._damaged(0, ": its header does not match this collection and record")
                return []
            self._offset = HEADER.size
        self._torn = size > self._offset
        if not self._torn:
            return []
        content = os.pread(self._fd, size - self._offset, self._offset)
        found, end = [], 0
        for record, offset in complete_records(content, self._identity, self.sequence):
            found.append(record)
            end = offset
        self._torn = end < len(content)
        if self._torn and contains_record(content[end:], self._identity):
            raise self._damaged(self._offset + end, ": complete records follow")
        self._offset += end
        self.sequence += len(found)
        return found

    def _damaged(self, at: int, detail: str) -> CollectionError:
        return CollectionError(f"{log_path(self._directory, self.first)} is damaged at byte {at}{detail}")

    def close(self) -> None:
        os.close(self._fd)
