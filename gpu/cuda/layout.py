"""Memory layout and kernel signatures shared by the CUDA kernels and the host code.

The kernels' C structs are generated from the records below (`gpu.cuda.compiler.c_header`).

    arrays in device memory                            in pinned host memory, mapped
    collections  COLLECTION [collections]              results   RESULT + nodes + distances [slots, result_bytes]
    slots        SLOT + prepared query [slots, line_bytes]        progress  PROGRESS
    keys         uint64 [slots, keys_stride]           doorbell  uint32: set by the host to end a launch
    visited      uint32 [slots, visited_stride]        lines     as slots: staged by the host
    nodes        uint32 [slots, slot_tasks]            commands  COMMAND [any]
    distances    float32 [slots, slot_tasks]           rings     uint32 [RINGS, entries]: slots to search
    due          uint32 [slots]                        goals     uint32 [slots]: a query's limit of extends
    counters     COUNTERS                              records   RECORD [entries]: slots returned to the host
    queue        QUEUE, then uint32 [RINGS, entries]

Between extends, a slot holds its next tasks: nodes to be scored, already marked as visited. These are the seeds for a
new query, then new neighbours of the parents selected by the merge. One extend of a launch over `bucket` slots,
0..bucket-1, is two kernels:

    compute_distances   of the tasks of all slots                           fixed grid
    merge_and_gather    merge_top_m; the next extend's select_parents,      a warp per slot
                        expand_neighbors, mark_visited; results of
                        finished slots; the last block ends the extend

`write_slots` admits, pauses, resumes and releases. Slots that are not ACTIVE are skipped. `extend_resident` is a
persistent kernel, whose blocks take slots from `rings` and make all extends of one; rings, goals, records and queue are
used by that kernel only (gpu/kernels/resident.cu). All forms leave the same state, bit for bit, and are interchangeable
between launches.

Before the first launch, all arrays but `nodes`, `distances`, `keys` and `visited` are zeroed. A new query clears its
keys and its visited table.
"""

import ctypes
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu.queries import QUERY_ROW as QUERY_ROW  # exported to the kernels
from gpu.cpu.state import visited_bits as bits_for
from gpu.cpu.tables import F16_DOT, F16_L2, F32_DOT, F32_L2, kind_of  # noqa: F401
from gpu.index.data import IndexData
from gpu.index.rows import LARGEST_SQUARE as LARGEST_SQUARE
from gpu.params import MAX_SEARCH_WIDTH as MAX_SEARCH_WIDTH
from gpu.slots import MAX_COLLECTIONS
from ipc.native.records import U32, U64, Array, Record, SharedU32, record, record_at

# States of a slot.
FREE, ACTIVE, PAUSED, FINISHED = range(4)

CHUNK_BYTES = 16  # one load of a thread; rows, queries and slot lines are whole chunks
# Threads per block.
MERGE_THREADS = 32  # of merge_and_gather: one warp, which needs no block barriers
DISTANCE_THREADS = 256  # of compute_distances
RESIDENT_THREADS = 256  # of extend_resident, at most; with fewer, more blocks are resident
WRITE_THREADS = 256  # of write_slots: fetches a line of 4 KiB over the bus in one round trip
PREPARE_BYTES = 8 * 32  # shared memory to prepare a query: a float64 for each of at most 32 warps
MERGE_KEYS = 512  # maximum of new keys sorted and merged at once
TEAM = 8  # threads per row
RING_PLACES = (8, 4)  # in-flight row chunks per thread, where a block serves a slot: the first that fits
DISTANCE_PLACES = 8  # the same in compute_distances
SCRATCH_BYTES = 176  # shared memory in front of the arrays, for a block's counts and parents
TASK_BITS = 22  # of a word of `due`: the task count of an active slot, with the collection's number above
TASK_MASK = (1 << TASK_BITS) - 1
assert MAX_COLLECTIONS <= 1 << (32 - TASK_BITS)
RESIDENT_VISITED_BITS = 13
"""Maximum of `visited_bits` in the resident form, whose visited tables are in shared memory; larger searches evict."""

# A ring entry, and the word `slot` of a RECORD: the slot in the lowest bits, flags, and above them the lap, the number
# of the current pass over the ring, from 1 to MAX_LAP, then wrapping to 1. A reader detects a new entry by the expected
# lap.
SLOT_BITS = 12
RINGS = 2
PREFILL_RING, DECODE_RING = range(RINGS)
IS_NEW = 1 << SLOT_BITS  # flag of an entry: the device must fetch the slot's line from the host
IS_IN_PLACE = IS_NEW << 1  # flag of a new entry: of the line only the head, which says where the vector lies
IS_DONE = IS_NEW  # flag of a record: the query has a result
LAP_SHIFT = SLOT_BITS + 2
MAX_LAP = (1 << (32 - LAP_SHIFT)) - 1
EVERY_DECODE = 8  # one in this many entries taken is from the decode ring, if it has any

