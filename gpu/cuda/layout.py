"""What the CUDA kernels and the code that launches them agree on: records, arrays, kernels and their shapes.

The kernels' C structs are written from the records below (`gpu.cuda.compiler`), so that the two cannot drift apart.

    arrays in device memory                            in pinned host memory, mapped
    collections  COLLECTION [collections]              results   RESULT + nodes + distances [slots, result_bytes]
    slots        SLOT + prepared query [slots, line_bytes]        progress  PROGRESS
    keys         uint64 [slots, keys_stride]           doorbell  uint32: the host sets it, a launch ends at it
    visited      uint32 [slots, visited_stride]        lines     as slots: what the host asks for them
    nodes        uint32 [slots, slot_tasks]            commands  COMMAND [any], and the lines they name
    distances    float32 [slots, slot_tasks]           rings     uint32 [RINGS, entries]: slots to be searched
    due          uint32 [slots]                        goals     uint32 [slots]: extends that a query may come to
    counters     COUNTERS                              records   RECORD [entries]: slots that left the device
    queue        QUEUE, then uint32 [RINGS, entries]

Between extends a query has its next tasks, the nodes that are to be compared with it, and they are marked as visited:
the seeds when it begins, then new neighbours of the parents that the merge has chosen. One extend of a launch over
`bucket` slots, 0..bucket-1, is two kernels:

    compute_distances   of the nodes of all slots                           a fixed grid
    merge_and_gather    merge_top_m; the next extend's select_parents,      a warp a slot
                        expand_neighbors, mark_visited; results of slots
                        that are done; the last to leave ends the extend

or `extend_fused`, which does several extends of each slot in one block. `write_slots` admits, pauses, resumes and
releases. Every slot that is not ACTIVE is left alone. Or it is `extend_resident`, whose blocks stay and take their next
slots from `rings`; rings, goals, records and queue are that kernel's alone (gpu/kernels/resident.cu). All of them leave
the same state, bit for bit, and can take turns.

Before the first launch: all but `nodes`, `distances`, `keys` and `visited` are zeros. Nothing else needs to be cleared:
a query that begins clears its keys and its visited table.
"""

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu.queries import CODE_STEP as CODE_STEP  # which the kernels have too
from gpu.cpu.queries import code_offset, full_offset, prepared_bytes
from gpu.cpu.state import visited_bits as bits_for
from gpu.cpu.tables import F16_DOT, F16_L2, F32_DOT, F32_L2, I8_DOT, I8_L2, kind_of  # noqa: F401
from gpu.index.data import IndexData
from gpu.index.rows import Rows
from gpu.params import MAX_SEARCH_WIDTH as MAX_SEARCH_WIDTH
from gpu.slots import MAX_COLLECTIONS

# States of a slot.
FREE, ACTIVE, PAUSED, FINISHED = range(4)

CHUNK_BYTES = 16  # what one thread loads at once; rows, queries and slot lines are whole chunks
MERGE_THREADS = 32  # a block of merge_and_gather: one warp, which waits for nobody
DISTANCE_THREADS = 256  # a block of compute_distances
FUSED_THREADS = 512  # a block of extend_fused
RESIDENT_THREADS = 256  # a block of extend_resident, at most; more blocks of fewer have room at once
WRITE_THREADS = 256  # a block of write_slots: a line of 4 KiB comes over the bus in one wait
MERGE_KEYS = 512  # new keys that are sorted and merged at once, at most
RING_PLACES = (8, 4)  # of a thread for chunks of rows under way, where a block serves a slot: the most that have room
SCRATCH_BYTES = 176  # shared memory in front of the arrays, for a block's counts and parents
TEAMS = (8, 16, 32)  # threads a vector
TASK_BITS = 22  # of a word of `due`, which has a slot's tasks if it is active, and its collection's number above them
TASK_MASK = (1 << TASK_BITS) - 1
assert MAX_COLLECTIONS <= 1 << (32 - TASK_BITS)
_USUAL_DEGREE, _USUAL_LINE_BYTES = 64, 8192  # of an engine without indexes, into which some may be loaded later
RESIDENT_VISITED_BITS = 13
"""Of a visited table in the resident form, at most: a block has it in shared memory. What it has no room for it
forgets."""

