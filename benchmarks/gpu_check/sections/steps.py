"""Cost of a step by bucket and launch form, and the host's share."""

from contextlib import closing
from typing import Any

import numpy as np

from benchmarks.gpu_check.device_times import copy_bytes_s
from benchmarks.gpu_check.load_driver import LoadResult, run_load
from benchmarks.gpu_check.report import Outcome, micros
from benchmarks.gpu_check.setup import Setup
from runtime.pool.sizing import LOOP_NS, measure

_LAUNCH = 16  # extends per launch, in forms with several


def check(setup: Setup, outcome: Outcome) -> None:
    """Measure extend times, their bandwidth, the host's time, and launches of several extends."""
    copy = copy_bytes_s(setup.device)
    outcome.add("copy, bytes read and written", f"{2 * copy / 1e9:,.0f} GB/s")
    queries = np.tile(setup.data.queries, (2, 1))[: 40 if setup.small else 4 * setup.slots]
    with closing(setup.engine()) as engine:
        index, params, backend = setup.index, setup.params, engine.backend()
        number = backend.number("docs")
        times = measure(backend, index.data, number, params.top_m, params.search_width, engine.free_slots)
        slot_bytes = params.search_width * index.degree * (4 + int(index.data.rows.codes.strides[0]))
        for one in times:
            seconds = (one.extend_ns - LOOP_NS) / 1e9
            used = one.active * slot_bytes / seconds / (2 * copy)
            what = f"{micros(seconds)}, {used:.1%} of the copy if every edge's vector is read"
            outcome.add(f"extend of {one.active} slots", what)
        outcome.data |= {"extends": [one._asdict() for one in times], "forms": {}}
        shipped = run_load(engine, queries, setup.params)
    step_s, query_s = shipped.host_s / shipped.steps, shipped.host_s / shipped.finished
    for what, seconds in (("host time a step, all slots in use", step_s), ("… a query", query_s)):
        outcome.add(what, micros(seconds) if setup.on_gpu else "skipped: no GPU")
    outcome.data["forms"]["shipped"] = _form(shipped)
    for form, limit in (("plain", 1), ("loop", _LAUNCH)):
        what = f"{limit} extends a launch, {form}"
        if not setup.on_gpu:
            outcome.add(what, "skipped: no GPU")
            continue
        with closing(setup.cuda_engine(extends_per_launch=limit, form=form)) as tuned:
            made, reason = sorted(set(tuned.forms.values())), tuned.fallback_reason
            load = run_load(tuned, queries, setup.params)
        with closing(setup.cuda_engine(1, extends_per_launch=limit, form=form)) as single:
            alone = run_load(single, queries[:50], setup.params)
        same = float(np.mean(load.ids == shipped.ids))
        what += "" if made == [form] else f" (the device gave {', '.join(made)}: {reason})"
        outcome.add(what, f"{load.finished / load.seconds:,.0f} queries/s, {same:.1%} same ids as shipped")
        outcome.add(f"… one query at a time, {form}, p50", micros(float(np.median(np.diff(_ends(alone))))))
        outcome.data["forms"][form] = {**_form(load), "made": made, "same_ids": same}


def _ends(load: LoadResult) -> Any:
    """Return the finish times of queries in a single slot, all of which arrived at the start."""
    return np.sort(load.latency_s[np.isfinite(load.latency_s)])


def _form(load: LoadResult) -> dict[str, float]:
    return {
        "queries_per_s": load.finished / load.seconds,
        "steps": load.steps,
        "extends": load.extends,
        "host_s": load.host_s,
        "seconds": load.seconds,
    }