COLLECTION = np.dtype(
    [
        ("rows", np.uint64),  # addresses
        ("graph", np.uint64),
        ("seeds", np.uint64),
        ("row_chunks", np.uint32),
        ("degree", np.uint32),
        ("size", np.uint32),
        ("seed_count", np.uint32),
        ("kind", np.uint32),
        ("unused", np.uint32),
        ("scale", np.float64),  # how a query is prepared on the device: the rows' scale,
        ("dim", np.uint32),  # the vector's length,
        ("normalised", np.uint32),  # whether it is normalised
    ]
)
"""A collection, 64 bytes: rows [size, chunks], graph uint32 [size, degree], seeds uint32."""


@record
class SlotHead(Record):
    """The head of a slot's line, 64 bytes; the prepared query (gpu.cpu.queries) follows."""

    status: U32  # FREE, ACTIVE, PAUSED; FINISHED is set by the device
    ticket: U32  # non-zero id of the query, written to its result last
    collection: U32
    k: U32
    top_m: U32
    search_width: U32
    patience: U32  # 0: none
    visited_bits: U32
    extends: U32  # from here on written by the device; 0 at admission
    unchanged: U32
    task_count: U32  # of the next extend; their parents are marked as expanded in top_m
    forgot: U32  # whether the visited table has evicted a node, so duplicates are possible
    vector: U64  # address in device memory from which the device prepares the query, written by the host
    unused: Annotated[Array[U32], 2]


SLOT, slot_head_at = SlotHead.dtype, record_at(SlotHead)

COUNTERS = np.dtype(
    [
        ("left", np.uint32),  # blocks that have finished this extend
        ("stop", np.uint32),  # reasons to end the launch: finished slots, a doorbell
        ("extends", np.uint32),  # since the launch began
        ("total_extends", np.uint32),
        ("launches", np.uint32),
    ]
)


@record
class ResultHead(Record):
    """The head of a slot's result line, 64 bytes, written when the query has finished; nodes int32 [max_k] and raw
    distances float32 [max_k] follow.

    The first k are written, nearest first, padded with -1 and +inf.
    """

    ticket: SharedU32  # SYNC POINT: stored last, with release, after the rest of the result
    extends: SharedU32  # that the query took
    invalid: SharedU32  # 1: its vector is not finite or too long, and there is no result
    unused: Annotated[Array[U32], 13]


RESULT, result_head_at = ResultHead.dtype, record_at(ResultHead)


@record
class Progress(Record):
    launches: SharedU32  # SYNC POINT: number of ended launches, stored last, with release
    extends: SharedU32  # total of extends
    taken: SharedU32  # at the end of a resident launch: entries taken from both rings,
    recorded: SharedU32  # and records written
    unused: Annotated[Array[U32], 12]


PROGRESS = Progress.dtype


@record
class SlotRecord(Record):
    """A slot returned to the host: its query has finished or reached its goal, or the launch ends. `slot`, with IS_DONE
    and the lap, is stored last, with release, after the slot's state and result."""

    extends: SharedU32
    slot: SharedU32


RECORD = SlotRecord.dtype

QUEUE = np.dtype(
    [
        ("known", np.uint32, 2),  # entries of each ring in the device's copy, which follows
        ("taken", np.uint32, 2),
        ("polling", np.uint32),  # lock: one block polls the host's memory for all
        ("stop", np.uint32),  # tells blocks to exit
        ("records", np.uint32),  # number of records started
        ("unused", np.uint32, 9),
    ]
)


@record
class Command(Record):
    """A command of `write_slots`: copy the staged line (line_bytes at a device-visible address) unless 0, then set the
    status. With LINE_IN_PLACE added to its address only the line's head is copied, and the query is prepared from the
    vector in device memory. A launch has at most one command per slot."""

    slot: U32
    status: U32
    line: U64


COMMAND = Command.dtype
LINE_IN_PLACE = 1

IN_PINNED_MEMORY = ("results", "progress", "doorbell", "lines", "rings", "goals", "records")
"""Arrays of the batch in pinned memory; the others are in device memory."""

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
"""The first argument of every kernel, by value: addresses and shapes of all arrays. Constant."""

