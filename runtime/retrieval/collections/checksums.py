"""Checksum verification of a collection's files, including those of segments that are added while it is open."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path

from runtime.errors import CollectionError
from runtime.retrieval.collections.description import Throttle, read_manifest, unthrottled, verify_file
from runtime.retrieval.collections.segment import Segment


class SegmentChecksums:
    """Verification of the open segments of the collection at `directory`. One thread adds, another verifies.

    `total_bytes` in all, `read_bytes` verified so far.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
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

        for name, known in segment.files.items():
            verify_file(segment.path / name, known, counted)

    @staticmethod
    def _bytes(segment: Segment) -> int:
        return sum(info.bytes for info in segment.files.values())

    def close(self) -> None:
        """Drop the pending segments. Idempotent."""
        self._closed = True
        self._pending.clear()
