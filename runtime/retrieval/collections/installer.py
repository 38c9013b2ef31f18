"""Installation of segments that were built: the manifest names them in place of their sources, in one step."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from runtime.retrieval.collections.description import encode_with_checksum
from runtime.retrieval.collections.disk import Disk, storage_error
from runtime.retrieval.collections.group_commit import GroupCommit
from runtime.retrieval.collections.manifest import MANIFEST, Manifest, SegmentInfo, tombstones_content
from runtime.retrieval.collections.segment_build import BuildJob
from runtime.retrieval.collections.segment_files import obsolete_files
from runtime.retrieval.collections.state import Loaded, State, close

BuildSegment = Callable[[Path, BuildJob], SegmentInfo | None]
"""Builds a segment of the collection in a directory; None if all of its rows are deleted."""


class SegmentInstaller:
    """The manifest of a writer's collection. One `seal` and one `merge` may run at once.

    building: the numbers of the segments that are being built. sealed, merged: how often each was done.
    """

    def __init__(self, disk: Disk, state: State, commits: GroupCommit, manifest: Manifest, threads: int) -> None:
        """Remove what earlier builds left."""
        self._disk, self._state, self._commits, self._manifest = disk, state, commits, manifest
        self._threads = threads
        self._generation, self._next_segment = manifest.generation, manifest.next_segment
        self.building: set[int] = set()
        self.sealed = self.merged = 0
        self._remove_obsolete_files()

    def seal(self, build: BuildSegment) -> None:
        """Build segments of the growing rows, one a shard. Raises `CollectionError`, `NoRoom`."""
        with self._commits.lock:
            if not self._state.growing.size:
                return
            self._commits.check_directory()
            self._commits.rotate()
            until, next_row = self._state.sequence, self._state.growing.next_row
            shards = range(self._state.description.shard_count)
            jobs = [BuildJob(self._next_number(), until, next_row, [], self._threads, shard) for shard in shards]
        self._build_and_install(jobs, build)
        self.sealed += 1

    def merge(self, numbers: list[int], build: BuildSegment) -> None:
        """Build a segment of those of one shard that these numbers name. Raises as `seal`."""
        with self._commits.lock:
            self._commits.check_directory()
            shard = next(info.shard for info in self._manifest.segments if info.number == numbers[0])
            job = BuildJob(self._next_number(), 0, 0, numbers, self._threads, shard)
        self._build_and_install([job], build)
        self.merged += 1

    def _next_number(self) -> int:
        self._next_segment += 1
        self.building.add(self._next_segment - 1)
        return self._next_segment - 1

    def _build_and_install(self, jobs: Sequence[BuildJob], build: BuildSegment) -> None:
        try:
            built = [info for job in jobs if (info := build(self._state.directory, job)) is not None]
            fresh = self._state.open_segments(built)
            try:
                self._install(jobs[0], fresh)
            except BaseException:
                close(list(fresh.values()))
                raise
        finally:
            self.building.difference_update(job.number for job in jobs)
        self._remove_obsolete_files()

    def _install(self, job: BuildJob, fresh: Loaded) -> None:
        path = self._state.directory / MANIFEST
        with self._commits.lock:
            self._commits.check_directory()
            before = self._manifest  # other builds may have been installed since this job began
            self._generation += 1
            manifest = Manifest(
                generation=self._generation,
                segments=[one for one in before.segments if one.number not in job.merged] + list(fresh),
                sequence=max(before.sequence, job.until),
                next_row=max(before.next_row, job.next_row),
                next_segment=self._next_segment,
                schema=dict(self._state.schema),
            )
            try:
                dead = self._state.dead_rows_in(manifest, fresh)
                if len(dead):
                    content, tombstones = tombstones_content(dead)
                    self._disk.write_file(manifest.tombstones_path(path.parent), content)
                    manifest = msgspec.structs.replace(manifest, tombstones=tombstones)
                self._disk.write_file(path, encode_with_checksum(manifest))
            except OSError as error:
                raise storage_error(error, f"{path} cannot be written") from error
            self._state.advance(manifest, fresh)
            self._manifest = manifest

    def _remove_obsolete_files(self) -> None:
        with self._commits.lock:  # so that no build begins or is installed in the meantime
            found = obsolete_files(self._state.directory, self._manifest, self.building)
        for path in found:
            self._disk.remove(path)
