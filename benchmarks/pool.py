"""The pool's table: what the rings cost, and what the scheduler keeps of prefill's latency under a decode flood.

    python -m benchmarks.pool --data ../shared/data/ann [--rounds 5] [--seconds 3] [--out benchmarks/results/pool]
    python -m benchmarks.pool --quick

Pools are real pool processes without the rest of a node, all over one collection (MiniLM; --quick: clustered random
vectors), each pinned to the first core; two client processes are pinned to the second. The pools compared (ours, one
FIFO queue, static batches) are the same loop and engine with another scheduler (`benchmarks/pool_schedulers.py`).

Every round runs everything once, one after the other; tables show medians over rounds, ratios are taken within rounds.
Latencies are from the client's enqueue to the pool's publish, so they leave out when a client, which shares its core
with the other one, looks. p99s of a shared machine hold the neighbours' share: the quietest round is shown too.
Throughputs are per second of CPU time that the pool's (or the engine's) process got, so that neighbours do not count.

- throughput: clients keep 64 queries each outstanding; against `CpuEngine` alone in one process on the pool's core.
- overload: one client asks prefill queries at random times, 15% of what the pool can do; the other decode queries
  at twice what the pool can do (what its ring does not take is dropped).
- mixed: both clients ask decode queries at random times, 90% with top_m 64, k 10, 10% with top_m 512, k 100, at 60%
  of what the pool can do.
"""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.pool_schedulers import POOLS
from gpu import CpuEngine, SearchParams
from ipc import RingClient, RingFull
from runtime.node.config import parse_config
from runtime.node.metrics import METRICS
from runtime.node.placement import NodePlan, resolve
from runtime.node.table import WorkerTable
from runtime.node.worker import Worker, WorkerSpec
from runtime.retrieval.collection import Collection

Vectors = NDArray[np.float32]
_context = multiprocessing.get_context("spawn")
_PREFILL_SHARE, _OVERLOAD, _MIXED_LOAD = 0.15, 2.0, 0.6


class Load(NamedTuple):
    """What one client asks for `seconds`: `rate` a second at random times, or as fast as `window` outstanding allow."""

    stage: str
    seconds: float
    kinds: tuple[tuple[float, int, int, int], ...]  # part of the queries, k, top_m, search_width
    rate: float = 0.0
    window: int = 0
    seed: int = 0


class Outcome(NamedTuple):
    """By kind: latencies in ns of what was answered. What the ring did not take; what was answered with an error."""

    latencies: list[NDArray[np.int64]]
    dropped: int
    failed: int
    seconds: float

    def per_second(self) -> float:
        return sum(map(len, self.latencies)) / self.seconds

    def p(self, percent: float, kind: int = 0) -> float:
        """In µs."""
        return float(np.percentile(self.latencies[kind], percent)) / 1e3


# ---- processes


def _pool_main(plan: NodePlan, name: str, core: int, pipe: Connection) -> None:
    _pin(core)
    table = WorkerTable.create("pool", "pool-0")
    pool = POOLS[name](Worker(WorkerSpec(plan, "pool-0", 1, table.reference, os.getppid())))
    gc.collect()
    gc.freeze()
    pipe.send(os.getpid())
    while not pipe.poll():
        for _ in range(200):
            pool.step()
    pool.close()
    pipe.send({metric.name: table.read(metric)[0] for metric in METRICS["pool"] if metric.kind == "counter"})


def _client_main(queries: Vectors, core: int, pipe: Connection) -> None:
    _pin(core)
    gc.freeze()
    while (order := pipe.recv()) is not None:
        endpoint, load, begin_ns = order
        with RingClient(endpoint, "benchmark") as client:
            pipe.send(_offer(client, queries, load, begin_ns))


