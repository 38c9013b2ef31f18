"""The floor under the CPU engine: what a query must read, against what the machine can deliver.

    python -m benchmarks.engine_floor --data DIR [--sets NAME …] [--top-m 28] [--dtype float32] [--clock wall|cpu]

bytes per query = sketches · 64·lines + rows · row bytes + expanded nodes · degree · 4, counted by running the stages
one by one. Two rates bound the time: reading memory in order, and gathering whole rows at random, one thread. A data
set that fits into the caches can go below the floor of memory.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

from benchmarks.data import Array, DataSet, data_sets, load  # noqa: E402
from gpu import GraphIndex, SearchParams  # noqa: E402
from gpu.cpu import running, stages  # noqa: E402
from gpu.cpu.state import BatchState  # noqa: E402
from gpu.cpu.tables import EXTENDS, TASK_BEGIN, TASK_END  # noqa: E402

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def counts(index: GraphIndex, queries: Array, top_m: int) -> tuple[float, float, float]:
    """Sketches (or rows, without sketches), rows and expanded nodes per query, on average."""
    state = BatchState([index.data], 1, top_m, 1)
    batch = state.batch
    active, finished = np.zeros(1, np.int32), np.zeros(1, np.int32)
    met = scored = expanded = 0
    for query in queries:
        running.admit(state.handle, 0, query, state.line(0, SearchParams(10, top_m, 1)))
        done = 0
        while not done:
            for stage in (stages.select_parents, stages.expand_neighbors, stages.mark_visited):
                stage(batch, active)
            met += _tasks(batch.slots)
            stages.compute_distances(batch, active)
            scored += _tasks(batch.slots)
            done = stages.merge_top_m(batch, active, finished)
        expanded += int(batch.slots[0, EXTENDS]) - 1
    return met / len(queries), scored / len(queries), expanded / len(queries)


def _tasks(slots: Array) -> int:
    return int(slots[0, TASK_END] - slots[0, TASK_BEGIN])


def rates(rows: Array, now: Callable[[], float]) -> tuple[float, float]:
    """Bytes per second of reading rows in order, and of gathering them at random; medians of five."""
    order = np.random.default_rng(0).permutation(len(rows))[: 100_000_000 // (rows.shape[1] * rows.itemsize)]
    out = np.empty((len(order), rows.shape[1]), rows.dtype)
    plain, gathered = [], []
    for _ in range(5):
        begin = now()
        np.add.reduce(rows.view(np.uint32), axis=None)
        plain.append(rows.nbytes / (now() - begin))
        begin = now()
        np.take(rows, order, axis=0, out=out, mode="clip")
        gathered.append(out.nbytes / (now() - begin))
    return statistics.median(plain), statistics.median(gathered)


def line(data: DataSet, dtype: str, top_m: int, now: Callable[[], float]) -> str:
    """One line of the table."""
    index = GraphIndex.build(data.base, metric=data.metric, dtype=dtype)  # type: ignore[arg-type]
    index.search(data.queries[:8], top_m=top_m)
    rows = index.data.rows
    met, scored, expanded = counts(index, data.queries[:500], top_m)
    row_bytes = rows.codes.strides[0]
    sketch_bytes = 0 if rows.sketch is None else rows.sketch.codes.strides[0]
    total = met * sketch_bytes + scored * row_bytes + expanded * index.degree * 4
    plain, gathered = rates(rows.codes, now)
    times = []
    for _ in range(5):
        begin = now()
        ids, _ = index.search(data.queries, k=10, top_m=top_m)
        times.append((now() - begin) / len(data.queries))
    took = statistics.median(times)
    return (
        f"| {data.name} | {dtype} | {data.recall(ids):.4f} | {met:.0f} | {scored:.0f} | {expanded:.0f} "
        f"| {total / 1024:.0f} | {plain / 1e9:.1f} | {gathered / 1e9:.1f} "
        f"| {total / plain * 1e6:.0f} | {total / gathered * 1e6:.0f} | {took * 1e6:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_floor", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=None)
    parser.add_argument("--top-m", type=int, default=28)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    options = parser.parse_args()
    print(
        "| data | dtype | recall@10 | met | scored | expanded | KiB a query | GB/s in order | GB/s gathered |", end=""
    )
    print(" floor µs | gathered µs | took µs |")
    print("|---|---|" + "---:|" * 10)
    for name in options.sets or data_sets(options.data):
        print(line(load(options.data, name), options.dtype, options.top_m, CLOCKS[options.clock]), flush=True)


if __name__ == "__main__":
    main()
