"""Is the simulated node's goodput the real one's? Attainment by load: the same requests at the same times through both.

Service times are fitted to requests that have the node to themselves (`fitted`), and what prefill and decode take
longer beside each other to chats at one load (`mixed`); what other loads do is the simulator's own. Prefill has one
core; decode has the other, with frontend, pool and client, which go before it: so what these take for a token is a
part of the steps that are fitted, and prompts have their core to themselves, as both models have on GPUs.
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
from benchmarks.serve.client import Body, Outcome, offer
from benchmarks.serve.fitted import fitted
from benchmarks.serve.mixed import beside, replay
from benchmarks.serve.report import Measure, Section
from benchmarks.serve.sections.goodput import ATTAINMENT, Curve, Kind, goodput
from benchmarks.serve.stand import Stand
from runtime.simulator.stages.request import FINISHED, SimRequest
from runtime.simulator.times.calibrate import calibrate
from runtime.simulator.times.service import ServiceTimes

_LOADS = (0.3, 0.5, 0.65, 0.8, 0.95, 1.1)
_OTHERS, _TRIES = 0.1, 3  # cores that others may use meanwhile, or it is done again; so often in all
_SECONDS = 10.0
_STAGES = ("queue", "admission", "prefill", "handover", "ttft", "tpot")
T = TypeVar("T")
Spans = dict[str, float]  # of a request, in s by stage; without any if it was not answered


def run(bench: Bench) -> Section:
    """Chats without retrieval at each load."""
    curves: dict[str, Curve] = {"real": [], "simulated": []}
    kept: dict[str, dict[str, tuple[float, float]]] = {}
    stages: dict[str, dict[str, dict[str, list[float]]]] = {}
    cores: dict[str, list[float]] = {}
    with bench.stand(
        "node",
        models_last=True,
        light_core=max(os.sched_getaffinity(0)),  # decode's
        handover={"disaggregate": "always"},
    ) as stand:
        base = calibrate(stand.plan.config, ServiceTimes())
        times, _ = _least_disturbed(stand, lambda: fitted(bench, stand, base))
        times, _ = _least_disturbed(stand, partial(beside, bench, stand, times))
        kind = Kind(bench, stand)
        capacity = kind.told["capacity_per_s"]
        for load in _LOADS:
            rate = f"{load * capacity:.1f}/s"
            (timed, found), cores[rate] = _least_disturbed(
                stand, partial(_play, kind, stand, load * capacity, bench.seconds(_SECONDS), bench.seed + 100)
            )
            both = {
                "real": [_told(outcome) for outcome in found],
                "simulated": [_spans(one) for one in replay(stand, times, [body for _, body in timed], found)],
            }
            kept[rate] = {}
            for name, spans in both.items():
                met, first, rest = _shares(kind, spans)
                kept[rate][name] = first, rest
                curves[name].append((load * capacity, met))
            stages[rate] = {
                stage: {name: _quartiles(spans, stage) for name, spans in both.items()} for stage in _STAGES
            }
    ours, theirs = goodput(curves["simulated"]), goodput(curves["real"])
    section = Section(
        "curves",
        f"The share of the requests that keep TTFT {kind.ttft_s * 1e3:.0f} ms and TPOT {kind.tpot_s * 1e3:.1f} ms, "
        f"and the load at which {ATTAINMENT:.0%} do; one prefill and one decode worker, always apart. Who has waited "
        f"{kind.patience_s:.1f} s hangs up, in reality. "
        f"Others used {max(used[2] for used in cores.values()):.2f} cores at most.",
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
    section.details = kind.told | {
        "TTFT kept, TPOT kept": kept,
        "stages, ms: quartiles": stages,
        "cores: prefill and decode, light processes, others": cores,
        "times": {n: getattr(times, n) for n in times.__struct_fields__ if n != "roofline"},
    }
    return section


def _play(
    kind: Kind, stand: Stand, rate: float, seconds: float, seed: int
) -> tuple[list[tuple[float, Body]], list[Outcome]]:
    """Requests that no cache has the prompts of, whenever it is played; their outcomes."""
    timed = kind.load(rate, seconds, seed)
    return timed, offer(stand.url, timed, kind.patience_s)


def _least_disturbed(stand: Stand, run: Callable[[], T]) -> tuple[T, list[float]]:
    """What counts of some tries, and the cores that the models, the light processes and others used meanwhile."""
    tries: list[tuple[T, list[float]]] = []
    while not tries or (tries[-1][1][2] > _OTHERS and len(tries) < _TRIES):
        before, begin_s = stand.used_s(), time.monotonic()
        found = run()
        passed_s = time.monotonic() - begin_s
        tries.append((found, [(now - then) / passed_s for now, then in zip(stand.used_s(), before, strict=True)]))
    return min(tries, key=lambda one: one[1][2])


def _spans(request: SimRequest) -> Spans:
    if request.outcome != FINISHED:
        return {}
    moments = (request.received_ns, request.taken_ns, request.begun_ns, request.prefilled_ns, request.first_token_ns)
    between = [(later - sooner) / 1e9 for sooner, later in pairwise(moments)]
    return dict(zip(_STAGES, (*between, request.ttft_s, request.tpot_s), strict=True))


def _told(outcome: Outcome) -> Spans:
    return {stage: outcome.timings.get(stage, 0.0) for stage in _STAGES} if outcome.whole else {}


def _quartiles(requests: Sequence[Spans], stage: str) -> list[float]:
    """In ms, of those that were answered."""
    found = [spans[stage] * 1e3 for spans in requests if spans]
    return [round(float(value), 2) for value in np.percentile(found, (25, 50, 75, 90))] if found else []


def _shares(kind: Kind, requests: Sequence[Spans]) -> tuple[float, float, float]:
    """Of the requests: that keep both limits, that of the first token, that of the others."""
    first = [spans.get("ttft", inf) <= kind.ttft_s for spans in requests]
    rest = [spans.get("tpot", inf) <= kind.tpot_s for spans in requests]
    return fmean(map(and_, first, rest)), fmean(first), fmean(rest)