def _offer(client: RingClient, queries: Vectors, load: Load, begin_ns: int) -> Outcome:
    random = np.random.default_rng(load.seed)
    kinds = random.choice(len(load.kinds), 1 << 16, p=[kind[0] for kind in load.kinds]).tolist()
    end = begin_ns + int(load.seconds * 1e9)
    gaps = random.exponential(1e9 / load.rate, int(load.rate * load.seconds * 1.5) + 100) if load.rate else np.zeros(0)
    times = (begin_ns + np.cumsum(gaps)).astype(np.int64).tolist()
    latencies: list[list[int]] = [[] for _ in load.kinds]
    asked: dict[int, int] = {}
    count = dropped = failed = 0

    def submit() -> bool:
        nonlocal count, dropped
        kind = kinds[count % len(kinds)]
        _, k, top_m, width = load.kinds[kind]
        count += 1
        try:
            request = client.submit(
                queries[count * 7919 % len(queries)],
                collection="docs", stage=load.stage, k=k, top_m=top_m, search_width=width,
            )  # fmt: skip
        except RingFull:
            dropped += 1
            return False
        asked[request] = kind
        return True

    while (now := time.monotonic_ns()) < end or asked:
        if now < end and now >= begin_ns:
            if load.window:
                while len(asked) < load.window:
                    submit()
            else:
                while times[count] <= now:
                    submit()
        news = client.poll()
        for result in news:
            kind = asked.pop(result.request_id)
            if result.status != "ok":
                failed += 1
            elif result.end_ns <= end:
                latencies[kind].append(result.end_ns - result.enqueue_ns)
        if not news:
            due = (times[count] - now) / 1e6 if load.rate and now < end else 1.0
            if due > 0.1 and asked:
                client.wait(min(due - 0.05, 1.0))
            else:
                os.sched_yield()
    return Outcome([np.array(kind, np.int64) for kind in latencies], dropped, failed, load.seconds)


