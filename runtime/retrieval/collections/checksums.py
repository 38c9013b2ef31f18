"""Checksum verification of a collection's open segments, including those that are added while it is open."""

from runtime.errors import CollectionError
from runtime.retrieval.collections.description import SegmentInfo, Throttle, read_manifest, unthrottled
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.collections.state import State


class SegmentChecksums:
    """Verification of the segments of a state, on any thread; each is verified once. `read_bytes`: so far."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._begun: set[SegmentInfo] = set()
        self._closed = False
        self.read_bytes = self._begun_bytes = 0

    @property
    def _pending(self) -> list[Segment]:
        return [] if self._closed else [one for one in self._state.segments if one.info not in self._begun]

    @property
    def pending(self) -> bool:
        """Whether segments remain to be verified."""
        return bool(self._pending)

    @property
    def total_bytes(self) -> int:
        """Bytes to verify in all."""
        return self._begun_bytes + sum(segment.file_bytes() for segment in self._pending)

    def verify(self, throttle: Throttle = unthrottled) -> None:
        """Verify the pending segments. Raises `CollectionError` that names the first damaged file."""

        def counted(read_bytes: int) -> None:
            self.read_bytes += read_bytes
            throttle(read_bytes)

        while pending := self._pending:
            segment = pending[0]
            self._begun.add(segment.info)
            self._begun_bytes += segment.file_bytes()
            try:
                segment.verify(counted)
            except CollectionError:
                if self._is_current(segment.info):  # else it was merged away, or the directory was moved
                    raise
                self.read_bytes = self._begun_bytes

    def _is_current(self, info: SegmentInfo) -> bool:
        try:
            return info in read_manifest(self._state.directory).segments
        except CollectionError:  # the reader reports it
            return False

    def close(self) -> None:
        """Verify no more segments. Idempotent."""
        self._closed = True
