"""The search engine against other libraries: recall@10 and queries per second on real data, in one run.

    python -m benchmarks.engine --data DIR [--sets NAME …] [--engines NAME …] [--threads 1]
        [--rounds 5] [--clock wall|cpu] [--quick] [--keep DIR] [--out benchmarks/results/engine]

Every engine answers all queries at every setting of its search parameter. The settings of all engines are interleaved
within a round, and a setting's speed is the median over rounds. Ratios compare speeds at equal recall: the logarithm of
the speed is interpolated between two settings; below the lowest setting its speed is used.
--clock cpu measures processor time instead of wall-clock time, for one thread on a shared machine.
--keep saves indexes with their build times, and loads them in later runs.
--quick uses the first 10,000 rows and 300 queries, and takes two minutes.
Writes OUT-t1.json, OUT-t1.md and, with matplotlib, OUT-t1.png (t2 for two threads). Results of other data sets from the
same machine, versions and options are kept.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # before importing numpy: thread counts are set per library from --threads

from benchmarks.common.data import DataSet, data_sets, load  # noqa: E402
from benchmarks.common.machine import machine  # noqa: E402
from benchmarks.common.report import keep  # noqa: E402
from benchmarks.engine.peers import EFFORTS, Contender, contenders  # noqa: E402
from benchmarks.engine.report import draw, report, targets  # noqa: E402

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SETTLED_S = 0.3  # between engines: OpenMP threads spin for 0.2 s after their work
LONG, LITTLE = 200, 0.0002  # from this effort on, an engine that gains less recall per step is stopped
QUICK_ROWS, QUICK_QUERIES, QUICK_EFFORTS = 10_000, 300, (10, 20, 40, 80)


def build(contender: Contender, data: DataSet, threads: int, clock: str, keep: Path | None) -> dict[str, Any]:
    """Build a contender's index, or load a kept one. Returns the build's seconds, threads and clock."""
    place = None if keep is None else keep / f"{data.name}-{len(data.base)}" / contender.label.replace(" ", "-")
    if place is not None and (place / "built.json").exists():
        contender.load(place, data)
        built: dict[str, Any] = json.loads((place / "built.json").read_text())
        return built
    begin = CLOCKS[clock]()
    contender.build(data, threads)
    built = {"seconds": CLOCKS[clock]() - begin, "threads": threads, "clock": clock}
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        contender.save(place)
        (place / "built.json").write_text(json.dumps(built) + "\n")
    return built


def measure(
    data: DataSet,
    engines: list[Contender],
    threads: int,
    rounds: int,
    clock: str,
    efforts: Sequence[int],
    keep: Path | None,
) -> list[dict[str, Any]]:
    """Build every engine, then measure all settings interleaved, up to the highest target recall. Returns records."""
    target = max(targets(data.name))
    now = CLOCKS[clock]
    records: list[dict[str, Any]] = []
    running: list[tuple[Contender, dict[str, Any]]] = []
    for contender in engines:
        try:
            built = build(contender, data, threads, clock, keep)
        except Exception as error:  # a peer that fails must not stop the others
            print(f"  {contender.label}: left out ({error})", flush=True)
            continue
        record: dict[str, Any] = {
            "label": contender.label,
            "compressed": contender.compressed,
            "built": built,
            "bytes": contender.bytes(),
            "points": [],
        }
        print(f"  {contender.label}: built in {built['seconds']:.1f} s", flush=True)
        records.append(record)
        running.append((contender, record))
    for contender, record in running:
        contender.search(data.queries[:8], 16, threads)  # warm up: compilation and allocation
        record["recall_64"] = data.recall(contender.search(data.queries, 64, threads))
        before = 0.0
        for effort in efforts:
            recall = data.recall(contender.search(data.queries, effort, threads))
            record["points"].append({"effort": effort, "recall": recall, "rounds": []})
            gained = recall - before
            before = recall
            if recall >= target or (effort >= LONG and gained < LITTLE):
                break
    for number in range(rounds):
        for effort in efforts:
            for contender, record in running:
                for point in record["points"]:
                    if point["effort"] == effort:
                        if threads > 1:
                            time.sleep(SETTLED_S)
                        begin = now()
                        contender.search(data.queries, effort, threads)
                        point["rounds"].append(len(data.queries) / (now() - begin))
        print(f"  round {number + 1} of {rounds}", flush=True)
    for record in records:
        for point in record["points"]:
            point["qps"] = statistics.median(point["rounds"])
    return records


def earlier(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the data sets of an earlier run in this file, if machine, versions and options are the same."""
    if not path.exists():
        return {}
    results: dict[str, Any] = json.loads(path.read_text())
    alike = all(results.get(name) == value for name, value in settings.items() if name != "sets")
    return dict(results["sets"]) if alike else {}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=None)
    parser.add_argument("--engines", nargs="*", default=None, help="names, or patterns such as 'trinity*'")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine"))
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads > 1:
        parser.error("--clock cpu adds up the threads' time; use --clock wall for more than one thread")
    names = options.sets or data_sets(options.data)
    if not names:
        parser.error(f"{options.data} contains no NAME.base.npy")
    engines, versions = contenders()
    if options.engines is not None:
        engines = [engine for engine in engines if any(fnmatch(engine.label, name) for name in options.engines)]
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": versions,
        "threads": options.threads,
        "clock": options.clock,
        "rounds": 2 if options.quick else options.rounds,
        "quick": options.quick,
        "sets": {},
    }
    suffix = "-quick" if options.quick else ""
    out = options.out.with_name(f"{options.out.name}{suffix}-t{options.threads}")
    result["sets"] = earlier(out.with_suffix(".json"), result)
    for name in names:
        print(name, flush=True)
        rows, queries = (QUICK_ROWS, QUICK_QUERIES) if options.quick else (None, None)
        data = load(options.data, name, rows, queries)
        efforts = QUICK_EFFORTS if options.quick else EFFORTS
        records = measure(data, engines, options.threads, result["rounds"], options.clock, efforts, options.keep)
        result["sets"][name] = {"size": len(data.base), "dim": data.base.shape[1], "engines": records}
        keep(result, report(result), out)  # results so far
    print(report(result))
    draw(result, out.with_suffix(".png"))
