"""Background sealing and merging of a live collection's segments, each in a niced build process.

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
from typing import IO

import msgspec

from runtime.errors import CollectionError
from runtime.retrieval.live.build import BuildJob, BuildReport, SegmentProgress, progress_of_stage
from runtime.retrieval.live.storage.manifest import SegmentInfo
from runtime.retrieval.live.storage.segment import Segment

MERGE_FAN_IN = 4
MAX_DELETED_SHARE = 0.25  # of a segment's rows
RETRY_S = 10.0
MAX_SEGMENTS_PER_SHARD = 32
"""Of a shard. More than there are while merges go on: then what was written waits for a merge until it is sealed, for
those who search have room for so many indexes only."""
_log = logging.getLogger("live")


def pick_merge(segments: Sequence[Segment], seal_rows: int) -> list[int]:
    """The numbers of segments of one shard that are to become one; none where all is well.

    Their number comes first, and what is deleted second: whoever seals as fast as one segment is built anew must not
    have ever more of them.
    """
    tiers: dict[tuple[int, int], list[int]] = defaultdict(list)
    holed = []
    for segment in segments:
        size = int(segment.alive.sum())
        if size < (1 - MAX_DELETED_SHARE) * segment.size:
            holed.append(segment.info.number)
        tier, limit = 0, MERGE_FAN_IN * seal_rows
        while size >= limit:
            tier, limit = tier + 1, limit * MERGE_FAN_IN
        tiers[tier, segment.info.shard].append(segment.info.number)
    full = [numbers for _, numbers in sorted(tiers.items()) if len(numbers) >= MERGE_FAN_IN]
    return full[0] if full else holed[:1]


def too_many_segments(segments: Sequence[Segment]) -> bool:
    """Whether a shard has `MAX_SEGMENTS_PER_SHARD`, so that some are merged before there are more."""
    return max(Counter(segment.info.shard for segment in segments).values(), default=0) >= MAX_SEGMENTS_PER_SHARD


BuildSegment = Callable[[Path, BuildJob], SegmentInfo | None]
"""Builds a segment for the collection in a directory."""


class BuildProcess:
    """A build in a process of its own. `progress`: what of it is done."""

    def __init__(self, directory: Path, job: BuildJob) -> None:
        told = (str(directory), msgspec.json.encode(job).decode(), str(os.getpid()))
        command = [sys.executable, "-m", "runtime.retrieval.live.build", *told]
        limited = {name: str(job.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, **limited}
        )
        self.progress = SegmentProgress(0.0, 0.0, 0.0)

    def wait(self) -> SegmentInfo | None:
        """What it built. Raises `CollectionError`."""
        output: IO[bytes] | None = self._process.stdout
        assert output is not None
        ended: BuildReport | None = None
        with output:
            for line in output:
                told = msgspec.json.decode(line, type=BuildReport)
                if told.ended:
                    ended = told
                else:
                    self.progress = progress_of_stage(told.stage, told.part)
        code = self._process.wait()
        if ended is None:
            raise CollectionError(f"the process that built a segment ended with {code}, without one")
        if ended.error:
            raise CollectionError(ended.error)
        return ended.segment

    def kill(self) -> None:
        self._process.kill()


class Maintenance:
    """Has segments sealed and merged while the writer is open: a thread, and a process at a time, for each of both, so
    that what is written need not wait for a long merge until it is sealed.

    seal, merge: the writer's `seal_if_due` and `merge_if_due`; both may run at once.
    """

    def __init__(
        self, seal: Callable[[BuildSegment], bool], merge: Callable[[BuildSegment], bool], start: bool
    ) -> None:
        self._builders = [BuildThread(seal, "live-seal"), BuildThread(merge, "live-merge")]
        if start:
            for builder in self._builders:
                builder.start()

    @property
    def progress(self) -> SegmentProgress | None:
        """How far the builds are that run, of two the one that is less far; None where none does."""
        return min((found for builder in self._builders if (found := builder.progress) is not None), default=None)

    def wake(self) -> None:
        """There may be something to do."""
        for builder in self._builders:
            builder.wake()

    def stop(self) -> None:
        """End the builds that run, and the threads."""
        for builder in self._builders:
            builder.stop()


class BuildThread:
    """A thread that has segments built whenever they are due.

    rest: waits so many seconds. After a build that failed nothing wakes it sooner: each write would begin another one.
    """

    def __init__(
        self, due: Callable[[BuildSegment], bool], name: str, rest: Callable[[float], object] | None = None
    ) -> None:
        self._wake, self._ended, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._due, self._rest = due, rest or self._ended.wait
        self._process: BuildProcess | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    @property
    def progress(self) -> SegmentProgress | None:
        process = self._process
        return None if process is None else process.progress

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
                while not self._ended.is_set() and self._due(self._build):
                    pass
            except CollectionError as error:
                if not self._ended.is_set():
                    _log.warning("a segment was not built: %s", error.message)
                self._rest(RETRY_S)
                self._wake.set()

    def _build(self, directory: Path, job: BuildJob) -> SegmentInfo | None:
        with self._lock:
            if self._ended.is_set():
                raise CollectionError("the writer is closed")
            self._process = BuildProcess(directory, job)
        try:
            return self._process.wait()
        finally:
            self._process = None
