"""Roofline of the CPU engine: the bytes a query must read, against the machine's bandwidth.

    python -m benchmarks.engine.floor --data DIR [--sets NAME …] [--top-m 28] [--dtype float32] [--clock wall|cpu]

bytes per query = sketches · 64·lines + rows · row bytes + expanded nodes · degree · 4, counted by running the stages
individually. Two rates bound the time: sequential reads, and random gathers of whole rows, by one thread. A data set
that fits into the caches can be faster than the memory floor.

A second table shows the cost, in µs, of a query in the slots of an engine (32), one extend at a time: preparation
(which batch search also does), the rest of `admit`, its share of the extends, and `result` with `release`. `whole` is a
query in batch search.
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

from benchmarks.common.data import Array, DataSet, data_sets, load  # noqa: E402
from benchmarks.common.report import table  # noqa: E402
from gpu import CpuEngine, GraphIndex, SearchParams  # noqa: E402
from gpu.cpu import running_batch  # noqa: E402
from gpu.cpu.extend import stages  # noqa: E402
from gpu.cpu.queries import QueryEncoding, prepare, prepared_bytes  # noqa: E402
from gpu.cpu.state import BatchState  # noqa: E402
from gpu.cpu.tables import EXTENDS, TASK_BEGIN, TASK_END  # noqa: E402
from gpu.index.rows import aligned_empty  # noqa: E402

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def counts(index: GraphIndex, queries: Array, top_m: int) -> tuple[float, float, float]:
    """Return the means per query of sketches read (or rows, without sketches), rows scored and nodes expanded."""
    state = BatchState([index.data], 1, top_m, 1)
    batch = state.batch
    active, finished = np.zeros(1, np.int32), np.zeros(1, np.int32)
    met = scored = expanded = 0
    for query in queries:
        running_batch.admit_query(batch, 0, query, *state.line(0, SearchParams(10, top_m, 1)).tolist())
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
    """Return the bandwidths, bytes/s, of sequential reads and random gathers of rows; medians of five."""
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


def line(data: DataSet, index: GraphIndex, dtype: str, top_m: int, now: Callable[[], float]) -> list[str]:
    """Return one line of the first table."""
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
    met_per_query = (met, scored, expanded, total / 1024)
    took_us = (total / plain * 1e6, total / gathered * 1e6, took * 1e6)
    return [
        data.name,
        dtype,
        f"{data.recall(ids):.4f}",
        *(f"{value:.0f}" for value in met_per_query),
        *(f"{value / 1e9:.1f}" for value in (plain, gathered)),
        *(f"{value:.0f}" for value in took_us),
    ]


def stepwise_line(data: DataSet, index: GraphIndex, top_m: int) -> list[str]:
    """Return one line of the second table: the fastest of five passes, wall-clock time."""
    clock, slots = time.perf_counter_ns, 32
    params = SearchParams(10, top_m, 1)
    rows = index.data.rows
    prepared = aligned_empty((len(data.queries), prepared_bytes(rows)), np.uint8)
    best: dict[str, float] = {}
    for _ in range(5):
        engine = CpuEngine({"data": index}, slots=slots)
        spent = dict.fromkeys(("prepare", "admit", "extend", "result", "whole"), 0)
        begin = clock()
        prepare(data.queries, QueryEncoding(rows), prepared)
        spent["prepare"] = clock() - begin
        begin = clock()
        index.search(data.queries, k=10, top_m=top_m)
        spent["whole"] = clock() - begin
        following = 0
        while following < len(data.queries) or engine.active_slots:
            begin = clock()
            while engine.free_slots and following < len(data.queries):
                engine.admit(data.queries[following], params, "data")
                following += 1
            spent["admit"] += clock() - begin
            begin = clock()
            finished = engine.extend().tolist()
            spent["extend"] += clock() - begin
            begin = clock()
            for slot in finished:
                engine.result(slot)
                engine.release(slot)
            spent["result"] += clock() - begin
        for name, ns in spent.items():
            best[name] = min(best.get(name, np.inf), ns / len(data.queries) / 1e3)
    best["admit"] -= best["prepare"]
    parts = ("prepare", "admit", "extend", "result")
    stepwise = sum(best[name] for name in parts)
    shown = [f"{best[name]:.1f}" for name in ("whole", *parts)]
    return [data.name, *shown, f"{stepwise:.1f}", f"{best['whole'] / stepwise:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.floor", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=None)
    parser.add_argument("--top-m", type=int, default=28)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    options = parser.parse_args()
    floors, stepwise = [], []
    for name in options.sets or data_sets(options.data):
        data = load(options.data, name)
        index = GraphIndex.build(data.base, metric=data.metric, dtype=options.dtype)  # type: ignore[arg-type]
        floors.append(line(data, index, options.dtype, options.top_m, CLOCKS[options.clock]))
        stepwise.append(stepwise_line(data, index, options.top_m))
    head = "data, dtype, recall@10, met, scored, expanded, KiB a query, GB/s in order, GB/s gathered, floor µs"
    print("\n".join(table([*head.split(", "), "gathered µs", "took µs"], floors)), end="\n\n")
    head = "data, whole µs, prepare, admit's rest, extends"
    print("\n".join(table([*head.split(", "), "result, release", "stepwise", "whole / stepwise"], stepwise)))


if __name__ == "__main__":
    main()
