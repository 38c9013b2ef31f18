"""Background sealing and merging of a collection's segments, each in a niced build process.

A merge takes `MERGE_FAN_IN` segments of similar size, so a document is rewritten only each time its segment grows by
that factor. A segment with too many deleted rows is rewritten alone.
"""

import logging
import os
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from runtime.errors import CollectionError
from runtime.retrieval.collections.installer import BuildSegment
from runtime.retrieval.collections.manifest import SegmentInfo
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.collections.segment_build import BuildJob, BuildResult

MERGE_FAN_IN = 4
MAX_DELETED_SHARE = 0.25  # of a segment's rows, before it is rewritten
RETRY_S = 10.0
MAX_SEGMENTS_PER_SHARD = 32
"""More than arise while merges keep up. At this limit sealing waits for a merge, since search engines have room
only for this many indexes of a shard."""
_log = logging.getLogger(__name__)


def pick_merge(segments: Sequence[Segment], seal_rows: int) -> list[int]:
    """Return the numbers of segments of one shard to merge; empty if none is due.

    A full tier takes precedence over a segment with many deleted rows: otherwise a writer that seals as fast as one
    segment is rewritten would accumulate segments.
    """
    tiers: dict[tuple[int, int], list[int]] = defaultdict(list)
    sparse = []
    for segment in segments:
        size = segment.count
        if size < (1 - MAX_DELETED_SHARE) * segment.size:
            sparse.append(segment.info.number)
        tier, limit = 0, MERGE_FAN_IN * seal_rows
        while size >= limit:
            tier, limit = tier + 1, limit * MERGE_FAN_IN
        tiers[tier, segment.info.shard].append(segment.info.number)
    full = [numbers for _, numbers in sorted(tiers.items()) if len(numbers) >= MERGE_FAN_IN]
    return full[0] if full else sparse[:1]


def too_many_segments(segments: Sequence[Segment]) -> bool:
    """Return whether a shard has `MAX_SEGMENTS_PER_SHARD`, so that a merge must precede the next seal."""
    return max(Counter(segment.info.shard for segment in segments).values(), default=0) >= MAX_SEGMENTS_PER_SHARD


class BuildThread:
    """A thread that builds segments whenever they are due, one at a time, each in a process. A writer has two, so that
    sealing does not wait for a long merge.

    run_if_due: the writer's `seal_if_due` or `merge_if_due`, which may run concurrently. sleep: waits some seconds
    after a failed build; `wake` does not shorten it, or each write would retry the build.
    """

    def __init__(
        self, run_if_due: Callable[[BuildSegment], bool], name: str, sleep: Callable[[float], object] | None = None
    ) -> None:
        self._wake, self._ended, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._run_if_due, self._sleep = run_if_due, sleep or self._ended.wait
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def start(self) -> None:
        self._started = True
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        with self._lock:
            self._ended.set()
            if self._process is not None:
                self._process.kill()
        self._wake.set()
        if self._started:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                while not self._ended.is_set() and self._run_if_due(self._build):
                    pass
            except CollectionError as error:
                if not self._ended.is_set():
                    _log.warning("a segment could not be built: %s; retrying in %g s", error.message, RETRY_S)
                self._sleep(RETRY_S)
                self._wake.set()

    def _build(self, directory: Path, job: BuildJob) -> SegmentInfo | None:
        arguments = (str(directory), msgspec.json.encode(job).decode(), str(os.getpid()))
        command = [sys.executable, "-m", "runtime.retrieval.collections.segment_build", *arguments]
        limited = {name: str(job.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        with self._lock:
            if self._ended.is_set():
                raise CollectionError("the writer is closed")
            self._process = process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, **limited}
            )
        output, _ = process.communicate()
        if process.returncode:
            raise CollectionError(f"the process that builds a segment exited with status {process.returncode}")
        result = msgspec.json.decode(output, type=BuildResult)
        if result.error:
            raise CollectionError(result.error)
        return result.segment
