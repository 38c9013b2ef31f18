"""Goodput of the simulated and the real node: SLO attainment by load, with the same requests at the same times.

Service times are fitted to requests that have the node to themselves (`service_times`), and the mutual slowdown of
prefill and decode to chats at one load (`interference`); other loads are predictions of the simulator. Prefill has one
core; decode shares the other with frontend, pool and client, which have priority: their cost per token is part of the
fitted steps, and prompts have their core to themselves, as both models have on GPUs.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from operator import and_
from statistics import fmean
from typing import TypeVar

import numpy as np

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, open_loop
from benchmarks.serve.interference import fit_interference, replay
from benchmarks.serve.report import Measure, Section
from benchmarks.serve.sections.goodput import ATTAINMENT, Curve, RequestProfile, goodput
from benchmarks.serve.service_times import fit_service_times
from benchmarks.serve.system import System
from runtime.simulator.stages.request import FINISHED, SimRequest
from runtime.simulator.times.calibrate import calibrate
from runtime.simulator.times.service import ServiceTimes

_LOADS = (0.3, 0.5, 0.65, 0.8, 0.95, 1.1)
_OTHERS, _TRIES = 0.1, 3  # maximum cores used by others before a repetition; maximum number of tries
_SECONDS = 10.0
_STAGES = ("queue", "admission", "prefill", "handover", "ttft", "tpot")
T = TypeVar("T")
Spans = dict[str, float]  # stage times of a request in s; empty if it was not answered


def run(bench: Bench) -> Section:
    """Run chats without retrieval at each load."""
    curves: dict[str, Curve] = {"real": [], "simulated": []}
    kept: dict[str, dict[str, tuple[float, float]]] = {}
    stages: dict[str, dict[str, dict[str, list[float]]]] = {}
    cores: dict[str, list[float]] = {}
    with bench.system(
        "node",
        models_last=True,
        light_core=max(os.sched_getaffinity(0)),  # decode's
        handover={"disaggregate": "always"},
    ) as system:
        base = calibrate(system.plan.config, ServiceTimes())
        times, _ = _least_disturbed(system, lambda: fit_service_times(bench, system, base))
        times, _ = _least_disturbed(system, partial(fit_interference, bench, system, times))
        profile = RequestProfile(bench, system)
        capacity = profile.details["capacity_per_s"]
        for load in _LOADS:
            rate = f"{load * capacity:.1f}/s"
            (timed, found), cores[rate] = _least_disturbed(
                system, partial(_trial, profile, system, load * capacity, bench.seconds(_SECONDS), bench.seed + 100)
            )
            both = {
                "real": [_timings_of(outcome) for outcome in found],
                "simulated": [_spans(one) for one in replay(system, times, [body for _, body in timed], found)],
            }
            kept[rate] = {}
            for name, spans in both.items():
                met, first, rest = _shares(profile, spans)
                kept[rate][name] = first, rest
                curves[name].append((load * capacity, met))
            stages[rate] = {
                stage: {name: _quartiles(spans, stage) for name, spans in both.items()} for stage in _STAGES
            }
    ours, theirs = goodput(curves["simulated"]), goodput(curves["real"])
    section = Section(
        "curves",
        f"The share of requests that meet TTFT {profile.ttft_s * 1e3:.0f} ms and TPOT {profile.tpot_s * 1e3:.1f} ms, "
        f"and the load at which {ATTAINMENT:.0%} do; one prefill and one decode worker, always disaggregated. Real "
        f"clients disconnect after {profile.timeout_s:.1f} s. "
        f"Others used at most {max(used[2] for used in cores.values()):.2f} cores.",
    )
    section.measures = [
        Measure("real goodput", theirs, "requests/s"),
        Measure("simulated goodput", ours, "requests/s"),
        Measure("off by", abs(ours / theirs - 1) if theirs else inf, "", "≤", 0.15),
        Measure(
            "greatest difference of the curves",
            max(abs(a - b) for (_, a), (_, b) in zip(curves["simulated"], curves["real"], strict=True)),
        ),
    ]
    section.curves = {"real and simulated: requests/s, attainment": curves}
    section.details = profile.details | {
        "TTFT kept, TPOT kept": kept,
        "stages, ms: quartiles": stages,
        "cores: prefill and decode, light processes, others": cores,
        "times": {n: getattr(times, n) for n in times.__struct_fields__ if n != "roofline"},
    }
    return section


def _trial(
    profile: RequestProfile, system: System, rate: float, seconds: float, seed: int
) -> tuple[list[tuple[float, Body]], list[Outcome]]:
    """Send requests with uncached prompts; return them and their outcomes."""
    timed = profile.load(rate, seconds, seed)
    return timed, open_loop(system.url, timed, profile.timeout_s)


def _least_disturbed(system: System, run: Callable[[], T]) -> tuple[T, list[float]]:
    """Return the least disturbed try, and the cores used by the models, the light processes and others."""
    tries: list[tuple[T, list[float]]] = []
    while not tries or (tries[-1][1][2] > _OTHERS and len(tries) < _TRIES):
        before, begin_s = system.used_s(), time.monotonic()
        found = run()
        passed_s = time.monotonic() - begin_s
        tries.append((found, [(now - then) / passed_s for now, then in zip(system.used_s(), before, strict=True)]))
    return min(tries, key=lambda one: one[1][2])


def _spans(request: SimRequest) -> Spans:
    if request.outcome != FINISHED:
        return {}
    moments = (request.received_ns, request.taken_ns, request.begun_ns, request.prefilled_ns, request.first_token_ns)
    between = [(later - sooner) / 1e9 for sooner, later in pairwise(moments)]
    return dict(zip(_STAGES, (*between, request.ttft_s, request.tpot_s), strict=True))


def _timings_of(outcome: Outcome) -> Spans:
    return {stage: outcome.timings.get(stage, 0.0) for stage in _STAGES} if outcome.completed else {}


def _quartiles(requests: Sequence[Spans], stage: str) -> list[float]:
    """Return quartiles and p90 in ms over the answered requests."""
    found = [spans[stage] * 1e3 for spans in requests if spans]
    return [round(float(value), 2) for value in np.percentile(found, (25, 50, 75, 90))] if found else []


def _shares(profile: RequestProfile, requests: Sequence[Spans]) -> tuple[float, float, float]:
    """Return the shares of requests that meet both limits, the TTFT limit, and the TPOT limit."""
    first = [spans.get("ttft", inf) <= profile.ttft_s for spans in requests]
    rest = [spans.get("tpot", inf) <= profile.tpot_s for spans in requests]
    return fmean(map(and_, first, rest)), fmean(first), fmean(rest)
