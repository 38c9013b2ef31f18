"""Checksum verification of a collection's files, including those of segments that are added while it is open."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from runtime.errors import CollectionError
from runtime.files import open_regular
from runtime.retrieval.collections.manifest import FileChecksum, read_manifest
from runtime.retrieval.collections.segment import Segment

Throttle = Callable[[int], None]
"""Called with the number of bytes that were just read; may sleep to limit the read rate."""

_CHUNK_BYTES = 1 << 18  # takes 0.15 ms: the longest delay of a pool loop on the same core


def unthrottled(read_bytes: int) -> None:
    """A `Throttle` that never sleeps: for callers that wait for the result."""


class Checksums:
    """Open files of a collection and their expected checksums: `total_bytes` in all, `read_bytes` verified so far.

    Files that are replaced, moved or removed in the meantime are still read.
    """

    def __init__(self, files: Mapping[Path, FileChecksum]) -> None:
        """Open the files. Raises `CollectionError` for a file that cannot be opened."""
        self._expected = dict(files)
        self._open: dict[Path, int] = {}
        self.total_bytes = sum(checksum.bytes for checksum in files.values())
        self.read_bytes = 0
        try:
            for path in files:
                self._open[path] = open_regular(path)
        except OSError as error:
            self.close()
            raise CollectionError(f"{path} cannot be read: {error.strerror}") from error

    @property
    def pending(self) -> bool:
        """Whether files remain to be verified."""
        return bool(self._open)

    def verify(self, throttle: Throttle = unthrottled) -> None:
        """Read every file and close it. Raises `CollectionError` that names the first damaged file."""
        try:
            for path, fd in self._open.items():
                checksum = self._expected[path]
                if _digest(path, fd, checksum.bytes, self._counted(throttle)) != checksum.sha256:
                    raise CollectionError(f"{path} is damaged: its checksum is not the one it was built with")
        finally:
            self.close()

    def _counted(self, throttle: Throttle) -> Throttle:
        def counted(read_bytes: int) -> None:
            self.read_bytes += read_bytes
            throttle(read_bytes)

        return counted

    def close(self) -> None:
        """Close the files, verified or not. Idempotent."""
        while self._open:
            os.close(self._open.popitem()[1])


def _digest(path: Path, fd: int, size: int, throttle: Throttle) -> str:
    digest, offset = hashlib.sha256(), 0
    try:
        while chunk := os.pread(fd, _CHUNK_BYTES, offset):
            digest.update(chunk)
            offset += len(chunk)
            if offset > size:
                break
            throttle(len(chunk))
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest() if offset == size else f"{offset} bytes"


class SegmentChecksums:
    """`Checksums` of the open segments of the collection at `directory`. One thread adds, another verifies.

    names: the files to verify, as in `Segment.files`; None: all.
    """

    def __init__(self, directory: Path, names: Collection[str] | None = None) -> None:
        self._directory, self._names = directory, names
        self._pending: deque[Segment] = deque()
        self._closed = False
        self.total_bytes = self.read_bytes = 0

    @property
    def pending(self) -> bool:
        """Whether segments remain to be verified."""
        return bool(self._pending)

    def add(self, segments: Iterable[Segment]) -> None:
        """Add segments that were opened."""
        for segment in segments:
            if not self._closed:
                self.total_bytes += self._bytes(segment)
                self._pending.append(segment)

    def verify(self, throttle: Throttle = unthrottled) -> None:
        """Verify the pending segments. Raises `CollectionError` that names the first damaged file."""
        while self._pending:
            segment, before = self._pending.popleft(), self.read_bytes
            try:
                self._verify_segment(segment, throttle)
            except CollectionError:
                if self._contains(segment):  # else it was merged away, or the directory was moved
                    raise
            self.read_bytes = before + self._bytes(segment)

    def _contains(self, segment: Segment) -> bool:
        try:
            return segment.info in read_manifest(self._directory).segments
        except CollectionError:  # the reader reports it
            return False

    def _verify_segment(self, segment: Segment, throttle: Throttle) -> None:
        def counted(read_bytes: int) -> None:
            self.read_bytes += read_bytes
            throttle(read_bytes)

        Checksums({segment.path / name: info for name, info in self._files(segment).items()}).verify(counted)

    def _files(self, segment: Segment) -> dict[str, FileChecksum]:
        return {name: info for name, info in segment.files.items() if self._names is None or name in self._names}

    def _bytes(self, segment: Segment) -> int:
        return sum(info.bytes for info in self._files(segment).values())

    def close(self) -> None:
        """Drop the pending segments. Idempotent."""
        self._closed = True
        self._pending.clear()
