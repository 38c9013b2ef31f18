"""Checksum verification of a collection's files, including those of segments that are added while it is open."""

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from runtime.errors import CollectionError
from runtime.files import open_regular
from runtime.retrieval.collections.description import FileChecksum
from runtime.retrieval.collections.manifest import read_manifest
from runtime.retrieval.collections.segment import Segment

Throttle = Callable[[int], None]
"""Called with the number of bytes that were just read; may sleep to limit the read rate."""

_CHUNK_BYTES = 1 << 18  # takes 0.15 ms: the longest delay of a pool loop on the same core


def unthrottled(read_bytes: int) -> None:
    """A `Throttle` that never sleeps: for callers that wait for the result."""


def verify_file(path: Path, known: FileChecksum, throttle: Throttle = unthrottled) -> None:
    """Read a file. Raises `CollectionError` if it does not have this checksum."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            while size <= known.bytes and (chunk := file.read(_CHUNK_BYTES)):
                digest.update(chunk)
                size += len(chunk)
                throttle(len(chunk))
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error
    if (size, digest.hexdigest()) != (known.bytes, known.sha256):
        raise CollectionError(f"{path} is damaged: its checksum is not the one it was built with")


class SegmentChecksums:
    """Verification of the open segments of the collection at `directory`. One thread adds, another verifies.

    names: the files to verify, as in `Segment.files`; None: all. `total_bytes` in all, `read_bytes` verified so far.
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

        for name, known in self._files(segment).items():
            verify_file(segment.path / name, known, counted)

    def _files(self, segment: Segment) -> dict[str, FileChecksum]:
        return {name: info for name, info in segment.files.items() if self._names is None or name in self._names}

    def _bytes(self, segment: Segment) -> int:
        return sum(info.bytes for info in self._files(segment).values())

    def close(self) -> None:
        """Drop the pending segments. Idempotent."""
        self._closed = True
        self._pending.clear()
