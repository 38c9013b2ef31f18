"""Where the pool is: in a place of its own, beside prefill, beside decode, beside both; on a real node and simulated.

Two cores: prefill has the first and decode the last. A pool of its own may use both, a pool beside a worker has that
one's core. All nodes are up at once and have their turn at each load, before whatever else runs. The simulated node has
the times that `trinity calibrate` measures, and no frontend, client or HTTP.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, offer
from benchmarks.serve.fitted import EVERY, Waits
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.sections.goodput import ATTAINMENT, Curve, Kind, goodput
from runtime.node.config import NodeConfig
from runtime.simulator.node import Simulation
from runtime.simulator.plan import PLACEMENTS
from runtime.simulator.setup import Setup
from runtime.simulator.times.calibrate import calibrate
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload

_LOADS = (0.4, 0.6, 0.8, 1.0)
_SHOWN = 1  # the load whose times are told
_SECONDS = 8.0
_DEAR = {"top_m": 512, "search_width": 1}


def shipped(bench: Bench) -> Section:
    """Searches as they are by default."""
    return _compared(bench, "placements", {})


def dear(bench: Bench) -> Section:
    """Searches that take some hundred extends."""
    return _compared(bench, "placements-dear", _DEAR)


def _compared(bench: Bench, name: str, searches: dict[str, Any]) -> Section:
    """The same requests at the same times, with passages and probes; limits from a pool with a place of its own."""
    section = Section(name, "")
    real: dict[str, Curve] = {placement: [] for placement in PLACEMENTS}
    simulated: dict[str, Curve] = {placement: [] for placement in PLACEMENTS}
    with ExitStack() as up:
        stands = {
            placement: up.enter_context(bench.stand("node", models_last=True, pool=searches | {"placement": placement}))
            for placement in PLACEMENTS
        }
        times = calibrate(stands["own"].plan.config, ServiceTimes())
        kind = Kind(bench, stands["own"], retrieval={"collection": "docs", "k": 4, "every_tokens": EVERY})
        for number, load in enumerate(_LOADS):
            rate = load * kind.told["capacity_per_s"]
            for placement, stand in stands.items():
                timed = kind.load(rate, bench.seconds(_SECONDS), bench.seed + 100)
                before = Waits.so_far(stand)
                found = offer(stand.url, timed, kind.patience_s)
                met = [kind.met(body, outcome) for (_, body), outcome in zip(timed, found, strict=True)]
                real[placement].append((rate, fmean(met)))
                simulated[placement].append((rate, _simulated(stand.plan.config, times, kind, timed, found)))
                if number == _SHOWN:
                    wait_s = Waits.so_far(stand).mean_s(before)
                    section.measures += _times(placement, [outcome for outcome in found if outcome.whole], wait_s)
    section.text = (
        f"Limits: TTFT {kind.ttft_s * 1e3:.0f} ms, TPOT {kind.tpot_s * 1e3:.1f} ms. Goodput is the load at which "
        f"{ATTAINMENT:.0%} of the sent requests meet both, between the loads tried by a straight line. Times at "
        f"{_LOADS[_SHOWN]:.0%} of what a node that has enough to do answers. Simulated with calibrated times."
    )
    for placement in PLACEMENTS:
        section.measures += [
            Measure(f"{placement}: goodput", goodput(real[placement]), "requests/s"),
            Measure(f"{placement}: goodput, simulated", goodput(simulated[placement]), "requests/s"),
        ]
    section.curves = {"real: requests/s, attainment": real, "simulated: requests/s, attainment": simulated}
    section.details = kind.told | {"searches": searches}
    return section


def _times(placement: str, found: Sequence[Outcome], wait_s: float) -> list[Measure]:
    measures = [
        Measure(f"{placement}: {name.upper()} p{q}", percentile([o.timings[name] for o in found], q) * 1e3, "ms")
        for name in ("ttft", "tpot")
        for q in (50, 95)
    ]
    return [*measures, Measure(f"{placement}: mean wait for a slot", wait_s * 1e6, "µs")]


def _simulated(
    config: NodeConfig,
    times: ServiceTimes,
    kind: Kind,
    timed: Sequence[tuple[float, Body]],
    found: Sequence[Outcome],
) -> float:
    """The share of the same requests that the simulated node would have answered within the same limits."""
    begin = min(outcome.sent_s for outcome in found)
    prompt = [len(outcome.prompt) or len(body["prompt"]) for (_, body), outcome in zip(timed, found, strict=True)]
    arrivals = [
        Arrival(outcome.sent_s - begin, tokens, body["max_tokens"])
        for (_, body), outcome, tokens in zip(timed, found, prompt, strict=True)
    ]
    workload = Workload(probe_every_tokens=EVERY)
    config = replace(config, http=replace(config.http, max_in_flight=100_000))
    simulation = Simulation(Setup(config=config, times=times, workload=workload), arrivals)
    simulation.run()
    return sum(one.met(kind.ttft_s, kind.tpot_s) for one in simulation.requests) / len(arrivals)
