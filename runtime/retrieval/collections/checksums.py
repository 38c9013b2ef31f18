"""Checksum verification of a collection's files, including those of segments that are added while it is open."""

from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from runtime.errors import CollectionError
from runtime.retrieval.collections.description import FileChecksum, Throttle, read_manifest, unthrottled, verify_file
from runtime.retrieval.collections.segment import Segment


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
