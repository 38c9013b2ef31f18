"""Benchmark of collections: replaced rows, filtered search against other libraries, latency of upserts.

    python -m benchmarks.collections --data DIR [--set minilm-384-cosine] [--rows 20000] [--queries 100] [--seed 0]
        [--part replaced] [--out benchmarks/results/collections]
    python -m benchmarks.collections --filter-storm --home DIR
                                                    others' requests during a storm of the worst filters; DIR keeps the
                                                    collection of 300,000 documents for the next run

DIR as for `benchmarks.engine`. One thread; times are processor time, except of upserts, which wait for the disk.
Filtered speeds are compared at equal recall: each engine with the least effort that reaches .95, or its best.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # before numpy

import numpy as np  # noqa: E402

from benchmarks.collections.peers import EXACT, peers, replaced_in_place, versions  # noqa: E402
from benchmarks.collections.storm import filter_storm, report_storm  # noqa: E402
from benchmarks.common.data import Array, load, nearest  # noqa: E402
from benchmarks.common.machine import machine, machine_load  # noqa: E402
from benchmarks.common.report import table, write  # noqa: E402
from gpu import GraphIndex  # noqa: E402
from runtime.retrieval.collections.bulk_load import create  # noqa: E402
from runtime.retrieval.collections.search import search  # noqa: E402
from runtime.retrieval.collections.validation import UpsertDocument  # noqa: E402
from runtime.retrieval.collections.writer import CollectionWriter  # noqa: E402

K = 10
EFFORTS = (16, 32, 64, 128, 256)
SELECTIVITIES = (0.5, 0.1, 0.01, 0.001)
PARTS = ("upserts", "replaced", "filtered")
ENOUGH = 0.95
ROUNDS = 3
SLOW_S = 0.005
"""An engine that takes longer for a query gets fewer queries."""
Search = Callable[[Array, int], Array]


def recall(ids: Array, truth: Array) -> float:
    """Return the recall against truth [q, k], which is padded with -1."""
    hits = (ids[:, :, None] == truth[:, None, :]) & (truth[:, None, :] >= 0)
    return float(hits.any(axis=1).sum() / (truth >= 0).sum())


def best_at(search: Search, truth: Array, queries: Array, efforts: Sequence[int] = EFFORTS) -> dict[str, float]:
    """Return the first setting that reaches ENOUGH, else that of the highest recall: effort, recall, qps."""
    for _ in range(2):  # the first call compiles
        begin = time.process_time()
        search(queries[:5], efforts[0])
    slow = time.process_time() - begin > 5 * SLOW_S
    measured, rounds = (queries[:10], 1) if slow else (queries, ROUNDS)
    runs = []
    for effort in efforts:
        seconds = []
        for _ in range(rounds):
            begin = time.process_time()
            ids = search(measured, effort)
            seconds.append(time.process_time() - begin)
        reached = recall(ids, truth[: len(measured)])
        runs.append({"effort": effort, "recall": reached, "qps": len(measured) / statistics.median(seconds)})
        if runs[-1]["recall"] >= ENOUGH:
            break
    return max(runs, key=lambda one: (one["recall"] >= ENOUGH, one["recall"]))


def filters(base: Array, queries: Array, seed: int) -> dict[str, tuple[float, str, Array]]:
    """Return filters by name: selectivity, correlation with the queries, and which rows pass, bool [N]."""
    random, order = np.random.default_rng(seed), np.argsort(-(base @ queries.mean(axis=0)))
    by_name: dict[str, tuple[float, str, Array]] = {}
    for part in SELECTIVITIES:
        count = max(K, round(part * len(base)))
        for kind, rows in (
            ("uncorrelated", random.permutation(len(base))[:count]),
            ("near", order[:count]),  # to the mean of the queries
            ("far", order[-count:]),
        ):
            allowed = np.zeros(len(base), bool)
            allowed[rows] = True
            by_name[f"p{len(by_name)}"] = part, kind, allowed
    return by_name


def filtered(base: Array, queries: Array, metric: str, seed: int, place: Path) -> list[dict[str, Any]]:
    """Measure every engine with every filter."""
    index = GraphIndex.build(base, metric=metric, neighbor_codes=True, seed=seed)  # type: ignore[arg-type]
    selections = filters(base, queries, seed)
    others = peers(base, {name: allowed for name, (_, _, allowed) in selections.items()}, place)
    records = []
    for name, (part, kind, allowed) in selections.items():
        own = np.flatnonzero(allowed)
        truth = own[nearest(base[own], queries, K)]
        engines: dict[str, Search] = {"trinity": partial(_trinity, index, allowed)}
        engines |= {peer: partial(run, name) for peer, run in others.items()}
        for engine, run in engines.items():
            best = best_at(run, truth, queries, EFFORTS[:1] if engine in EXACT else EFFORTS)
            records.append({"part": part, "kind": kind, "engine": engine, **best})
            print(f"  {part:6.1%} {kind:13} {engine:12} {best}", flush=True)
    return records


def _trinity(index: GraphIndex, allowed: Array, queries: Array, effort: int) -> Array:
    return index.search(queries, K, max(K, effort), allowed=allowed)[0]


def replaced(base: Array, queries: Array, metric: str, directory: Path) -> dict[str, float]:
    """Measure recall after replacing 30% of the rows one by one, against a fresh build of the same vectors."""
    count = len(base) * 10 // 13
    rest = len(base) - count
    create(directory, base.shape[1], metric=metric)
    with CollectionWriter(directory, background=False) as writer:
        for begin in range(0, count, 1024):
            numbers = range(begin, min(begin + 1024, count))
            writer.upsert([UpsertDocument(str(number), vector=base[number]) for number in numbers])
        writer.flush()
        whole = dict(enumerate(range(count)))
        for number in range(rest):
            writer.upsert([UpsertDocument(str(number), vector=base[count + number])])
            whole[number] = count + number
            if writer.state.growing.size >= 4096:
                writer.flush()
        now = np.array([whole[number] for number in range(count)])
        truth = nearest(base[now], queries, K)
        fresh = GraphIndex.build(base[now], metric=metric, neighbor_codes=True)  # type: ignore[arg-type]
        rows, _ = search(writer.state, queries, K, 64)
        ids = np.array([[int(one.id) if one else -1 for one in writer.state.documents(row.tolist())] for row in rows])
        live, rebuilt = recall(ids, truth), recall(fresh.search(queries, K, 64)[0], truth)
        segments = len(writer.state.segments)
        writer.compact()
        rows, _ = search(writer.state, queries, K, 64)
        ids = np.array([[int(one.id) if one else -1 for one in writer.state.documents(row.tolist())] for row in rows])
        speed = _against_plain(writer, queries)
    held = now[truth]
    in_place = {
        name: recall(answers["live"], held) / recall(answers["fresh"], held)
        for name, answers in replaced_in_place(base, count, queries, 64).items()
    }
    return {
        "live": live, "compacted": recall(ids, truth), "fresh": rebuilt, "ratio": live / rebuilt, "segments": segments,
        "speed": speed, **{f"{name} ratio": ratio for name, ratio in in_place.items()},
    }  # fmt: skip


def _against_plain(writer: CollectionWriter, queries: Array) -> float:
    """Return the speed of a collection of one segment relative to its index; the median of pairs."""
    plain, pairs = writer.state.segments[0].index, []
    for _ in range(50):
        times = []
        for run in (partial(plain.search, queries, K, 64), partial(search, writer.state, queries, K, 64)):
            begin = time.process_time()
            run()
            times.append(time.process_time() - begin)
        pairs.append(times[0] / times[1])
    return statistics.median(pairs)


def upserts(base: Array, metric: str, directory: Path, batches: int = 300) -> dict[str, float]:
    """Measure milliseconds until a batch of 32 is acknowledged, and of an fsync of the same number of bytes."""
    create(directory, base.shape[1], metric=metric)
    taken, alone = [], []
    with CollectionWriter(directory) as writer, (directory / "fsync").open("wb") as file:
        for batch in range(batches):
            documents = [
                UpsertDocument(str(row % len(base)), "x" * 800, vector=base[row % len(base)])
                for row in range(32 * batch, 32 * batch + 32)
            ]
            begin = time.perf_counter()
            writer.upsert(documents)
            taken.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            file.write(bytes(32 * (800 + 4 * base.shape[1])))
            file.flush()
            os.fsync(file.fileno())
            alone.append(time.perf_counter() - begin)
    p50, p99 = (float(value) * 1000 for value in np.percentile(taken, (50, 99)))
    return {"p50_ms": p50, "p99_ms": p99, "fsync_p99_ms": float(np.percentile(alone, 99)) * 1000}


def report(results: dict[str, Any]) -> str:
    """Format the results as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in results["peers"].items())
    lines = [
        f"{results['set']}, {results['rows']:,} rows, {results['queries']} queries, seed {results['seed']}; "
        f"{results['machine']['processor']}, {results['load']}; {versions}",
        "",
    ]
    engines, rows = sorted({one["engine"] for one in results["filtered"]}), []
    for part, kind in dict.fromkeys((one["part"], one["kind"]) for one in results["filtered"]):
        own = {one["engine"]: one for one in results["filtered"] if (one["part"], one["kind"]) == (part, kind)}
        cells = [f"{own[name]['recall']:.3f}, {own[name]['qps']:,.0f}/s" if name in own else "" for name in engines]
        rows.append([f"{part:.1%}", kind, *cells])
    lines += [
        *table(["passing", "", *engines], rows),
        "",
        "Replaced 30%: recall@10 live {live:.4f}, fresh build {fresh:.4f} ({ratio:.4f}×), compacted {compacted:.4f}; "
        "{segments} segments. One segment, unfiltered, against its index alone: {speed:.3f}×".format(
            **results["replaced"]
        )
        + "".join(
            f". {name}, deleted and replaced in place: {ratio:.4f}× its fresh build"
            for name in results["peers"]
            if (ratio := results["replaced"].get(f"{name} ratio")) is not None
        ),
        "",
        "Upserts of 32, acknowledged with fsync: p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms; an fsync of as many bytes "
        "alone p99 {fsync_p99_ms:.1f} ms".format(**results["upserts"]),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--filter-storm", action="store_true", help="only measure during storms of filters")
    parser.add_argument("--home", type=Path, help="keep the storms' collection here")
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="measure only this part, and keep the others of --out"
    )
    parser.add_argument("--set", default="minilm-384-cosine")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/collections"))
    options = parser.parse_args(arguments)
    if options.filter_storm:
        if options.home is None:
            parser.error("--home is missing")
        options.home.mkdir(parents=True, exist_ok=True)
        storms = filter_storm(options.home)
        found = {"machine": machine(), "load": machine_load(), **storms}
        write(found, report_storm(storms, found["load"]), options.out.with_name(f"{options.out.name}-filter-storm"))
        return
    if options.data is None:
        parser.error("--data is missing")
    data = load(options.data, options.set, options.rows, options.queries)
    base, queries, metric = data.base, data.queries, data.metric
    before = options.out.with_name(f"{options.out.name}.json")
    results: dict[str, Any] = json.loads(before.read_text()) if options.part and before.exists() else {}
    results |= {
        "machine": machine(), "load": machine_load(), "set": options.set, "rows": len(base), "queries": len(queries),
        "seed": options.seed, "peers": versions(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.out.parent) as place:
        parts: dict[str, Callable[[], Any]] = {
            "upserts": lambda: upserts(base, metric, Path(place) / "upserts"),
            "replaced": lambda: replaced(base, queries, metric, Path(place) / "replaced"),
            "filtered": lambda: filtered(base, queries, metric, options.seed, Path(place)),
        }
        for name in options.part or parts:
            results[name] = parts[name]()
            print(name, results[name], flush=True)
    missing = [name for name in PARTS if name not in results]
    write(results, f"not measured yet: {', '.join(missing)}" if missing else report(results), options.out)
