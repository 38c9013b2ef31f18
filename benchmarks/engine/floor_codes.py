"""Roofline of searches with neighbour codes: the bytes and arithmetic of an extend, against its time.

    python -m benchmarks.engine.floor_codes --data DIR [--sets NAME …] [--top-m 20 34 64] [--dtype float32]
        [--keep DIR] [--out benchmarks/results/engine-floor-codes]

An extend of one parent reads its row, its block of codes and its edges once: `bytes`, at the bandwidth of random block
gathers. It sums the row (a multiply-add per component) and looks up B · D' / 4 entries per neighbour: `arithmetic` is
the measured time of both with all data in the caches. The floor of a query is its preparation plus, for each extend,
the larger of the two. The remaining time is insertion into `top_m` and late prefetches. --keep uses indexes built by
`benchmarks.engine --keep`.
One thread, processor time, the minimum over rounds: other load only adds time.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
from numba import njit  # noqa: E402

from benchmarks.common.data import Array, DataSet, data_sets, load  # noqa: E402
from benchmarks.common.machine import machine, machine_load  # noqa: E402
from benchmarks.common.report import table, write  # noqa: E402
from benchmarks.engine.floor import rates  # noqa: E402
from benchmarks.engine.trinity import Trinity  # noqa: E402
from gpu import GraphIndex, SearchParams  # noqa: E402
from gpu.cpu import fast_scan, running_batch  # noqa: E402
from gpu.cpu.extend import stages  # noqa: E402
from gpu.cpu.extend.keys import row_distance  # noqa: E402
from gpu.cpu.queries import QueryEncoding, prepare, prepared_bytes, table_offset  # noqa: E402
from gpu.cpu.state import BatchState  # noqa: E402
from gpu.cpu.tables import EXTENDS, KIND, LANES, QUERY_ROW  # noqa: E402
from gpu.index.data import GROUP, NeighborCodes  # noqa: E402
from gpu.index.rows import aligned_empty  # noqa: E402

_ROUNDS, _COUNTED, _HOT_NODES, _HOT_EXTENDS = 7, 500, 4, 20_000


def extends_of(index: GraphIndex, queries: Array, top_m: int) -> float:
    """Return the mean number of extends per query."""
    state = BatchState([index.data], 1, top_m, 1)
    active, finished = np.zeros(1, np.int32), np.zeros(1, np.int32)
    made = 0
    for query in queries:
        running_batch.admit_query(state.batch, 0, query, *state.line(0, SearchParams(10, top_m, 1)).tolist())
        while not stages.extend(state.handle, active, finished):
            pass
        made += int(state.batch.slots[0, EXTENDS])
    return made / len(queries)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _arithmetic(
    count: int, rows: Any, row_bytes: int, blocks: Any, block_bytes: int, degree: int, dims: int, bits: int, kind: int,
    lanes: int, query: Any, table: Any, out: Any,
) -> Any:  # fmt: skip
    """Score `count` parents and estimate their neighbours, over a few nodes that stay in the caches."""
    total = np.float32(0)
    for number in range(count):
        node = np.uint64(number % _HOT_NODES)
        distance = row_distance(kind, rows + node * np.uint64(row_bytes), query, lanes, np.float32(1))
        block = blocks + node * np.uint64(block_bytes)
        for _ in range(0, degree, GROUP):
            fast_scan.estimate(block, table, dims, bits, distance, np.float32(1), np.float32(0), out)
            block += np.uint64(4 * dims * bits + 8 * GROUP)
        total += distance
    return total


def arithmetic_s(index: GraphIndex, prepared: Array) -> float:
    """Return the seconds of an extend of one parent with its data in the caches."""
    data, codes = index.data, _codes(index)
    about = BatchState([data], 1, 8, 1).batch.collections[0]
    out, query = np.zeros(GROUP, np.float32), prepared.ctypes.data
    arguments = (
        np.uint64(data.rows.codes.ctypes.data), data.rows.codes.strides[0], np.uint64(codes.blocks.ctypes.data),
        codes.blocks.shape[1], index.degree, codes.dims, codes.bits, about[KIND], about[LANES],
        np.uint64(query + about[QUERY_ROW]), np.uint64(query + table_offset(data.rows)), np.uint64(out.ctypes.data),
    )  # fmt: skip
    _arithmetic(8, *arguments)
    took = []
    for _ in range(_ROUNDS):
        begin = time.process_time()
        _arithmetic(_HOT_EXTENDS, *arguments)
        took.append(time.process_time() - begin)
    return min(took) / _HOT_EXTENDS


def _codes(index: GraphIndex) -> NeighborCodes:
    assert index.data.codes is not None, "the index has no neighbour codes"
    return index.data.codes


def measure(data: DataSet, index: GraphIndex, lists: list[int]) -> list[dict[str, Any]]:
    """Return a record for each top_m."""
    rows, codes = index.data.rows, _codes(index)
    size = rows.codes.strides[0] + codes.blocks.shape[1] + 4 * index.degree
    encoding, width = QueryEncoding(rows, codes), prepared_bytes(rows, codes)
    prepared = aligned_empty((len(data.queries), width), np.uint8)
    prepare(data.queries, encoding, prepared)
    _, gathered = rates(codes.blocks, time.process_time)
    arithmetic = arithmetic_s(index, prepared[0])
    found = []
    for top_m in lists:
        ids = index.search(data.queries, k=10, top_m=top_m)[0]
        taken, preparing = [], []
        for _ in range(_ROUNDS):
            begin = time.process_time()
            prepare(data.queries, encoding, prepared)
            preparing.append(time.process_time() - begin)
            begin = time.process_time()
            index.search(data.queries, k=10, top_m=top_m)
            taken.append(time.process_time() - begin)
        extends = extends_of(index, data.queries[:_COUNTED], top_m)
        took, preparation = (min(times) / len(data.queries) for times in (taken, preparing))
        found.append(
            {
                "set": data.name,
                "bits": codes.bits,
                "top_m": top_m,
                "recall": data.recall(ids),
                "extends": extends,
                "bytes": size,
                "memory_ns": size / gathered * 1e9,
                "arithmetic_ns": arithmetic * 1e9,
                "extend_ns": (took - preparation) / extends * 1e9,
                "preparation_us": preparation * 1e6,
                "floor_us": (preparation + extends * max(size / gathered, arithmetic)) * 1e6,
                "took_us": took * 1e6,
            }
        )
    return found


def report(found: dict[str, Any]) -> str:
    """Format the table as Markdown."""
    about = found["machine"]
    head = "data, bits, top_m, recall@10, extends, bytes an extend, to read them ns, arithmetic ns, an extend took ns"
    rows = [
        [one["set"], one["bits"], one["top_m"], f"{one['recall']:.4f}", f"{one['extends']:.1f}", f"{one['bytes']:,}",
         *(f"{one[name]:.0f}" for name in ("memory_ns", "arithmetic_ns", "extend_ns")),
         *(f"{one[name]:.1f}" for name in ("preparation_us", "floor_us", "took_us")),
         f"{one['took_us'] / one['floor_us']:.1f}×"]
        for one in found["lines"]
    ]  # fmt: skip
    return "\n".join(
        [
            f"{about['processor']}, {about['cores']} cores, Python {about['python']}; {found['dtype']}; one thread, "
            f"processor time, the quickest of {_ROUNDS}; {found['load']}.",
            "",
            *table([*head.split(", "), "preparation µs", "floor µs", "took µs", "took / floor"], rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.floor_codes", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=None)
    parser.add_argument("--top-m", type=int, nargs="*", default=[20, 34, 64])
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--keep", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine-floor-codes"))
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for name in options.sets or data_sets(options.data):
        data = load(options.data, name)
        engine = Trinity(options.dtype, codes=True)
        kept = None if options.keep is None else options.keep / name / engine.label.replace(" ", "-")
        if kept is not None and kept.exists():
            engine.load(kept, data)
        else:
            engine.build(data, 1)
        lines += measure(data, engine.index, options.top_m)
    found = {"machine": machine(), "load": machine_load(), "dtype": options.dtype, "lines": lines}
    write(found, report(found), options.out)


if __name__ == "__main__":
    main()