# An entry of a ring, and what a RECORD says of a slot: the slot in the lowest bits, one bit, and above these the lap,
# the times that the ring has been gone round when the entry was written, from 1 to MAX_LAP and on with 1. So an entry
# is there once it has the lap that is due.
SLOT_BITS = 12
RINGS = 2
PREFILL_RING, DECODE_RING = range(RINGS)
IS_NEW = 1 << SLOT_BITS  # of an entry: the host has a line for the slot, which the device has not
IS_DONE = IS_NEW  # of a record: the query has a result
LAP_SHIFT = SLOT_BITS + 1
MAX_LAP = (1 << (32 - LAP_SHIFT)) - 1
EVERY_DECODE = 8  # of so many entries that are taken, one is decode's if there is one

COLLECTION = np.dtype(
    [
        ("rows", np.uint64),  # addresses; `full` is 0 where rows are exact enough
        ("full", np.uint64),
        ("graph", np.uint64),
        ("seeds", np.uint64),
        ("row_chunks", np.uint32),
        ("full_chunks", np.uint32),
        ("degree", np.uint32),
        ("size", np.uint32),
        ("seed_count", np.uint32),
        ("kind", np.uint32),
        ("query_row", np.uint32),  # offsets into a prepared query, in bytes: what rows are compared with,
        ("query_full", np.uint32),  # and what full rows are
    ]
)
"""A collection, 64 bytes: rows and full [size, their chunks], graph uint32 [size, degree], seeds uint32."""

SLOT = np.dtype(
    [
        ("status", np.uint32),  # FREE, ACTIVE, PAUSED; FINISHED is the device's to set
        ("ticket", np.uint32),  # names the query, not 0: appears in its result when that is whole
        ("collection", np.uint32),
        ("k", np.uint32),
        ("top_m", np.uint32),
        ("search_width", np.uint32),
        ("patience", np.uint32),  # 0: none
        ("visited_bits", np.uint32),
        ("extends", np.uint32),  # from here on the device's; 0 at admission
        ("unchanged", np.uint32),
        ("task_count", np.uint32),  # of the next extend; their parents are marked in top_m as having been parents
        ("forgot", np.uint32),  # whether the visited table has forgotten a node: it may come a second time
        ("unused", np.uint32, 4),
    ]
)
"""The head of a slot's line, 64 bytes; the prepared query (gpu.cpu.queries) follows."""

STATUS, TICKET, COLLECTION_NUMBER, K, TOP_M, WIDTH, PATIENCE, VISITED_BITS = range(8)
"""The words of a SLOT that the host writes."""

COUNTERS = np.dtype(
    [
        ("left", np.uint32),  # blocks that have left this extend, or this fused launch
        ("stop", np.uint32),  # reasons to end the launch: slots that are done, a doorbell that rang
        ("extends", np.uint32),  # since the launch began
        ("total_extends", np.uint32),
        ("launches", np.uint32),
    ]
)

RESULT = np.dtype(
    [
        ("ticket", np.uint32),  # SYNC POINT: stored last, with release; everything else of the result is there then
        ("extends", np.uint32),  # that the query took
        ("unused", np.uint32, 14),
    ]
)
"""The head of a slot's result line, 64 bytes, written when the query is done; nodes int32 [max_k] and raw distances
float32 [max_k] follow.

The first k are written, nearest first; -1 and +inf where there are fewer.
"""

PROGRESS = np.dtype(
    [
        ("launches", np.uint32),  # SYNC POINT: launches that have ended, stored last, with release
        ("extends", np.uint32),  # extends that have ended, in all; of a fused launch the most that a slot took
        ("taken", np.uint32),  # entries of both rings that were taken, and
        ("recorded", np.uint32),  # records that were written, when a resident launch ended
        ("unused", np.uint32, 12),
    ]
)