def _engine_main(collection: Path, queries: Vectors, load: Load, slots: int, core: int, pipe: Connection) -> None:
    """The engine by itself: slots filled as they come free."""
    _pin(core)
    engine = CpuEngine({"docs": Collection.open(collection).index}, slots=slots, max_k=128)
    _, k, top_m, width = load.kinds[0]
    params = SearchParams(k, top_m, width)
    slot = engine.admit(queries[0], params, "docs")
    while slot not in engine.extend():  # compiles
        pass
    engine.result(slot)
    engine.release(slot)
    gc.freeze()
    pipe.send("ready")
    while pipe.recv() is not None:
        done = count = 0
        end, cpu = time.monotonic_ns() + int(load.seconds * 1e9), time.process_time()
        while time.monotonic_ns() < end:
            while engine.free_slots:
                engine.admit(queries[count * 7919 % len(queries)], params, "docs")
                count += 1
            for slot in engine.extend().tolist():
                engine.result(slot)
                engine.release(slot)
                done += 1
        pipe.send(done / (time.process_time() - cpu))


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, for `clock_gettime` (Linux's MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED)."""
    return (~pid << 3) | 2


def _pin(core: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {core})


@contextmanager
def _process(target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """A child that is told to end (by anything in its pipe, None for loops that take orders), and joined."""
    here, there = _context.Pipe()
    child = _context.Process(target=target, args=(*args, there), daemon=True)
    child.start()
    try:
        yield here
        here.send(None)
        child.join(timeout=30)
    finally:
        child.kill()
        child.join()


# ---- the table


class Bench:
    """Pools by name, two clients and the bare engine, all started once."""

    def __init__(self, options: argparse.Namespace, collection: Path, queries: Vectors, stack: ExitStack) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._options = options
        pool_core, client_core = cores[0], cores[-1]
        self.usual = (1.0, 10, options.top_m, options.search_width)
        self._endpoints: dict[str, str] = {}
        self._clocks: dict[str, int] = {}
        for name in POOLS:
            settings = {
                "slots": options.slots,
                "spare_slots": options.slots,
                "prefill_target_s": options.prefill_target_ms / 1e3,
            }
            plan = resolve(parse_config({"pool": settings, "collections": [{"name": "docs", "path": str(collection)}]}))
            pipe = stack.enter_context(_process(_pool_main, plan, name, pool_core))
            self._clocks[name] = _cpu_clock(pipe.recv())
            self._endpoints[name] = plan.endpoint("pool-0")
        self._clients = [stack.enter_context(_process(_client_main, queries, client_core)) for _ in range(2)]
        load = Load("decode", options.seconds, (self.usual,))
        self._engine = stack.enter_context(_process(_engine_main, collection, queries, load, options.slots, pool_core))
        self._engine.recv()

    def engine(self) -> float:
        """Queries a CPU second of the engine alone."""
        self._engine.send("go")
        return float(self._engine.recv())

    def ask(self, pool: str, *loads: Load) -> list[Outcome]:
        """Both clients (or the first) ask a pool at the same time."""
        begin = time.monotonic_ns() + 200_000_000
        end = begin + int(loads[0].seconds * 1e9)
        clients = self._clients[: len(loads)]
        for client, load in zip(clients, loads, strict=True):
            client.send((self._endpoints[pool], load, begin))
        times = []
        for until in (begin, end):
            time.sleep(max(0, until - time.monotonic_ns()) / 1e9)
            times.append((time.monotonic_ns(), time.clock_gettime_ns(self._clocks[pool])))
        self.cpu = (times[1][1] - times[0][1]) / (times[1][0] - times[0][0])
        return [client.recv() for client in clients]

    def round(self, seed: int) -> dict[str, float]:
        seconds, usual = self._options.seconds, (self.usual,)
        found: dict[str, float] = {"engine_per_cpu_s": self.engine()}
        full = [Load("decode", seconds, usual, window=64, seed=seed + n) for n in range(2)]
        capacity = sum(outcome.per_second() for outcome in self.ask("trinity", *full))
        found |= {"pool_per_cpu_s": capacity / self.cpu, "pool_cpu": self.cpu}

        prefill = Load("prefill", seconds, usual, rate=_PREFILL_SHARE * capacity, seed=seed)
        flood = Load("decode", seconds, usual, rate=_OVERLOAD * capacity, seed=seed + 1)
        (alone,) = self.ask("trinity", prefill)
        found |= {"alone_p50_us": alone.p(50), "alone_p99_us": alone.p(99)}
        (only,) = self.ask("trinity", flood)
        found["decode_only_per_cpu_s"] = only.per_second() / self.cpu
        for pool in POOLS:
            first, second = self.ask(pool, prefill, flood)
            found |= {f"{pool}_prefill_p50_us": first.p(50), f"{pool}_prefill_p99_us": first.p(99)}
            found[f"{pool}_prefill_per_cpu_s"] = first.per_second() / self.cpu
            found[f"{pool}_decode_per_cpu_s"] = second.per_second() / self.cpu
            found |= {f"{pool}_decode_p99_us": second.p(99), f"{pool}_dropped_per_s": second.dropped / seconds}

        small, large = (0.9, 10, 64, 4), (0.1, 100, 512, 4)
        both = [Load("decode", seconds, (small, large), window=32, seed=seed + n) for n in range(2)]
        mixed_capacity = sum(outcome.per_second() for outcome in self.ask("trinity", *both))
        both = [load._replace(window=0, rate=_MIXED_LOAD * mixed_capacity / 2) for load in both]
        for pool in ("trinity", "static"):
            outcomes = self.ask(pool, *both)
            for name, kind in (("small", 0), ("large", 1)):
                latencies = np.concatenate([outcome.latencies[kind] for outcome in outcomes])
                found[f"{pool}_{name}_p99_us"] = float(np.percentile(latencies, 99)) / 1e3
        return found | {"load": os.getloadavg()[0]}


def ratios(found: dict[str, float]) -> dict[str, float]:
    """The bars' figures of one round."""
    share = found["trinity_prefill_per_cpu_s"] / found["decode_only_per_cpu_s"]
    return {
        "pool / engine": found["pool_per_cpu_s"] / found["engine_per_cpu_s"],
        "prefill p99, overload / alone": found["trinity_prefill_p99_us"] / found["alone_p99_us"],
        "prefill p99, FIFO / ours": found["fifo_prefill_p99_us"] / found["trinity_prefill_p99_us"],
        "prefill p99, static / ours": found["static_prefill_p99_us"] / found["trinity_prefill_p99_us"],
        "decode / (decode alone - prefill's share)": found["trinity_decode_per_cpu_s"]
        / (found["decode_only_per_cpu_s"] * (1 - share)),
        "small p99, static / ours": found["static_small_p99_us"] / found["trinity_small_p99_us"],
    }


BARS = {
    "pool / engine": ("≥", 0.85),
    "prefill p99, overload / alone": ("≤", 2.0),
    "prefill p99, FIFO / ours": ("≥", 10.0),
    "prefill p99, static / ours": ("≥", 10.0),
    "decode / (decode alone - prefill's share)": ("≥", 0.9),
    "small p99, static / ours": ("≥", 3.0),
}


def markdown(report: dict[str, Any]) -> str:
    lines = [f"# The pool: {report['data']}", "", report["machine"], ""]
    lines += ["| ratio | bar | median | best round | worst round |", "|---|---|---|---|---|"]
    for name, (sign, bar) in BARS.items():
        values = sorted((r[name] for r in report["ratios"]), reverse=sign == "≥")
        lines.append(
            f"| {name} | {sign} {bar:g} | {statistics.median(values):.2f} | {values[0]:.2f} | {values[-1]:.2f} |"
        )
    lines += ["", "| measured | median |", "|---|---|"]
    for name in report["rounds"][0]:
        lines.append(f"| {name} | {statistics.median(r[name] for r in report['rounds']):,.1f} |")
    return "\n".join(lines) + "\n"


def _data(options: argparse.Namespace, folder: Path) -> tuple[str, Path, Vectors, float]:
    """A collection and queries, with recall@10 at the parameters used."""
    if options.quick:
        random = np.random.default_rng(0)
        centres = random.normal(size=(64, 64))
        base = (centres[random.integers(64, size=8000)] + 0.4 * random.normal(size=(8000, 64))).astype(np.float32)
        queries = (centres[random.integers(64, size=500)] + 0.4 * random.normal(size=(500, 64))).astype(np.float32)
        name, metric = "synthetic-64-l2, 8,000 clustered vectors", "l2"
        truth = np.argsort(((queries[:, None] - base[None]) ** 2).sum(-1), axis=1)[:, :10]
    else:
        name, metric = "minilm-384-cosine", "cosine"
        base = np.load(options.data / f"{name}.base.npy").astype(np.float32)
        queries = np.load(options.data / f"{name}.query.npy").astype(np.float32)
        truth = np.load(options.data / f"{name}.truth.npy")[:, :10]
    collection = options.collection or folder / "docs"
    if not collection.exists():
        print("building the index", file=sys.stderr)
        Collection.build(base, collection, metric=metric, degree=32)  # type: ignore[arg-type]
    with Collection.open(collection) as opened:
        found, _ = opened.index.search(queries, 10, top_m=options.top_m, search_width=options.search_width)
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), truth.tolist(), strict=True)])
    return name, collection, queries, float(recall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/ann"))
    parser.add_argument("--collection", type=Path, help="where the built collection is kept, for another run")
    parser.add_argument("--quick", action="store_true", help="synthetic vectors, one short round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--top-m", type=int, default=128)
    parser.add_argument("--search-width", type=int, default=4)
    parser.add_argument("--prefill-target-ms", type=float, default=0.0, help="pool.prefill_target_s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.seconds = options.seconds or (1.0 if options.quick else 3.0)
    rounds = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name, collection, queries, recall = _data(options, Path(folder))
        bench = Bench(options, collection, queries, stack)
        for number in range(options.rounds):
            rounds.append(bench.round(options.seed + 10 * number))
            print(f"round {number + 1}: {ratios(rounds[-1])}", file=sys.stderr)
    report = {
        "data": f"{name}, recall@10 {recall:.3f} at top_m {options.top_m}, search_width {options.search_width}",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, numpy {np.__version__}; seed {options.seed}, {options.rounds} rounds of "
        f"{options.seconds:g} s, {options.slots} slots, prefill target {options.prefill_target_ms:g} ms",
        "rounds": [{key: round(value, 2) for key, value in found.items()} for found in rounds],
        "ratios": [{key: round(value, 3) for key, value in ratios(found).items()} for found in rounds],
    }
    print(markdown(report))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(markdown(report))


if __name__ == "__main__":
    main()
