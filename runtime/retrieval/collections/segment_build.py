"""Segment builds from growing rows or by merging.

Also a process: `python -m …segment_build DIRECTORY JOB WRITER_PID`.
"""

import os
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np

from gpu import GraphIndex
from runtime.errors import CollectionError, TrinityError
from runtime.node.worker import die_with_parent
from runtime.retrieval.collections.checksums import SegmentChecksums
from runtime.retrieval.collections.description import INDEX, SegmentInfo
from runtime.retrieval.collections.disk import Disk
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.segment import sources_of
from runtime.retrieval.collections.segment_files import building_segment, seal_segment, write_documents
from runtime.retrieval.collections.sources import Progress, no_progress
from runtime.retrieval.collections.state import State

NICENESS = 10


class BuildJob(msgspec.Struct, frozen=True):
    """A segment to build, with the rows of one shard.

    Its source is the segments that `merged` names, or else the growing rows before `next_row`, which are those of the
    log's records before `until`; both are 0 then.
    """

    number: int
    until: int
    next_row: int
    merged: list[int]
    threads: int = 1
    shard: int = 0


class BuildResult(msgspec.Struct, frozen=True):
    """The output of the process: the segment, None without rows, or an error."""

    segment: SegmentInfo | None = None
    error: str = ""


def build(disk: Disk, state: State, job: BuildJob, progress: Progress = no_progress) -> SegmentInfo | None:
    """Build a segment; None if all of its rows are deleted. Raises `CollectionError`, `NoRoom`."""
    documents: list[Document] = []
    parts = []
    merged = [segment for segment in state.segments if segment.info.number in job.merged]
    progress("rows", 0.0)
    if job.merged:
        checksums = SegmentChecksums(state.directory)
        checksums.add(merged)
        checksums.verify()  # a damaged segment must not be sealed again under a new checksum
        for number, segment in enumerate(merged, 1):
            positions = np.flatnonzero(segment.snapshot_alive())
            positions = positions[np.argsort(segment.rows[positions])]  # by row, as its documents are
            kept = set(segment.rows[positions].tolist())
            documents += [document for document in segment.documents() if document.row in kept]
            parts.append(segment.vectors(positions))
            progress("rows", number / len(merged))
    else:
        with state.lock:
            growing = state.growing
            if growing.next_row < job.next_row:
                raise CollectionError(f"the log ends before row {job.next_row}")
            alive = np.flatnonzero(growing.alive[: job.next_row - growing.first])
            own = [at for at in alive if state.description.shard_of(growing.documents[at].id) == job.shard]
            positions = np.array(own, np.int64)
            documents = [growing.documents[position] for position in positions]
            parts.append(growing.vectors(positions))
        progress("rows", 1.0)
    if not documents:
        return None
    order = np.argsort([document.row for document in documents], kind="stable")
    documents, vectors = [documents[position] for position in order], np.concatenate(parts)[order]
    about, bits = state.description, code_bits(state)
    with building_segment(disk, state.directory, job.number) as building:
        write_documents(building, documents, dict(state.schema), sources_of(merged))
        index = GraphIndex.build(
            vectors,
            metric=about.metric,  # type: ignore[arg-type]
            degree=about.degree,
            dtype=about.dtype,  # type: ignore[arg-type]
            neighbor_codes=bits is not None,
            code_bits=bits or 0,
            ids=np.array([document.row for document in documents], np.int64),
            threads=job.threads,
            progress=progress,
        )
        progress("write", 0.0)
        index.save(building / INDEX)
        progress("write", 0.5)
        info = seal_segment(disk, building, len(documents), job.shard)
        progress("write", 1.0)
    return info


def code_bits(state: State) -> int | None:
    """Return the bits of the neighbour codes of the largest segment, which were chosen when it was built.

    0: none was built; None: without codes.
    """
    largest = max(state.segments, key=lambda segment: segment.size, default=None)
    if largest is None:
        return 0
    codes = largest.index.data.codes
    return None if codes is None else codes.bits


def main(directory: Path, job: BuildJob, writer_pid: int) -> None:
    """Build, and write the result as JSON. Dies with the writer, since another one may open the collection then."""
    die_with_parent(writer_pid, signal.SIGKILL)
    os.nice(NICENESS)
    try:
        with CollectionReader(directory, searched=False) as reader:
            result = BuildResult(build(Disk(), reader.state, job))
    except TrinityError as error:
        result = BuildResult(error=error.message)
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=BuildJob), int(sys.argv[3]))
