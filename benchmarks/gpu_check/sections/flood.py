"""Latency of prefill queries through a pool, alone and under a flood of decode queries that exceeds its capacity.

The pool is a node's production pool (sessions, rings, compiled loop, policy, number of slots) in this process, over
this run's index, with the configuration's defaults, r among them: once in the form that the plan selects for an
exclusive GPU, the resident kernel, and once with `pool.form = "launches"`. Prefill queries arrive at random times, at
15% of the pool's capacity; runs alone and under the flood alternate, with the same arrivals, and the medians of their
p99s are compared. The flood is a decode client that always has as many queries outstanding as its ring has slots.
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

from benchmarks.gpu_check.clients import Clients
from benchmarks.gpu_check.load_driver import LoadResult, poisson
from benchmarks.gpu_check.report import Outcome, micros, rate
from benchmarks.gpu_check.sections.load import figures, recall_of
from benchmarks.gpu_check.setup import Setup
from gpu import GraphIndex
from runtime.node.config import parse_config
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.placement.layout import lay_out
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.collections.bulk_load import begin_collection
from runtime.retrieval.collections.description import INDEX, make_folders
from runtime.retrieval.collections.disk import Disk
from runtime.retrieval.collections.segment_build import seal_segment
from runtime.testing.pool import InProcessPool

FORMS = {"auto": "as planned", "launches": "launches"}
_PREFILL_SHARE = 0.15
_ROUNDS = 3
_RING_SLOTS, _SMALL_RING_SLOTS = 2048, 256  # more than an engine's slots, less than a pool's queue of decode queries
_BEFORE_S = 0.05  # for the flood to build up
_LIMIT_S = 3.0


def check(setup: Setup, outcome: Outcome) -> None:
    """Measure both forms. Raises AssertionError if the pool answers a query with an error."""
    for form, name in FORMS.items():
        with pool_over(setup, form) as pool:
            resident = bool(getattr(pool.engine, "resident", False))
            slots = int(pool.metric(PoolMetrics.SLOTS))
            reserve = float(pool.metric(PoolMetrics.RESERVE))
            outcome.add(f"{name}: slots", f"{slots}, {_blocks(resident, setup, pool)}, r = {reserve:g}")
            outcome.data[form] = results = {"resident": resident, "slots": slots, "reserve": reserve}
            with closing(Clients(pool, setup.params, setup.data.queries)) as clients:
                _measure(setup, outcome, clients, name, results)


def _measure(setup: Setup, outcome: Outcome, clients: Clients, name: str, results: dict[str, Any]) -> None:
    seconds, most = (0.02, _SMALL_RING_SLOTS) if setup.small else (0.5, _RING_SLOTS)
    no_arrivals = poisson(1.0, 0)
    clients.run(no_arrivals, most, seconds / 2, _LIMIT_S)  # the pool calibrates its cost estimates
    _, capacity = clients.run(no_arrivals, most, seconds, _LIMIT_S)
    offered = _PREFILL_SHARE * capacity
    outcome.add(f"{name}: decode's flood without prefill", rate(capacity))
    results |= {"capacity_per_s": capacity, "offered_per_s": offered}
    ran: dict[str, list[tuple[LoadResult, float]]] = {"alone": [], "flood": []}
    for number in range(_ROUNDS):
        arrivals = _BEFORE_S + poisson(offered, max(20, int(offered * seconds)), seed=number)
        ran["alone"].append(clients.run(arrivals, 0, 0.0, _LIMIT_S))
        ran["flood"].append(clients.run(arrivals, most, 0.0, _LIMIT_S))
    for what, both in ran.items():
        runs = [one for one, _ in both]
        p99_s = results[f"{what}_p99_s"] = median(map(p99_of, runs))
        results[what] = [{**figures(one), "decode_per_s": per_s} for one, per_s in both]
        text = f"p50 {micros(median(one.percentile(0.5) for one in runs))}, p99 {micros(p99_s)}"
        if late := sum(len(one.latency_s) - one.finished for one in runs):
            text += f", {late} not answered in time"
        shown = f"{name}: prefill at {rate(offered)} alone" if what == "alone" else "… under decode's flood"
        outcome.add(shown, f"{text}, recall@10 {recall_of(setup, runs[0]):.4f}")
    decode = results["decode_per_s"] = median(per_s for _, per_s in ran["flood"])
    share = decode / (capacity - offered)
    outcome.add("… decode queries answered meanwhile", f"{rate(decode)}, {share:.0%} of the rate that prefill leaves")


def p99_of(load: LoadResult) -> float:
    """Return the p99 over all queries: infinite if more than 1% have no answer."""
    latency = sorted(float("inf") if one != one else float(one) for one in load.latency_s)
    return latency[int(0.99 * len(latency))]


def _blocks(resident: bool, setup: Setup, pool: InProcessPool) -> str:
    if not setup.on_gpu:
        return "on the CPU"
    reason = getattr(pool.engine, "fallback_reason", "")
    return "resident kernel" if resident else f"launches{f' ({reason})' if reason else ''}"


@contextmanager
def pool_over(setup: Setup, form: str) -> Iterator[InProcessPool]:
    """Open a pool over the run's index with this `pool.form` for the duration of the block."""
    with tempfile.TemporaryDirectory() as folder:
        _save(setup.index, Path(folder))
        pool = InProcessPool(_plan(setup, form, folder), make_arena=lambda worker, dim: None)
        try:
            yield pool
        finally:
            pool.close()
            pool.table.close()


def _save(index: GraphIndex, folder: Path) -> None:
    """Write the index as a collection."""
    make_folders(folder)
    place = folder / "segments" / "0"
    index.save(place / INDEX)
    segment = seal_segment(Disk(), place, index.size)
    described = {"dim": index.dim, "metric": index.metric, "dtype": index.dtype, "degree": index.degree}
    begin_collection(Disk(), folder, [segment], index.size, {}, embedder=None, **described)


def _plan(setup: Setup, form: str, folder: str) -> NodePlan:
    """Return the plan of a node with only this pool, on an exclusive GPU."""
    pool = {
        "devices": [setup.device],
        "form": form,
        "top_m": setup.params.top_m,
    }
    docs = {"name": "docs", "path": folder, "verify": "never"}
    plan = lay_out(parse_config({"pool": pool, "collections": [docs]}))
    workers = tuple(replace(one, exclusive_gpu=setup.on_gpu) for one in plan.workers)
    return replace(plan, workers=workers, ring_slots=_SMALL_RING_SLOTS if setup.small else _RING_SLOTS)
