"""Comparing the files of sealed segments with their checksums, those that come while a collection is open too."""

from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from runtime.errors import CollectionError
from runtime.retrieval.collections.checksums import Checksums, Throttle, unthrottled
from runtime.retrieval.collections.manifest import FileChecksum
from runtime.retrieval.live.storage.manifest import read_manifest
from runtime.retrieval.live.storage.segment import Segment, segment_path


class LiveChecksums:
    """As `Checksums`, of segments that are open at `directory`. One thread adds, one verifies.

    names: of the files that are compared, as `Segment.files` has them; None: all.
    """

    def __init__(self, directory: Path, names: Collection[str] | None = None) -> None:
        self._directory, self._names = directory, names
        self._due: deque[Segment] = deque()
        self._closed = False
        self.total_bytes = self.read_bytes = 0

    @property
    def pending(self) -> bool:
        """Whether there is something to compare."""
        return bool(self._due)

    def add(self, segments: Iterable[Segment]) -> None:
        """These are open from now on."""
        for segment in segments:
            if not self._closed:
                self.total_bytes += self._bytes(segment)
                self._due.append(segment)

    def verify(self, throttle: Throttle = unthrottled) -> None:
        """Compare what is pending. Raises `CollectionError` that names the first file that is not as it was sealed."""
        while self._due:
            segment, before = self._due.popleft(), self.read_bytes
            try:
                self._compare(segment, throttle)
            except CollectionError:
                if self._still_has(segment):  # else it was merged, or the directory was moved, meanwhile
                    raise
            self.read_bytes = before + self._bytes(segment)

    def _still_has(self, segment: Segment) -> bool:
        try:
            return segment.info in read_manifest(self._directory).segments
        except CollectionError:  # that is the reader's to tell
            return False

    def _compare(self, segment: Segment, throttle: Throttle) -> None:
        def counted(read_bytes: int) -> None:
            self.read_bytes += read_bytes
            throttle(read_bytes)

        path = segment_path(self._directory, segment.info.number)
        Checksums({path / name: info for name, info in self._files(segment).items()}).verify(counted)

    def _files(self, segment: Segment) -> dict[str, FileChecksum]:
        return {name: info for name, info in segment.files.items() if self._names is None or name in self._names}

    def _bytes(self, segment: Segment) -> int:
        return sum(info.bytes for info in self._files(segment).values())

    def close(self) -> None:
        """Nothing is compared any more. Idempotent."""
        self._closed = True
        self._due.clear()
