"""Is the simulated node's goodput the real one's? Attainment by load: the same requests at the same times through both.

Service times are fitted to requests that have the node to themselves (`fitted`); what requests do to each other is the
simulator's own. Prefill has one core and decode the other, always apart. Frontend, pool and client go before both of
them, and have no core of their own here, as they have where a model has GPUs: what they take for a request, counted at
the least load, makes everything that the models do longer at the others.
"""

import time
from collections.abc import Sequence
from math import inf
from operator import and_
from statistics import fmean

from msgspec.structs import replace

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, offer
from benchmarks.serve.fitted import fitted
from benchmarks.serve.report import Measure, Section
from benchmarks.serve.sections.goodput import ATTAINMENT, Curve, Kind, goodput
from benchmarks.serve.stand import Stand
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.stages.request import FINISHED
from runtime.simulator.times.calibrate import calibrate
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload

_LOADS = (0.3, 0.45, 0.6, 0.75, 0.9, 1.05)
_SECONDS = 10.0
_CORES = 2
Spent = tuple[float, float]  # TTFT and TPOT of a request in s; endless if it was not answered
_COSTS = (
    "prefill_pass_s", "prefill_token_s", "prefill_behind_s", "prefill_pair_s", "prompt_s",
    "decode_step_s", "decode_row_s", "decode_context_s", "link_s",
)  # fmt: skip


def run(bench: Bench) -> Section:
    """Chats without retrieval at each load."""
    real: Curve = []
    simulated: Curve = []
    beside: Curve = []
    limits: dict[str, list[list[float]]] = {}  # shares that keep TTFT, and TPOT, of each of the three
    cores: dict[str, list[float]] = {}  # used by prefill and decode; frontend, pool and client; others
    light_s = 0.0  # of frontend, pool and client for a request
    with bench.stand("node", models_last=True, handover={"disaggregate": "always"}) as stand:
        times = fitted(bench, stand, calibrate(stand.plan.config, ServiceTimes()))
        kind = Kind(bench, stand)
        capacity = kind.told["capacity_per_s"]
        for load in _LOADS:
            timed = kind.load(load * capacity, bench.seconds(_SECONDS), bench.seed + 100)
            before, begin_s = stand.used_s(), time.monotonic()
            found = offer(stand.url, timed, kind.patience_s)
            used = [now - then for now, then in zip(stand.used_s(), before, strict=True)]
            cores[f"{load * capacity:.1f}/s"] = [each / (time.monotonic() - begin_s) for each in used]
            light_s = light_s or used[1] / len(found)
            slowed = _slowed(times, 1 - load * capacity * light_s / _CORES)
            rows = (
                _shares(kind, [_told(outcome) for outcome in found]),
                _shares(kind, _simulated(stand, times, timed, found)),
                _shares(kind, _simulated(stand, slowed, timed, found)),
            )
            for line, shares in zip((real, simulated, beside), rows, strict=True):
                line.append((load * capacity, shares[0]))
            limits[f"{load * capacity:.1f}/s"] = [list(shares[1:]) for shares in rows]
    ours, theirs = goodput(beside), goodput(real)
    section = Section(
        "curves",
        f"The share of the requests that keep TTFT {kind.ttft_s * 1e3:.0f} ms and TPOT {kind.tpot_s * 1e3:.1f} ms, "
        f"and the load at which {ATTAINMENT:.0%} do; one prefill and one decode worker, always apart. Who has waited "
        f"{kind.patience_s:.1f} s hangs up, in reality.",
    )
    section.measures = [
        Measure("real goodput", theirs, "requests/s"),
        Measure(
            "simulated goodput, as if frontend, pool and client had cores of their own",
            goodput(simulated),
            "requests/s",
        ),
        Measure("simulated goodput, with what they take of the two cores", ours, "requests/s"),
        Measure("frontend, pool and client, of a request", light_s * 1e3, "ms"),
        Measure("off by", abs(ours / theirs - 1) if theirs else float("inf"), "", "≤", 0.15),
        Measure(
            "greatest difference of the curves",
            max(abs(ours - theirs) for (_, ours), (_, theirs) in zip(beside, real, strict=True)),
        ),
    ]
    section.curves = {
        "real and simulated: requests/s, attainment": {
            "real": real,
            "simulated": beside,
            "simulated, more cores": simulated,
        }
    }
    section.details = kind.told | {
        "TTFT kept, TPOT kept: real, simulated with more cores, simulated": limits,
        "cores: prefill and decode, light processes, others": cores,
        "times": {n: getattr(times, n) for n in times.__struct_fields__ if n != "roofline"},
    }
    return section


def _slowed(times: ServiceTimes, share: float) -> ServiceTimes:
    """What prefill and decode do, with this share of their cores."""
    longer = {name: getattr(times, name) / share for name in _COSTS}
    return replace(times, **longer)


def _simulated(
    stand: Stand, times: ServiceTimes, timed: Sequence[tuple[float, Body]], found: Sequence[Outcome]
) -> list[Spent]:
    """What the same requests take on the simulated node."""
    begin = min(outcome.sent_s for outcome in found)
    arrivals = [
        Arrival(outcome.sent_s - begin, len(body["prompt"]), body["max_tokens"])
        for (_, body), outcome in zip(timed, found, strict=True)
    ]
    setup = Setup(config=stand.plan.config, times=times, workload=Workload(retrieval=False))
    simulation = Simulation(setup, arrivals)
    simulation.run()
    return [(one.ttft_s, one.tpot_s) if one.outcome == FINISHED else (inf, inf) for one in simulation.requests]


def _told(outcome: Outcome) -> Spent:
    timings = outcome.timings
    return (timings["ttft"], timings.get("tpot", 0.0)) if outcome.whole else (inf, inf)


def _shares(kind: Kind, spent: Sequence[Spent]) -> tuple[float, float, float]:
    """Of the requests: that keep both limits, that of the first token, that of the others."""
    first = [ttft_s <= kind.ttft_s for ttft_s, _ in spent]
    rest = [tpot_s <= kind.tpot_s for _, tpot_s in spent]
    return fmean(map(and_, first, rest)), fmean(first), fmean(rest)
