"""Sealing and merging of a collection's segments, in the caller's thread or in niced background processes.

A merge takes `MERGE_FAN_IN` segments of similar size, so a document is rewritten only each time its segment grows by
that factor. A segment with too many deleted rows is rewritten alone. The manifest names what was built in place of its
sources, in one step.

Also the process of a build: `python -m …maintenance DIRECTORY JOB WRITER_PID`.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from gpu.build.params import Progress, no_progress
from runtime.errors import CollectionError, TrinityError
from runtime.node.worker import die_with_parent
from runtime.retrieval.collections import segment_build
from runtime.retrieval.collections.description import (
    MANIFEST,
    Manifest,
    SegmentInfo,
    encode_with_checksum,
    tombstones_content,
)
from runtime.retrieval.collections.disk import Disk, storage_errors
from runtime.retrieval.collections.group_commit import GroupCommit
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.collections.segment_build import BuildJob, obsolete_files
from runtime.retrieval.collections.state import Loaded, State, close
from runtime.retrieval.fair_threads import start_thread

MERGE_FAN_IN = 4
MAX_DELETED_SHARE = 0.25  # of a segment's rows, before it is rewritten
RETRY_S = 10.0
NICENESS = 10
_KILL_S = 0.01
MAX_SEGMENTS_PER_SHARD = 32
"""More than arise while merges keep up. At this limit sealing waits for a merge, since search engines have room
only for this many indexes of a shard."""
_log = logging.getLogger(__name__)

BuildSegment = Callable[[Path, BuildJob], SegmentInfo | None]
"""Builds a segment of the collection in a directory; None if all of its rows are deleted."""


class Maintenance:
    """Seals and merges of a writer's collection, at most one of each at once. Raises `CollectionError`, `NoRoom`.

    seal_rows: growing rows of a shard that are sealed into a segment. threads: cores for a build.
    building: the numbers of the segments that are being built. sealed, merged: how often each was done.
    """

    def __init__(
        self, disk: Disk, state: State, commits: GroupCommit, manifest: Manifest, seal_rows: int, threads: int
    ) -> None:
        """Remove what earlier builds left."""
        self._disk, self._state, self._commits, self._manifest = disk, state, commits, manifest
        self._seal_rows, self._threads, self._ended = seal_rows, threads, threading.Event()
        self.seal_threshold = seal_rows * state.description.shards  # growing rows
        self._generation, self._next_segment = manifest.generation, manifest.next_segment
        self.building: set[int] = set()
        self.sealed = self.merged = 0
        self.sealing, self.merging = threading.RLock(), threading.RLock()
        self._builders: list[tuple[threading.Thread, threading.Event]] = []  # with what wakes each
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._remove_obsolete_files()

    def start(self, pause: Callable[[float], object] | None = None) -> None:
        """Build segments in background processes whenever they are due: a thread seals and a thread merges, so that
        sealing does not wait for a long merge.

        pause: waits some seconds after a failed build; `wake` does not shorten it, or each write would retry the build.
        Raises `Overloaded` if the system permits no more threads.
        """
        for name, if_due in (("seal", self.seal_if_due), ("merge", self.merge_if_due)):
            wake = threading.Event()
            self._builders.append((start_thread(self._run, name, if_due, wake, pause or self._ended.wait), wake))

    def wake(self) -> None:
        """Let the threads check whether a build is due."""
        for _, wake in self._builders:
            wake.set()

    def flush(self) -> None:
        """Seal all growing rows, and wait for it; merge first only if a shard has too many segments."""
        while too_many_segments(self._state.segments) and self.merge_if_due(self.build_here):
            pass
        self._seal(self.build_here, 1)

    def compact(self, progress: Progress) -> None:
        """Rewrite each shard, with its growing rows, into one segment without deleted rows, and wait for it.

        progress: called with the stage of a build, and the fraction of it that is done.
        """
        with self.merging, self.sealing:
            build = partial(self.build_here, progress=progress)
            if self._state.growing.size:
                self._rewrite((), build)
            for shard in range(self._state.description.shards):  # in turn: there need be room for one's files only
                own = [segment for segment in self._state.segments if segment.info.shard == shard]
                if len(own) > 1 or any(one.count < one.size or one.lacks_keywords for one in own):
                    self._rewrite(own, build)

    def seal_if_due(self, build: BuildSegment) -> bool:
        """Seal the growing rows into segments by `build`, if there are enough; return whether there were."""
        return self._seal(build, self.seal_threshold)

    def merge_if_due(self, build: BuildSegment) -> bool:
        """Merge segments by `build`, if a merge is due; return whether one was."""
        with self.merging:
            if not (segments := pick_merge(self._state.segments, self._seal_rows)):
                return False
            self._rewrite(segments, build)
        self.wake()  # a seal may have waited for the merge
        return True

    def build_here(self, directory: Path, job: BuildJob, progress: Progress = no_progress) -> SegmentInfo | None:
        """Build a segment in the caller's thread: a `BuildSegment`."""
        return segment_build.build(self._disk, self._state, job, progress)

    def close(self) -> None:
        """Stop the background builds, and wait for others. Idempotent."""
        self._ended.set()
        self.wake()
        for builder, _ in self._builders:
            while builder.is_alive():
                for process in list(self._processes):  # one may just be started
                    process.kill()
                builder.join(_KILL_S)
        with self.merging, self.sealing:
            pass

    def _seal(self, build: BuildSegment, at_least: int) -> bool:
        """Seal the growing rows if there are so many, and no shard has too many segments; return whether it did."""
        with self.sealing:
            if self._state.growing.size < at_least or too_many_segments(self._state.segments):
                return False
            self._rewrite((), build)
        self.wake()  # a merge may be due now
        return True

    def _rewrite(self, merged: Sequence[Segment], build: BuildSegment) -> None:
        """Build a segment from some of a shard, or if none are given one of each shard from the growing rows; then
        install what was built."""
        numbers, shards = [one.info.number for one in merged], sorted({one.info.shard for one in merged})
        with self._commits.lock:
            self._commits.check_directory()
            until = next_row = 0
            if not merged:
                self._commits.rotate()
                until, next_row = self._state.sequence, self._state.growing.next_row
            jobs = [
                BuildJob(number, next_row, numbers, self._threads, shard)
                for number, shard in enumerate(shards or range(self._state.description.shards), self._next_segment)
            ]
            self._next_segment += len(jobs)
            self.building |= {job.number for job in jobs}
        try:
            try:
                built = [info for job in jobs if (info := build(self._state.directory, job)) is not None]
            except BaseException:  # it is retried: what was built must not fill the disk
                self._remove_built(jobs)
                raise
            fresh = self._state.open_segments(built)
            try:
                self._install(numbers, until, next_row, fresh)
            except BaseException:
                close(list(fresh.values()))
                raise
        finally:
            self.building.difference_update(job.number for job in jobs)
        self.sealed += not merged
        self.merged += bool(merged)
        self._remove_obsolete_files()

    def _install(self, merged: Collection[int], until: int, next_row: int, fresh: Loaded) -> None:
        path = self._state.directory / MANIFEST
        with self._commits.lock:
            self._commits.check_directory()
            before = self._manifest  # other builds may have been installed since this one began
            self._generation += 1
            manifest = Manifest(
                generation=self._generation,
                segments=[one for one in before.segments if one.number not in merged] + list(fresh),
                sequence=max(before.sequence, until),
                next_row=max(before.next_row, next_row),
                next_segment=self._next_segment,
                schema=dict(self._state.schema),
            )
            dead = self._state.dead_rows_in(manifest, fresh)
            with storage_errors(f"{path} cannot be written"):
                if len(dead):
                    content, tombstones = tombstones_content(dead)
                    self._disk.write_file(manifest.tombstones_path(path.parent), content)
                    manifest = msgspec.structs.replace(manifest, tombstones=tombstones)
                self._disk.write_file(path, encode_with_checksum(manifest))
            self._state.advance(manifest, fresh)
            self._manifest = manifest

    def _remove_built(self, jobs: Sequence[BuildJob]) -> None:
        """Remove the segments of jobs that no manifest has named."""
        with self._commits.lock, suppress(CollectionError):
            self._commits.check_directory()  # else they may be another collection's
            for job in jobs:
                self._disk.remove(self._state.directory / "segments" / str(job.number))

    def _remove_obsolete_files(self) -> None:
        with self._commits.lock:  # so that no build begins or is installed in the meantime
            obsolete = obsolete_files(self._state.directory, self._manifest, self.building)
        for path in obsolete:
            self._disk.remove(path)

    # ---- the background

    def _run(
        self, if_due: Callable[[BuildSegment], bool], wake: threading.Event, pause: Callable[[float], object]
    ) -> None:
        while not self._ended.is_set():
            try:
                while not self._ended.is_set() and if_due(self._build_in_process):
                    pass
                wake.wait()
            except CollectionError as error:
                if not self._ended.is_set():
                    _log.warning("a segment could not be built: %s; retrying in %g s", error.message, RETRY_S)
                pause(RETRY_S)
            wake.clear()

    def _build_in_process(self, directory: Path, job: BuildJob) -> SegmentInfo | None:
        """Build a segment in a process of low priority: a `BuildSegment`."""
        arguments = (str(directory), msgspec.json.encode(job).decode(), str(os.getpid()))
        command = [sys.executable, "-m", "runtime.retrieval.collections.maintenance", *arguments]
        limited = {name: str(job.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, **limited}
            )
        except OSError as error:  # no process or memory left: the thread must go on, and try again
            raise CollectionError(f"no process can be started to build it: {error.strerror}") from error
        self._processes.add(process)
        output, _ = process.communicate()
        self._processes.discard(process)
        if process.returncode:
            raise CollectionError(f"the process that builds a segment exited with status {process.returncode}")
        built = msgspec.json.decode(output, type=SegmentInfo | str | None)
        if isinstance(built, str):
            raise CollectionError(built)
        return built


