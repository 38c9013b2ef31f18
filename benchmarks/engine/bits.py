"""Recall and queries/s of neighbour codes with 1 to 4 bits per dimension, over one graph.

    python -m benchmarks.engine.bits --data DIR [--sets NAME …] [--bits 1 2 3 4] [--rounds 2] [--keep DIR]
        [--out benchmarks/results/engine-bits]

One thread, processor time; all settings are interleaved within a round, and results are medians over rounds. --keep
uses the graph of an index built by `benchmarks.engine --keep`.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

from benchmarks.common.data import DataSet, data_sets, load  # noqa: E402
from benchmarks.common.machine import machine, machine_load  # noqa: E402
from benchmarks.common.report import table, write  # noqa: E402
from benchmarks.engine.bench import build  # noqa: E402
from benchmarks.engine.peers import EFFORTS  # noqa: E402
from benchmarks.engine.report import speed_at, targets  # noqa: E402
from benchmarks.engine.trinity import Trinity  # noqa: E402
from gpu import GraphIndex  # noqa: E402
from gpu.build.neighbor_codes import make_codes  # noqa: E402
from gpu.index.data import IndexData  # noqa: E402

_LIST = 64


def with_bits(index: GraphIndex, bits: int) -> GraphIndex:
    """Return an index of float32 rows with codes of this many bits."""
    data = index.data
    rows = np.ascontiguousarray(data.rows.codes[:, : index.dim])
    codes = make_codes(rows, data.rows.centre, index.metric == "l2", data.graph, data.seeds, 0, bits=bits)
    return GraphIndex(IndexData(data.rows, data.graph, data.seeds, None, codes))


def measure(data: DataSet, index: GraphIndex, bits: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return a record for each number of bits: bytes, points and speeds at the target recalls."""
    indexes = {number: with_bits(index, number) for number in bits}
    records: list[dict[str, Any]] = []
    for number, coded in indexes.items():
        coded.search(data.queries[:8], k=10, top_m=16)
        points: list[dict[str, Any]] = []
        for effort in EFFORTS:
            points.append({"effort": effort, "rounds": []})
            points[-1]["recall"] = data.recall(coded.search(data.queries, k=10, top_m=effort)[0])
            if points[-1]["recall"] >= max(targets(data.name)):
                break
        records.append({"bits": number, "bytes": coded.nbytes // coded.size, "points": points})
    for _ in range(rounds):
        for effort in EFFORTS:
            for record in records:
                for point in (point for point in record["points"] if point["effort"] == effort):
                    begin = time.process_time()
                    indexes[record["bits"]].search(data.queries, k=10, top_m=effort)
                    point["rounds"].append(len(data.queries) / (time.process_time() - begin))
    for record in records:
        for point in record["points"]:
            point["qps"] = statistics.median(point["rounds"])
    return records


def report(found: dict[str, Any]) -> str:
    """Format the tables as Markdown."""
    about = found["machine"]
    lines = [
        f"{about['processor']}, {about['cores']} cores, Python {about['python']}; float32, degree 32, one thread, "
        f"processor time, median of {found['rounds']} rounds; {found['load']}.",
    ]
    for name, records in found["sets"].items():
        recalls = targets(name)
        first = [speed_at(records[0], recall) for recall in recalls]
        rows = []
        for record in records:
            speeds = [speed_at(record, recall) for recall in recalls]
            shown = [f"{s:,.0f} ({s / f:.2f}×)" if s and f else "-" for s, f in zip(speeds, first, strict=True)]
            at = [f"{point['recall']:.4f}" for point in record["points"] if point["effort"] == _LIST]
            rows.append([record["bits"], *shown, *(at or ["-"]), f"{record['bytes']:,}"])
        head = ["bits", *(f"queries/s at {recall:g}" for recall in recalls), f"recall at {_LIST}", "bytes a vector"]
        lines += ["", f"**{name}**", "", *table(head, rows)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.bits", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=None)
    parser.add_argument("--bits", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine-bits"))
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "load": machine_load(), "rounds": options.rounds, "sets": {}}
    for name in options.sets or data_sets(options.data):
        data = load(options.data, name)
        engine = Trinity("float32", codes=True)
        build(engine, data, 1, "cpu", options.keep)
        found["sets"][name] = measure(data, engine.index, options.bits, options.rounds)
    write(found, report(found), options.out)


if __name__ == "__main__":
    main()