RECORD = np.dtype([("extends", np.uint32), ("slot", np.uint32)])
"""A slot leaves the device: its query is done, or came to its goal, or the launch ends. `slot`, with IS_DONE and the
lap, is stored last, with release: everything of the slot is there then."""

QUEUE = np.dtype(
    [
        ("known", np.uint32, 2),  # entries of each ring that are in the device's copy, which follows
        ("taken", np.uint32, 2),
        ("looked", np.uint32),  # whether a block looks at the host's memory, for all
        ("stop", np.uint32),  # whether blocks are to leave
        ("records", np.uint32),  # that were begun
        ("unused", np.uint32, 9),
    ]
)

COMMAND = np.dtype([("slot", np.uint32), ("status", np.uint32), ("line", np.uint64)])
"""What `write_slots` does to a slot: copy the staged line (line_bytes at a device-visible address), unless 0; then set
the status. One launch holds at most one command a slot."""

IN_PINNED_MEMORY = ("results", "progress", "doorbell", "lines", "rings", "goals", "records")
"""Arrays of the batch that both sides see; the others are the device's alone."""

BATCH = np.dtype(
    [
        ("collections", np.uint64),
        ("slots", np.uint64),
        ("keys", np.uint64),
        ("visited", np.uint64),
        ("nodes", np.uint64),
        ("distances", np.uint64),
        ("due", np.uint64),
        ("counters", np.uint64),
        ("results", np.uint64),
        ("progress", np.uint64),
        ("doorbell", np.uint64),
        ("queue", np.uint64),
        ("lines", np.uint64),
        ("rings", np.uint64),
        ("goals", np.uint64),
        ("records", np.uint64),
        ("line_bytes", np.uint32),
        ("result_bytes", np.uint32),
        ("keys_stride", np.uint32),
        ("visited_stride", np.uint32),
        ("slot_tasks", np.uint32),
        ("max_k", np.uint32),
    ]
)
"""The first argument of every kernel, by value: addresses of all arrays, and their shapes. Never changes."""

_C_ARGUMENTS: dict[type, Any] = {np.uint32: ctypes.c_uint32, np.uint64: ctypes.c_uint64}


class KernelSpec(NamedTuple):
    """A kernel: its name, threads a block, and its arguments after the batch as (name, numpy type)."""

    name: str
    threads: int
    arguments: tuple[tuple[str, type], ...] = ()

    def argument_values(self, **values: int) -> list[Any]:
        """The arguments after the batch, as the kernel declares them."""
        return [_C_ARGUMENTS[kind](values[name]) for name, kind in self.arguments]


WRITE_SLOTS = KernelSpec("write_slots", WRITE_THREADS, (("commands", np.uint64),))
"""Grid: the number of commands. `commands`: the address of COMMAND [grid], visible to the device. Reads collections,
seeds; writes slots, due and, of queries that begin, keys, visited, nodes."""

COMPUTE_DISTANCES = {
    team: KernelSpec(f"compute_distances_{team}", DISTANCE_THREADS, (("slots", np.uint32),)) for team in TEAMS
}
"""Grid: any fixed number of blocks (`distance_blocks`): they share the tasks of the first `slots` slots, the bucket.
The distances are the same for every team and grid. Shared: `distance_shared_bytes`. Reads due, nodes, slots,
collections, rows; writes distances."""

MERGE_AND_GATHER = KernelSpec("merge_and_gather", MERGE_THREADS, (("limit", np.uint32), ("condition", np.uint64)))
"""Grid: bucket. Shared: `BatchShape.merge_shared_bytes`. Reads slots, nodes, distances, keys, visited, collections,
graph, full rows, doorbell; writes slots, keys, visited, nodes, due, results, progress, counters.

The extend is the launch's last one when it was number `limit` of the launch, when a slot is done, or when the doorbell
rang (is not 0). Then progress.launches counts one more; else the loop goes on. `condition`: the handle of the
conditional WHILE node around the two kernels, set to 0 at the end of the launch; 0 where there is none: plain replay
with limit 1.
"""