def pick_merge(segments: Sequence[Segment], seal_rows: int) -> list[Segment]:
    """Return the segments of one shard to merge; empty if no merge is due.

    A full tier takes precedence over a segment with many deleted rows: otherwise a writer that seals as fast as one
    segment is rewritten would accumulate segments.
    """
    tiers: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        tier, limit = 0, MERGE_FAN_IN * seal_rows
        while segment.count >= limit:
            tier, limit = tier + 1, limit * MERGE_FAN_IN
        tiers[tier, segment.info.shard].append(segment)
    full = [own for _, own in sorted(tiers.items(), key=lambda one: one[0]) if len(own) >= MERGE_FAN_IN]
    sparse = [one for one in segments if one.count < (1 - MAX_DELETED_SHARE) * one.size]
    return full[0] if full else sparse[:1]


def too_many_segments(segments: Sequence[Segment]) -> bool:
    """Return whether a shard has `MAX_SEGMENTS_PER_SHARD`, so that a merge must precede the next seal."""
    return max(Counter(segment.info.shard for segment in segments).values(), default=0) >= MAX_SEGMENTS_PER_SHARD


def main(directory: Path, job: BuildJob, writer_pid: int) -> None:
    """Build, and write the segment or the error as JSON. Dies with the writer, since another one may open the
    collection then."""
    die_with_parent(writer_pid, signal.SIGKILL)
    os.nice(NICENESS)
    try:
        with CollectionReader(directory) as reader:
            built: SegmentInfo | str | None = segment_build.build(Disk(), reader.state, job)
    except TrinityError as error:
        built = error.message
    sys.stdout.buffer.write(msgspec.json.encode(built))


if __name__ == "__main__":
    main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=BuildJob), int(sys.argv[3]))
