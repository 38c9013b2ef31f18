"""The resident kernel against launches of its stages: a single query, all at once, and Poisson arrivals.

Queries arrive at 60% of cuVS's full-batch rate if it was measured, else at 60% of the staged form's.
"""

from contextlib import closing
from typing import Any

import numpy as np

from benchmarks.gpu_check.load_driver import LoadResult, poisson, run_load
from benchmarks.gpu_check.report import Outcome, micros, rate
from benchmarks.gpu_check.sections.load import figures, recall_of, repeated, summary
from benchmarks.gpu_check.setup import Setup
from gpu import Engine

SHARE = 0.6
_FORMS: dict[str, dict[str, Any]] = {
    "staged": {"form": "plain"},
    "resident": {"form": "resident", "extends_per_launch": 1024},
}
_LIMIT_S = 4.0


def check(setup: Setup, outcome: Outcome) -> None:
    """Run the same queries in each form; results must be equal. Raises AssertionError."""
    full, most, singles = (80, 40, 10) if setup.small else (50_000, 400_000, 200)
    stream = repeated(setup.data.queries, full)
    offered, first = setup.offered_per_s, None
    for form in _FORMS:
        with closing(_engine(setup, form, outcome)) as engine:
            run_load(engine, stream[: full // 10], setup.params)
            alone = [run_load(engine, stream[i : i + 1], setup.params).latency_s[0] for i in range(singles)]
            load = run_load(engine, stream, setup.params)
            per_s = load.finished / load.seconds
            offered = offered or SHARE * per_s
            count = min(int(offered * 2), most)
            late = run_load(engine, repeated(stream, count), setup.params, poisson(offered, count), _LIMIT_S)
        host_s = load.host_s / load.finished
        outcome.data[form] = {
            "alone_s": float(np.median(alone)), "per_s": per_s, "host_s": host_s, "stream": figures(late),
        }  # fmt: skip
        outcome.add(f"{form}: one query alone, p50", micros(outcome.data[form]["alone_s"]))
        outcome.add(f"{form}: all at once", f"{rate(per_s)} at recall@10 {recall_of(setup, load):.4f}")
        outcome.add("… of it the host, without waits, a query", micros(host_s) if setup.on_gpu else "skipped: no GPU")
        outcome.add(f"{form}: Poisson at {rate(offered)}", summary(late))
        first = first or load
        _same(first, load, form)


def _engine(setup: Setup, form: str, outcome: Outcome) -> Engine:
    """Open an engine of this form; in a dry run the CPU engine."""
    if not setup.on_gpu:
        return setup.engine()
    engine = setup.cuda_engine(**_FORMS[form])
    if engine.fallback_reason:
        outcome.add(f"{form}: not possible on this device", engine.fallback_reason)
    return engine


def _same(first: LoadResult, load: LoadResult, form: str) -> None:
    same = float(np.mean(load.ids == first.ids))
    assert same > 0.999, f"{form} finds {same:.2%} of the ids that the staged form finds"  # ties may differ
