"""Statistics of a collection's writer."""

from pathlib import Path
from typing import NamedTuple

from runtime.retrieval.collections.log import log_files
from runtime.retrieval.collections.state import State


class WriterState(NamedTuple):
    """Statistics of a writer.

    documents: not deleted. growing: rows in the log. tombstones: deleted rows in segments. sealed, merged: segments
    built since the writer was opened, from the log and from other segments. build: progress of the running build, as
    `build.SegmentProgress`.
    """

    documents: int
    segments: int
    growing: int
    tombstones: int
    log_bytes: int
    sealed: int
    merged: int
    build: tuple[float, float, float] | None


def writer_state(
    directory: Path, state: State, sealed: int, merged: int, build: tuple[float, float, float] | None
) -> WriterState:
    """Compute the statistics of a collection's writer."""
    with state.lock:
        deleted = sum(segment.size - segment.count for segment in state.segments)
        segments, growing, documents = len(state.segments), state.growing.size, state.count
    size = sum(path.stat().st_size for _, path in log_files(directory) if path.exists())
    return WriterState(documents, segments, growing, deleted, size, sealed, merged, build)