_C_ARGUMENTS: dict[type, Any] = {np.uint32: ctypes.c_uint32, np.uint64: ctypes.c_uint64}


class KernelSpec(NamedTuple):
    """A kernel: name, threads per block, and arguments after the batch as (name, numpy type)."""

    name: str
    threads: int
    arguments: tuple[tuple[str, type], ...] = ()

    def argument_values(self, **values: int) -> list[Any]:
        """Return the arguments after the batch as ctypes values."""
        return [_C_ARGUMENTS[kind](values[name]) for name, kind in self.arguments]


WRITE_SLOTS = KernelSpec("write_slots", WRITE_THREADS, (("commands", np.uint64),))
"""Grid: the number of commands. Shared: PREPARE_BYTES. `commands`: the device address of COMMAND [grid]. Reads
collections, seeds, vectors in place; writes slots, due and, for new queries, keys, visited, nodes; for queries with
invalid vectors, results and counters."""

COMPUTE_DISTANCES = KernelSpec("compute_distances", DISTANCE_THREADS, (("slots", np.uint32),))
"""Grid: any fixed number of blocks (`distance_blocks`), which share the tasks of the first `slots` slots, the bucket.
Distances do not depend on the grid. Shared: `distance_shared_bytes`. Reads due, nodes, slots,
collections, rows; writes distances."""

MERGE_AND_GATHER = KernelSpec("merge_and_gather", MERGE_THREADS, (("limit", np.uint32), ("condition", np.uint64)))
"""Grid: bucket. Shared: `BatchShape.merge_shared_bytes`. Reads slots, nodes, distances, keys, visited, collections,
graph, doorbell; writes slots, keys, visited, nodes, due, results, progress, counters.

An extend ends the launch when it is number `limit`, when a slot has finished, or when the doorbell is not 0. Then
progress.launches is incremented; else the loop continues. `condition`: the handle of the conditional WHILE node around
the two kernels, set to 0 at the end of the launch; 0 without a loop: plain replay with limit 1.
"""

EXTEND_RESIDENT = KernelSpec(
    "extend_resident", RESIDENT_THREADS, (("entries", np.uint32), ("life_us", np.uint32), ("places", np.uint32))
)
"""Grid: any; a block searches one slot at a time. Shared: `BatchShape.resident_shared_bytes`. `entries`: of a ring, and
of the records. `places`: in-flight row chunks per thread, from RING_PLACES. Blocks exit, and the launch ends, `life_us`
after their start or when the doorbell rings; slots in progress are recorded in their current state."""

KERNELS = (
    WRITE_SLOTS, COMPUTE_DISTANCES, MERGE_AND_GATHER, EXTEND_RESIDENT,
)  # fmt: skip


def collection_record(data: IndexData, addresses: dict[str, int]) -> npt.NDArray[Any]:
    """Return the COLLECTION, [1], of an index with these arrays, by their names in COLLECTION, at these addresses.

    Arrays are those of `device_arrays`, in C order, aligned to 16 bytes.
    """
    rows = data.rows
    record = np.zeros(1, COLLECTION)
    for name, address in addresses.items():
        record[name] = address
    record["row_chunks"] = rows.codes.shape[1] * rows.codes.itemsize // CHUNK_BYTES
    record["size"], record["degree"] = data.graph.shape
    record["seed_count"] = len(data.seeds)
    record["kind"] = kind_of(rows)
    record["scale"] = rows.scale if rows.metric == "l2" else 1.0
    record["dim"], record["normalised"] = rows.dim, rows.metric == "cosine"
    return record


@compiled
def write_head(
    head: SlotHead, ticket: int, collection: int, degree: int, k: int, top_m: int, width: int, patience: int
) -> None:
    """Write the head of a new query's line. degree: of the collection. patience: 0 for none."""
    head.status, head.ticket, head.collection, head.k, head.top_m = ACTIVE, ticket, collection, k, top_m
    head.search_width, head.patience, head.visited_bits = width, patience, visited_bits(top_m, degree)
    head.extends = head.unchanged = head.task_count = head.forgot = head.vector = 0


@compiled
def visited_bits(top_m: int, degree: int) -> Any:
    """Return log2 of a visited table's size: twice the nodes that a search visits, clamped.

    A table that is too small evicts nodes, which costs repeated distances but does not change results.
    """
    return bits_for(2 * top_m, degree)


def argument(record: npt.NDArray[Any]) -> Any:
    """Convert a record [1] to a kernel's argument."""
    return (ctypes.c_uint8 * record.nbytes).from_buffer_copy(record.tobytes())