EXTEND_FUSED = KernelSpec("extend_fused", FUSED_THREADS, (("limit", np.uint32), ("places", np.uint32)))
"""Grid: bucket. Shared: `BatchShape.fused_shared_bytes`; where that is more than the device gives a block, there is no
fused form. Up to `limit` extends of every active slot; a slot stops early when it, or another slot, is done or the
doorbell rang. Counts as one launch. `places`: of a thread, for chunks of rows under way, as in RING_PLACES."""

EXTEND_FUSED_NEAR = KernelSpec("extend_fused_near", FUSED_THREADS, EXTEND_FUSED.arguments)
"""The same, for launches of several extends, with each slot's visited table in its block's shared memory: it is copied
there and back once a launch. Shared: `BatchShape.fused_near_shared_bytes`."""

EXTEND_RESIDENT = KernelSpec(
    "extend_resident", RESIDENT_THREADS, (("entries", np.uint32), ("life_us", np.uint32), ("places", np.uint32))
)
"""Grid: any; a block searches one slot at a time. Shared: `BatchShape.resident_shared_bytes`. `entries`: of a ring, and
of the records. `places`: as of EXTEND_FUSED. Blocks leave, and the launch ends, `life_us` after they began or when
the doorbell has rung; what they search is recorded as it is then."""

