"""Whole queries, run to completion: the running batch of the engine, refilled without leaving compiled code."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from gpu import rows
from gpu.cpu import stages
from gpu.cpu.state import BatchState
from gpu.index_data import IndexData
from gpu.params import SearchParams

_INTERLEAVED = 8  # slots that take turns: enough to hide memory behind work, few enough for the second-level cache
_BLOCK = 1024  # queries prepared at a time


@stages.compiled
def run_queries(batch, line, prepared, query_scales, nodes, raw):  # type: ignore[no-untyped-def]
    """Answer prepared queries (their addresses) with the slots of `batch`; `line` holds the parameters they share."""
    slots, queries, scales = batch.slots, batch.queries, batch.scales
    count, width = len(prepared), len(slots)
    active = np.empty(width, np.int32)
    owner = np.empty(width, np.int64)
    running = min(width, count)
    admitted = running
    for slot in range(running):
        active[slot] = slot
        owner[slot] = slot
        slots[slot] = line
        queries[slot] = prepared[slot]
        scales[slot] = query_scales[slot]
        stages.reset_slot(batch, slot)
    while running > 0:
        done = stages.extend(batch, active[:running])
        for i in range(done):
            slot = batch.finished[i]
            stages.write_result(batch, slot, nodes[owner[slot]], raw[owner[slot]])
            if admitted < count:
                owner[slot] = admitted
                queries[slot] = prepared[admitted]
                scales[slot] = query_scales[admitted]
                stages.reset_slot(batch, slot)
                admitted += 1
            else:
                position = 0
                while active[position] != slot:
                    position += 1
                running -= 1
                active[position] = active[running]


def search(
    data: IndexData, queries: rows.FloatArray, params: SearchParams, threads: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Nodes int64 [q, k] and distances float32 [q, k] of checked queries, on `threads` threads."""
    nodes = np.empty((len(queries), params.k), np.int64)
    raw = np.empty((len(queries), params.k), np.float32)
    parts = [part for part in np.array_split(np.arange(len(queries)), threads) if len(part)]
    if len(parts) <= 1:
        _search_part(data, queries, params, nodes, raw)
    else:
        with ThreadPoolExecutor(len(parts)) as pool:
            jobs = [
                pool.submit(_search_part, data, queries[cut], params, nodes[cut], raw[cut])
                for cut in (slice(int(part[0]), int(part[-1]) + 1) for part in parts)
            ]
            for job in jobs:
                job.result()
    return nodes, rows.true_distances(raw, data.rows)


def _search_part(
    data: IndexData,
    queries: rows.FloatArray,
    params: SearchParams,
    nodes: npt.NDArray[np.int64],
    raw: npt.NDArray[np.float32],
) -> None:
    state = BatchState([data], _INTERLEAVED, params.top_m, params.search_width)
    state.set_params(0, 0, params)
    line = state.batch.slots[0].copy()
    prepared = np.zeros((min(_BLOCK, len(queries)), rows.query_bytes(data.rows.dim, data.rows.dtype)), np.uint8)
    scales = np.zeros(len(prepared), np.float32)
    addresses = prepared.ctypes.data + np.arange(len(prepared), dtype=np.int64) * prepared.strides[0]
    for begin in range(0, len(queries), _BLOCK):
        block = slice(begin, min(begin + _BLOCK, len(queries)))
        count = block.stop - begin
        rows.prepare(queries[block], data.rows, prepared[:count], scales[:count])
        run_queries(state.batch, line, addresses[:count], scales[:count], nodes[block], raw[block])
