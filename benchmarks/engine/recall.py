"""Recall of neighbour codes against int8: at top_m 64, and with equal work.

    python -m benchmarks.engine.recall --data DIR [--sets NAME …] [--keep DIR] [--out benchmarks/results/engine-recall]

Work is processor time on one thread, the minimum over rounds: equal work is the longest list whose search takes no
longer than int8's with top_m 64. If the directory has Fashion-MNIST, a SIFT-like set is added: for each image,
gradients by 4 · 4 cells and 8 directions, clipped and quantised to bytes as in Lowe (IJCV 2004, section 6), under
squared L2. --keep loads and saves indexes as `benchmarks.engine --keep` does.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

from benchmarks.common.data import Array, DataSet, data_sets, load, nearest  # noqa: E402
from benchmarks.common.machine import machine, machine_load  # noqa: E402
from benchmarks.common.report import table, write  # noqa: E402
from benchmarks.engine.bench import build  # noqa: E402
from benchmarks.engine.peers import EFFORTS  # noqa: E402
from benchmarks.engine.trinity import Trinity  # noqa: E402

_ROUNDS, _LIST = 3, 64
_SIDE, _CELLS, _DIRECTIONS, _CLIP = 28, 4, 8, 0.2


def descriptors(images: Array) -> Array:
    """Return SIFT-like descriptors of images float32 [n, 784]: integers up to 255, float32 [n, 128]."""
    pixels: Array = images.reshape(-1, _SIDE, _SIDE)
    down, right = (np.gradient(pixels, axis=axis) for axis in (1, 2))
    strength = np.hypot(down, right)
    direction = (np.arctan2(down, right) / (2 * np.pi) * _DIRECTIONS).round().astype(np.int64) % _DIRECTIONS
    width = _SIDE // _CELLS
    found = np.zeros((len(images), _CELLS, _CELLS, _DIRECTIONS), np.float32)
    for number in range(_DIRECTIONS):
        selected = np.where(direction == number, strength, 0)
        found[..., number] = selected.reshape(-1, _CELLS, width, _CELLS, width).sum(axis=(2, 4))
    flat = found.reshape(len(images), -1)
    for most in (_CLIP, np.inf):
        flat = np.minimum(flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-6), most)
    return np.minimum(np.floor(512 * flat), 255).astype(np.float32)


def sift_like(images: DataSet) -> DataSet:
    """Return the data set of the images' descriptors."""
    base, queries = descriptors(images.base), descriptors(images.queries)
    return DataSet("sift-like-128-l2", "l2", base, queries, nearest(base, queries, 10))


def point(engine: Trinity, data: DataSet, top_m: int) -> dict[str, float]:
    """Return top_m, recall@10 and µs per query."""
    recall = data.recall(engine.search(data.queries, top_m, 1))
    taken = []
    for _ in range(_ROUNDS):
        begin = time.process_time()
        engine.search(data.queries, top_m, 1)
        taken.append(time.process_time() - begin)
    return {"top_m": top_m, "recall": recall, "us": min(taken) / len(data.queries) * 1e6}


def compare(data: DataSet, keep: Path | None) -> dict[str, Any]:
    """Measure int8, and both dtypes with codes up to the first list that takes longer than int8."""
    points: dict[str, list[dict[str, float]]] = {}
    most_us = 0.0
    for engine in (Trinity("int8"), Trinity("float32", codes=True), Trinity("float16", codes=True)):
        build(engine, data, 1, "cpu", keep)
        engine.search(data.queries[:8], 16, 1)
        found = points[engine.label] = [point(engine, data, _LIST)]
        if engine.dtype == "int8":
            most_us = found[0]["us"]
            continue
        for top_m in EFFORTS:
            if top_m != _LIST:
                found.append(point(engine, data, top_m))
            if found[-1]["us"] > most_us:
                break
    return {"set": data.name, "points": points}


def report(found: dict[str, Any]) -> str:
    """Format the table as Markdown."""
    about = found["machine"]
    rows = []
    for one in found["sets"]:
        beside = one["points"]["trinity int8"][0]
        for label, points in one["points"].items():
            at = points[0]
            equal = max((p for p in points if p["us"] <= beside["us"]), key=lambda p: p["top_m"], default=None)
            worked = ["-", "-"] if equal is None else [f"{equal['recall']:.4f}", f"{equal['top_m']:.0f}"]
            name = label.removeprefix("trinity ")
            rows.append([one["set"], name, f"{at['recall']:.4f}", f"{at['us']:.1f}", *worked])
    head = ("data", "engine", f"recall@10 at top_m {_LIST}", "µs", f"recall in int8's µs at {_LIST}", "by top_m")
    return "\n".join(
        [
            f"{about['processor']}, {about['cores']} cores, Python {about['python']}; one thread, processor time, the "
            f"quickest of {_ROUNDS}; {found['load']}.",
            "",
            *table(head, rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.recall", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=None)
    parser.add_argument("--keep", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine-recall"))
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "load": machine_load(), "sets": []}
    for name in options.sets or data_sets(options.data):
        data = load(options.data, name)
        found["sets"].append(compare(data, options.keep))
        if "fashion" in name:
            found["sets"].append(compare(sift_like(data), options.keep))
    write(found, report(found), options.out)


if __name__ == "__main__":
    main()