KERNELS = (
    WRITE_SLOTS, *COMPUTE_DISTANCES.values(), MERGE_AND_GATHER, EXTEND_FUSED, EXTEND_FUSED_NEAR, EXTEND_RESIDENT,
)  # fmt: skip


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a running batch's arrays: what `BATCH` holds beside the addresses, and what to allocate."""

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
        """The shape of a batch whose queries ask at most this of some indexes."""
        degree = max((data.graph.shape[1] for data in collections), default=_USUAL_DEGREE)
        lines = (prepared_bytes(without_sketch(data.rows)) for data in collections)
        return cls(
            slots=slots,
            max_k=max_k,
            line_bytes=SLOT.itemsize + max(lines, default=_USUAL_LINE_BYTES),
            keys_stride=max_top_m,
            visited_stride=1 << int(visited_bits(max_top_m, degree)),
            slot_tasks=max((max_search_width * degree, *(len(data.seeds) for data in collections))),
        )

    def covers(self, other: "BatchShape") -> bool:
        """Whether queries of a batch of another shape have room in this one."""
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return all(mine >= its for mine, its in zip(ours, theirs, strict=True))

    @property
    def result_bytes(self) -> int:
        """Bytes of a result line, whole cache lines."""
        return RESULT.itemsize + -(-8 * self.max_k // 64) * 64

    def array_bytes(self) -> dict[str, int]:
        """Bytes of each array of the batch by its name in BATCH, but for the collections."""
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
        """Of a ring, and of the records, a power of two: each slot has one at most, and a warp looks at 32."""
        return max(_power_of_two(self.slots), 32)

    @property
    def merge_shared_bytes(self) -> int:
        """A top_m, rounded up so that it can be merged, and the new keys."""
        return SCRATCH_BYTES + 8 * (max(_power_of_two(self.keys_stride), MERGE_KEYS) + MERGE_KEYS)

    def fused_shared_bytes(self, places: int, threads: int = FUSED_THREADS) -> int:
        """What merging needs, with rows under way where new keys are later, and the nodes and distances of tasks."""
        under_way = max(places * CHUNK_BYTES * threads - 8 * MERGE_KEYS, 0)
        return self.merge_shared_bytes + under_way + 8 * self.slot_tasks

    def fused_near_shared_bytes(self, places: int) -> int:
        """That, and a visited table."""
        return self.fused_shared_bytes(places) + 4 * self.visited_stride

    def resident_shared_bytes(self, places: int, threads: int = RESIDENT_THREADS) -> int:
        """As fused, with a visited table of the size that it is in this form."""
        visited = 4 * min(self.visited_stride, 1 << RESIDENT_VISITED_BITS)
        return self.fused_shared_bytes(places, threads) + visited

    def record(self, addresses: dict[str, int]) -> npt.NDArray[Any]:
        """The BATCH, [1], over arrays at these addresses (by their names in BATCH)."""
        record = np.zeros(1, BATCH)
        for name, address in addresses.items():
            record[name] = address
        for name in ("line_bytes", "result_bytes", "keys_stride", "visited_stride", "slot_tasks", "max_k"):
            record[name] = getattr(self, name)
        return record


def without_sketch(rows: Rows) -> Rows:
    """The rows as the kernels read them: without sketches, which pay where a distance is slow to fetch."""
    return Rows(rows.metric, rows.dtype, rows.dim, rows.codes, rows.full, rows.centre, rows.scale, None)


def collection_record(data: IndexData, addresses: dict[str, int]) -> npt.NDArray[Any]:
    """The COLLECTION, [1], of an index whose `rows`, `graph`, `seeds` and, for int8, `full` lie at these addresses.

    They lie as in `IndexData`: rows.codes, graph, seeds and rows.full in C order, each from a multiple of 16 on.
    """
    rows = without_sketch(data.rows)
    record = np.zeros(1, COLLECTION)
    for name, address in addresses.items():
        record[name] = address
    record["row_chunks"] = rows.codes.shape[1] * rows.codes.itemsize // CHUNK_BYTES
    record["full_chunks"] = 0 if rows.full is None else rows.full.shape[1] * 4 // CHUNK_BYTES
    record["size"], record["degree"] = data.graph.shape
    record["seed_count"] = len(data.seeds)
    record["kind"] = kind_of(rows)
    record["query_row"] = code_offset(rows) if rows.dtype == "int8" else full_offset(rows)
    record["query_full"] = full_offset(rows)
    return record


@compiled
def write_head(
    head: Any, ticket: int, collection: int, degree: int, k: int, top_m: int, width: int, patience: int
) -> None:
    """Write a SLOT, uint32 [16], of a query at its admission. `degree` is the collection's; patience 0: none."""
    head[:] = 0
    head[STATUS], head[TICKET], head[COLLECTION_NUMBER], head[K], head[TOP_M] = ACTIVE, ticket, collection, k, top_m
    head[WIDTH], head[PATIENCE], head[VISITED_BITS] = width, patience, visited_bits(top_m, degree)


@compiled
def visited_bits(top_m: int, degree: int) -> Any:
    """Slots of a query's visited table as a power of two: twice the nodes that a search meets, within limits.

    A table that is too small forgets, which costs second distances and changes no result.
    """
    return bits_for(2 * top_m, degree)


def team_of(collections: Sequence[IndexData]) -> int:
    """Threads a vector: as many as leave each a few chunks of the longest row (cuVS: 128, 256 dims of float32)."""
    longest = max((data.rows.codes.shape[1] * data.rows.codes.itemsize for data in collections), default=0)
    return next((team for team in TEAMS[:-1] if longest <= 4 * team * CHUNK_BYTES), TEAMS[-1])


def distance_blocks(shape: BatchShape, bucket: int, team: int, multiprocessors: int) -> int:
    """Blocks of compute_distances for a bucket: enough for all tasks at once, or to fill the device if that is less."""
    most = -(-bucket * shape.slot_tasks * team // DISTANCE_THREADS)
    return max(1, min(most, 4 * multiprocessors))


def distance_shared_bytes(bucket: int) -> int:
    """Sums of the slots' tasks."""
    return SCRATCH_BYTES + 4 * bucket


def argument(record: npt.NDArray[Any]) -> Any:
    """A record [1] as a kernel's argument."""
    return (ctypes.c_uint8 * record.nbytes).from_buffer_copy(record.tobytes())


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
