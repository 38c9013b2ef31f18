"""Placement of the pool: on its own, with prefill, with decode, or with both; on a real node and simulated.

Two cores: prefill has the first and decode the last. A pool of its own may use both; a coupled pool has its worker's
core. All nodes run at the same time and are measured alternately at each load, with priority over other processes. The
simulated node has the service times measured by `trinity calibrate`, and no frontend, client or HTTP.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, open_loop
from benchmarks.serve.report import Measure, Section, percentile
from benchmarks.serve.sections.goodput import ATTAINMENT, Curve, RequestProfile, goodput
from benchmarks.serve.service_times import EVERY, SlotWaits
from runtime.node.config import NodeConfig
from runtime.simulator.node import Simulation
from runtime.simulator.plan import PLACEMENTS
from runtime.simulator.setup import Setup
from runtime.simulator.times.calibrate import calibrate
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload

_LOADS = (0.4, 0.6, 0.8, 1.0)
_SHOWN = 1  # index of the load whose times are reported
_SECONDS = 8.0
_EXPENSIVE = {"top_m": 512, "search_width": 1}


def shipped(bench: Bench) -> Section:
    """Searches with default parameters."""
    return _compare(bench, "placements", {})


def dear(bench: Bench) -> Section:
    """Expensive searches, of some hundred extends."""
    return _compare(bench, "placements-dear", _EXPENSIVE)


def _compare(bench: Bench, name: str, searches: dict[str, Any]) -> Section:
    """Send the same requests with passages and probes at the same times; the limits are those of the pool on its
    own."""
    section = Section(name, "")
    real: dict[str, Curve] = {placement: [] for placement in PLACEMENTS}
    simulated: dict[str, Curve] = {placement: [] for placement in PLACEMENTS}
    with ExitStack() as up:
        systems = {
            placement: up.enter_context(
                bench.system("node", models_last=True, pool=searches | {"placement": placement})
            )
            for placement in PLACEMENTS
        }
        times = calibrate(systems["own"].plan.config, ServiceTimes())
        profile = RequestProfile(bench, systems["own"], retrieval={"collection": "docs", "k": 4, "every_tokens": EVERY})
        for number, load in enumerate(_LOADS):
            rate = load * profile.details["capacity_per_s"]
            for placement, system in systems.items():
                timed = profile.load(rate, bench.seconds(_SECONDS), bench.seed + 100)
                before = SlotWaits.read(system)
                found = open_loop(system.url, timed, profile.timeout_s)
                met = [profile.met(body, outcome) for (_, body), outcome in zip(timed, found, strict=True)]
                real[placement].append((rate, fmean(met)))
                simulated[placement].append((rate, _simulated(system.plan.config, times, profile, timed, found)))
                if number == _SHOWN:
                    wait_s = SlotWaits.read(system).mean_s(before)
                    section.measures += _times(placement, [outcome for outcome in found if outcome.completed], wait_s)
    section.text = (
        f"Limits: TTFT {profile.ttft_s * 1e3:.0f} ms, TPOT {profile.tpot_s * 1e3:.1f} ms. Goodput is the load at which "
        f"{ATTAINMENT:.0%} of the sent requests meet both, interpolated linearly between the measured loads. Times at "
        f"{_LOADS[_SHOWN]:.0%} of the saturated node's throughput. Simulated with calibrated times."
    )
    for placement in PLACEMENTS:
        section.measures += [
            Measure(f"{placement}: goodput", goodput(real[placement]), "requests/s"),
            Measure(f"{placement}: goodput, simulated", goodput(simulated[placement]), "requests/s"),
        ]
    section.curves = {"real: requests/s, attainment": real, "simulated: requests/s, attainment": simulated}
    section.details = profile.details | {"searches": searches}
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
    profile: RequestProfile,
    timed: Sequence[tuple[float, Body]],
    found: Sequence[Outcome],
) -> float:
    """Return the share of the same requests that the simulated node answers within the same limits."""
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
    return sum(one.met(profile.ttft_s, profile.tpot_s) for one in simulation.requests) / len(arrivals)
