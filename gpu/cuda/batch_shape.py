"""Sizes of a running batch's arrays, and of its launches."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.cpu.queries import prepared_bytes
from gpu.cuda.layout import (
    BATCH,
    CHUNK_BYTES,
    COUNTERS,
    DISTANCE_PLACES,
    DISTANCE_THREADS,
    MERGE_KEYS,
    PROGRESS,
    QUEUE,
    RECORD,
    RESIDENT_THREADS,
    RESIDENT_VISITED_BITS,
    RESULT,
    RINGS,
    SCRATCH_BYTES,
    SLOT,
    TEAM,
    visited_bits,
)
from gpu.index.data import IndexData

_USUAL_DEGREE, _USUAL_LINE_BYTES = 64, 8192  # for an engine opened without indexes


@dataclass(frozen=True)
class BatchShape:
    """Array sizes of a running batch: the shapes in `BATCH`, and the bytes to allocate."""

    slots: int
    max_k: int
    line_bytes: int
    keys_stride: int
    visited_stride: int
    slot_tasks: int

    @classmethod
    def of(
        cls, collections: Sequence[IndexData], slots: int, max_top_m: int, max_k: int, max_search_width: int
    ) -> "BatchShape":
        """Return the shape of a batch over some indexes with these limits of a query's parameters."""
        degree = max((data.graph.shape[1] for data in collections), default=_USUAL_DEGREE)
        lines = (prepared_bytes(data.rows) for data in collections)
        return cls(
            slots=slots,
            max_k=max_k,
            line_bytes=SLOT.itemsize + max(lines, default=_USUAL_LINE_BYTES),
            keys_stride=max_top_m,
            visited_stride=1 << int(visited_bits(max_top_m, degree)),
            slot_tasks=max((max_search_width * degree, *(len(data.seeds) for data in collections))),
        )

    def covers(self, other: "BatchShape") -> bool:
        """Return whether every size is at least that of another shape."""
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return all(mine >= its for mine, its in zip(ours, theirs, strict=True))

    @property
    def result_bytes(self) -> int:
        """Bytes of a result line, a multiple of a cache line."""
        return RESULT.itemsize + -(-8 * self.max_k // 64) * 64

    def array_bytes(self) -> dict[str, int]:
        """Return the bytes of each array by its name in BATCH, without the collections."""
        return {
            "slots": self.slots * self.line_bytes,
            "keys": self.slots * self.keys_stride * 8,
            "visited": self.slots * self.visited_stride * 4,
            "nodes": self.slots * self.slot_tasks * 4,
            "distances": self.slots * self.slot_tasks * 4,
            "due": self.slots * 4,
            "counters": COUNTERS.itemsize,
            "results": self.slots * self.result_bytes,
            "progress": PROGRESS.itemsize,
            "doorbell": 64,
            "queue": QUEUE.itemsize + 4 * RINGS * self.entries,
            "lines": self.slots * self.line_bytes,
            "rings": 4 * RINGS * self.entries,
            "goals": 4 * self.slots,
            "records": RECORD.itemsize * self.entries,
        }

    @property
    def entries(self) -> int:
        """Entries of a ring and of the records: a power of two, at least the slots, and 32, which a warp reads."""
        return max(_power_of_two(self.slots), 32)

    @property
    def merge_shared_bytes(self) -> int:
        """Shared memory for a top_m, padded for merging, and the new keys, in bytes."""
        return SCRATCH_BYTES + 8 * (max(_power_of_two(self.keys_stride), MERGE_KEYS) + MERGE_KEYS)

    def block_shared_bytes(self, places: int, threads: int = RESIDENT_THREADS) -> int:
        """Return merge_shared_bytes plus in-flight rows, which overlap the new keys, and tasks with distances."""
        in_flight = max(places * CHUNK_BYTES * threads - 8 * MERGE_KEYS, 0)
        return self.merge_shared_bytes + in_flight + 8 * self.slot_tasks

    def resident_shared_bytes(self, places: int, threads: int = RESIDENT_THREADS) -> int:
        """Return block_shared_bytes plus a visited table of the resident form's size."""
        visited = 4 * min(self.visited_stride, 1 << RESIDENT_VISITED_BITS)
        return self.block_shared_bytes(places, threads) + visited

    def record(self, addresses: dict[str, int]) -> npt.NDArray[Any]:
        """Return the BATCH, [1], of arrays at these addresses (by their names in BATCH)."""
        record = np.zeros(1, BATCH)
        for name, address in addresses.items():
            record[name] = address
        for name in ("line_bytes", "result_bytes", "keys_stride", "visited_stride", "slot_tasks", "max_k"):
            record[name] = getattr(self, name)
        return record


def distance_blocks(shape: BatchShape, bucket: int, multiprocessors: int) -> int:
    """Return the blocks of compute_distances: enough for all tasks of a bucket at once, or to fill the device."""
    most = -(-bucket * shape.slot_tasks * TEAM // DISTANCE_THREADS)
    return max(1, min(most, 4 * multiprocessors))


def distance_shared_bytes(bucket: int) -> int:
    """Return the shared memory of compute_distances, in bytes: prefix sums of the slots' tasks, and per thread a node
    and chunks of rows in flight."""
    return SCRATCH_BYTES + 4 * -(-bucket // 4) * 4 + DISTANCE_THREADS * (4 + DISTANCE_PLACES * CHUNK_BYTES)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
