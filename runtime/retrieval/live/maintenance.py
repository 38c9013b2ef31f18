"""Sealing and merging beside the writer: a niced process builds, and the writer takes what it built.

A merge takes MERGED segments of about one size, so a document is built anew only as often as segments grow by that
factor; and a segment of which too much is deleted is built anew alone.
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
from runtime.retrieval.live.build import Job, Parts, Told, parts_of
from runtime.retrieval.live.storage.manifest import SegmentFacts
from runtime.retrieval.live.storage.segment import Segment

MERGED = 4
MOST_DELETED = 0.25  # of a segment's rows
RETRY_S = 10.0
MOST_SEGMENTS = 32
"""Of a shard. More than there are while merges go on: then what was written waits for a merge until it is sealed, for
those who search have room for so many indexes only."""
_log = logging.getLogger("live")


def to_merge(segments: Sequence[Segment], seal_rows: int) -> list[int]:
    """The numbers of segments of one shard that are to become one; none where all is well.

    Their number comes first, and what is deleted second: whoever seals as fast as one segment is built anew must not
    have ever more of them.
    """
    tiers: dict[tuple[int, int], list[int]] = defaultdict(list)
    holed = []
    for segment in segments:
        size = int(segment.alive.sum())
        if size < (1 - MOST_DELETED) * segment.size:
            holed.append(segment.facts.number)
        tier, limit = 0, MERGED * seal_rows
        while size >= limit:
            tier, limit = tier + 1, limit * MERGED
        tiers[tier, segment.facts.shard].append(segment.facts.number)
    full = [numbers for _, numbers in sorted(tiers.items()) if len(numbers) >= MERGED]
    return full[0] if full else holed[:1]


def crowded(segments: Sequence[Segment]) -> bool:
    """Whether a shard has `MOST_SEGMENTS`, so that some are merged before there are more."""
    return max(Counter(segment.facts.shard for segment in segments).values(), default=0) >= MOST_SEGMENTS


Build = Callable[[Path, Job], SegmentFacts | None]
"""Builds a segment for the collection in a directory."""


class Process:
    """A build in a process of its own. `progress`: what of it is done."""

    def __init__(self, directory: Path, job: Job) -> None:
        told = (str(directory), msgspec.json.encode(job).decode(), str(os.getpid()))
        command = [sys.executable, "-m", "runtime.retrieval.live.build", *told]
        limited = {name: str(job.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, **limited}
        )
        self.progress = Parts(0.0, 0.0, 0.0)

    def wait(self) -> SegmentFacts | None:
        """What it built. Raises `CollectionError`."""
        output: IO[bytes] | None = self._process.stdout
        assert output is not None
        ended: Told | None = None
        with output:
            for line in output:
                told = msgspec.json.decode(line, type=Told)
                if told.ended:
                    ended = told
                else:
                    self.progress = parts_of(told.stage, told.part)
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

    def __init__(self, seal: Callable[[Build], bool], merge: Callable[[Build], bool], start: bool) -> None:
        self._builders = [Builder(seal, "live-seal"), Builder(merge, "live-merge")]
        if start:
            for builder in self._builders:
                builder.start()

    @property
    def progress(self) -> Parts | None:
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


class Builder:
    """A thread that has segments built whenever they are due.

    rest: waits so many seconds. After a build that failed nothing wakes it sooner: each write would begin another one.
    """

    def __init__(self, due: Callable[[Build], bool], name: str, rest: Callable[[float], object] | None = None) -> None:
        self._wake, self._ended, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._due, self._rest = due, rest or self._ended.wait
        self._process: Process | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    @property
    def progress(self) -> Parts | None:
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

    def _build(self, directory: Path, job: Job) -> SegmentFacts | None:
        with self._lock:
            if self._ended.is_set():
                raise CollectionError("the writer is closed")
            self._process = Process(directory, job)
        try:
            return self._process.wait()
        finally:
            self._process = None
