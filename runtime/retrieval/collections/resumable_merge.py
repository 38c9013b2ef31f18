"""Checkpoints of a merge, from which the next merge of the same segments resumes after a crash.

    segments/.merging/job.json     the segments that are merged
    segments/.merging/<name>.npy   an array that took long to compute, and its SHA-256

There is one merge at a time; its checkpoints are removed with its segments. An incomplete file is computed again.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.files import open_regular, read_regular
from runtime.retrieval.collections.description import INDEX
from runtime.retrieval.collections.disk import Disk
from runtime.retrieval.collections.log import log_files
from runtime.retrieval.collections.manifest import FLAT_FILES, Manifest, SegmentInfo
from runtime.retrieval.collections.segment_files import building_path, segment_path

MERGING = ".merging"
_JOB, _VERSION = "job.json", 1  # version of the meaning of the arrays
_MAX_BYTES = 1 << 20


class _Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    merged: list[SegmentInfo]


class ResumableMerge:
    """A merge of some segments of the collection at `directory`."""

    def __init__(self, disk: Disk, directory: Path, merged: Sequence[SegmentInfo]) -> None:
        """Resume the merge, or begin it and discard the checkpoints of another one. Raises `OSError`."""
        self._disk, self._path = disk, merging_path(directory)
        job = _Job(_VERSION, list(merged))
        if _job_at(self._path) != job:
            disk.remove(self._path)
            self._path.mkdir(mode=0o700)
            disk.write_file(self._path / _JOB, msgspec.json.encode(job))

    def get_or_compute(self, name: str, compute: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return the checkpoint of this name, or compute and save it. Failures to save are ignored (a full disk)."""
        path = self._path / f"{name}.npy"
        found = _read(path)
        if found is None:
            found = compute()
            self._write(path, found)
        return found

    def _write(self, path: Path, array: NDArray[Any]) -> None:
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.write(_digest(array))
                file.flush()
                self._disk.sync(file.fileno())
            os.rename(part, path)
        except OSError:  # a resumed merge computes it again
            self._disk.remove(part)


def merging_path(directory: Path) -> Path:
    return directory / "segments" / MERGING


def resumable_segments(directory: Path, manifest: Manifest) -> list[int]:
    """Return the numbers of the segments of a merge that can resume; empty if there is none."""
    job = _job_at(merging_path(directory))
    if job is None or not job.merged or any(info not in manifest.segments for info in job.merged):
        return []
    return [info.number for info in job.merged]


def obsolete_files(directory: Path, manifest: Manifest, building: Collection[int], merging: bool) -> list[Path]:
    """Return the files that a manifest does not need: merged segments, sealed log files, leftovers of killed builds.

    Excludes the segments that are being built, by number, and the checkpoints of a merge that can resume or, with
    `merging`, may be running.
    """
    kept = {segment_path(directory, info) for info in manifest.segments}
    for number in building:
        kept |= {directory / "segments" / str(number), building_path(directory, number)}
    kept.add(manifest.tombstones_path(directory))
    if merging or resumable_segments(directory, manifest):
        kept.add(merging_path(directory))
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for folder in ("segments", "tombstones"):
            found += [path for path in (directory / folder).iterdir() if path not in kept]
        found += [path for first, path in log_files(directory) if first < manifest.sequence]
        flat = [*directory.glob(f"{INDEX}*"), *(directory / name for name in FLAT_FILES)]  # before an upgrade
        found += [path for path in flat if path.exists()]
    return found


def _job_at(path: Path) -> _Job | None:
    try:
        job = msgspec.json.decode(read_regular(path / _JOB, _MAX_BYTES), type=_Job)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return job if job.version == _VERSION else None


def _read(path: Path) -> NDArray[Any] | None:
    with contextlib.suppress(OSError, ValueError, EOFError), open(open_regular(path), "rb") as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        if file.read() == _digest(array):
            return array
    return None


def _digest(array: NDArray[Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array).data).digest()
