"""What a live collection's writer tells of it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime.retrieval.live.log import log_files
from runtime.retrieval.live.state import State


class WriterState(NamedTuple):
    """What a writer has. documents: that are there; growing: rows of the log; tombstones: deleted rows of segments.
    sealed, merged: segments built since it was opened, from the log and from others; building: one is."""

    documents: int
    segments: int
    growing: int
    tombstones: int
    log_bytes: int
    sealed: int
    merged: int
    building: bool


def state_of(directory: Path, state: State, sealed: int, merged: int, building: bool) -> WriterState:
    """Of a collection as its writer has it."""
    with state.lock:
        deleted = sum(int(segment.size - np.count_nonzero(segment.alive)) for segment in state.segments)
        segments, growing, documents = len(state.segments), state.growing.count, state.count
    size = sum(path.stat().st_size for _, path in log_files(directory) if path.exists())
    return WriterState(documents, segments, growing, deleted, size, sealed, merged, building)
