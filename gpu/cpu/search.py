"""Batch search: queries run to completion on the engine's running batch, refilled inside compiled code."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled, counted
from gpu.cpu.extend.results import write_result
from gpu.cpu.extend.stages import extend
from gpu.cpu.queries import prepare, prepared_bytes, query_encoding
from gpu.cpu.running_batch import INTERLEAVED, reset_slot
from gpu.cpu.state import BatchState
from gpu.cpu.tables import Batch, BatchHandle, batch_at, slot_at
from gpu.errors import InvalidVector
from gpu.index.data import IndexData
from gpu.index.rows import aligned_empty
from gpu.params import SearchParams
from ipc.native.records import address_of

_BLOCK = 1024  # queries prepared together


@compiled
def begin(
    batch: Batch,
    slot: int,
    number: int,
    owner: npt.NDArray[np.int64],
    prepared: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    allowed: int,
    allowed_count: int,
    min_allowed: int,
) -> None:
    """Start a query in a slot whose parameters are set."""
    search = batch.slots[slot]
    owner[slot] = number
    search.query, search.start = prepared[number].ctypes.data, starts[number]
    reset_slot(batch, slot)
    search.allowed, search.allowed_count, search.min_allowed = allowed, allowed_count, min_allowed


@counted
def run_queries(
    handle: BatchHandle,
    address: int,
    allowed: int,
    allowed_count: int,
    min_allowed: int,
    prepared: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    nodes: npt.NDArray[np.int64],
    distances: npt.NDArray[np.float32],
) -> None:
    """Run prepared queries, uint8 [q, …], to completion in the slots of the batch that `handle` describes.

    address: of a slot with the parameters of all queries. allowed: the address of a bitmap of nodes, or 0.
    allowed_count, min_allowed: see `Slot`. starts: the start node of each query, or -1 for the seeds.
    """
    batch = batch_at(handle)
    slots, active, parameters = batch.slots, batch.active, slot_at(address)
    count, width = len(prepared), len(active)
    owner = np.empty(width, np.int64)
    running = admitted = min(width, count)
    for slot in range(running):
        active[slot] = slot
        search = slots[slot]
        search.collection, search.k, search.top_m = parameters.collection, parameters.k, parameters.top_m
        search.width, search.patience, search.visited_bits = (
            parameters.width,
            parameters.patience,
            parameters.visited_bits,
        )
        begin(batch, slot, slot, owner, prepared, starts, allowed, allowed_count, min_allowed)
    while running > 0:
        done = extend(handle, active[:running], batch.finished)
        for i in range(done):
            slot = batch.finished[i]
            write_result(batch, slot, nodes[owner[slot]], distances[owner[slot]])
            if admitted < count:
                begin(batch, slot, admitted, owner, prepared, starts, allowed, allowed_count, min_allowed)
                admitted += 1
            else:
                position = 0
                while active[position] != slot:
                    position += 1
                running -= 1
                active[position] = active[running]


def search(
    data: IndexData,
    queries: npt.ArrayLike,
    params: SearchParams,
    threads: int,
    starts: npt.NDArray[np.int64] | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
    allowed: npt.NDArray[np.uint64] | None = None,
    min_allowed: int = 0,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return nodes int64 [q, k] and distances float32 [q, k], using `threads` threads. Raises InvalidVector.

    starts: start nodes of the searches, int64 [q], instead of the seeds.
    allowed: the bitmap (`gpu.index.data.bitmap`) of the nodes that may be results; the search traverses all nodes.
    min_allowed: stop once this many allowed entries precede the next parent in top_m, and scan the allowed nodes if too
        few are found (`gpu.cpu.extend.filtered`); 0: stop when no parent is left.
    """
    array = np.asarray(queries)
    if array.ndim != 2:
        raise InvalidVector(f"queries have shape {array.shape}; this index needs [q, {data.rows.dim}]")
    begins = np.full(len(array), -1, np.int64) if starts is None else starts
    nodes = np.empty((len(array), params.k), np.int64)
    distances = np.empty((len(array), params.k), np.float32)
    size = max(1, min(_BLOCK, -(-len(array) // threads)))
    blocks = [slice(begin, min(begin + size, len(array))) for begin in range(0, len(array), size)]
    encoding = query_encoding(data.rows, data.codes)
    bits = 0 if allowed is None else allowed.ctypes.data
    count = 0 if allowed is None or not min_allowed else int(np.bitwise_count(allowed).sum())

    def run(part: list[slice]) -> None:
        """Process blocks of queries on one thread."""
        state = BatchState([data], INTERLEAVED, params.top_m, params.search_width)
        parameters = state.parameters(0, params)
        room = aligned_empty((size, prepared_bytes(data.rows, data.codes)), np.uint8)
        for number, block in enumerate(part):
            prepared = room[: block.stop - block.start]
            prepare(array[block], encoding, prepared, block.start)
            run_queries(
                state.handle,
                address_of(parameters),
                bits,
                count,
                min_allowed,
                prepared,
                begins[block],
                nodes[block],
                distances[block],
            )
            progress((number + 1) / len(part))

    parts = [blocks[number::threads] for number in range(min(threads, len(blocks)))]
    if len(parts) > 1:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(run, parts))
    elif parts:
        run(parts[0])
    return nodes, distances
