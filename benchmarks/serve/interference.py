"""Interference between concurrent requests on a running node, fitted to chats without retrieval at one load.

Sequential requests do not show it, and prompts concurrent with probing rows would include the cost of probes. The load
is about that at which requests begin to be late; results at other loads are predictions of the simulator. The
additional time of decode steps is attributed to work of frontend and client for each request on decode's core:
attributed to concurrent prefill instead, it would predict a larger spread of token times than measured.
"""

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
from msgspec.structs import replace

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, closed_loop
from benchmarks.serve.service_times import bisect
from benchmarks.serve.system import System
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload

_REQUESTS, _TOGETHER = 400, 8


def replay(
    system: System, times: ServiceTimes, bodies: Sequence[Body], outcomes: Sequence[Outcome]
) -> list[SimRequest]:
    """Simulate the same requests at the same times. They share no prefix; their blocks are written to KV tiers."""
    assert system.plan.config.own_model is not None
    tokens = system.plan.config.own_model.kv_block_tokens
    begin = min(outcome.sent_s for outcome in outcomes)
    arrivals = []
    for number, (body, outcome) in enumerate(zip(bodies, outcomes, strict=True)):
        blocks = tuple(range(number << 16, (number << 16) + len(body["prompt"]) // tokens))
        arrivals.append(Arrival(outcome.sent_s - begin, len(body["prompt"]), body["max_tokens"], blocks, tokens))
    simulation = Simulation(Setup(config=system.plan.config, times=times, workload=Workload(retrieval=False)), arrivals)
    simulation.run()
    return simulation.requests


def fit_interference(bench: Bench, system: System, times: ServiceTimes) -> ServiceTimes:
    """Return `times` with the cost of a request for decode's steps, and with slower passes and hand-overs."""
    shape, random = bench.shape, np.random.default_rng(bench.seed + 5)
    bodies = [
        bench.body(random, max(8, round(shape.prompt_tokens * random.lognormal(-0.32, 0.8))), shape.output_tokens)
        for _ in range(bench.count(_REQUESTS))
    ]
    found = sorted(zip(closed_loop(system.url, bodies, _TOGETHER), bodies, strict=True), key=lambda one: one[0].sent_s)
    outcomes, bodies = [outcome for outcome, _ in found], [body for _, body in found]
    if codes := sorted({outcome.code for outcome in outcomes if not outcome.completed}):
        raise SystemExit(f"service times cannot be fitted: requests ended with {codes}")

    def simulated(span: Callable[[SimRequest], float]) -> Callable[[ServiceTimes], float]:
        return lambda tried: median(span(request) for request in replay(system, tried, bodies, outcomes))

    def real(stage: str) -> float:
        return median(outcome.timings[stage] for outcome in outcomes)

    times = replace(times, decode_beside=1.0)
    for _ in range(2):  # the parameters are weakly coupled
        times = bisect(times, "request_core_s", (0.0, 20e-3), real("tpot"), simulated(lambda one: one.tpot_s))
        times = bisect(
            times, "prefill_beside", (1.0, 2.0), real("prefill"),
            simulated(lambda one: (one.prefilled_ns - one.begun_ns) / 1e9),
        )  # fmt: skip
        times = bisect(
            times, "link_s", (0.0, 20e-3), real("handover"),
            simulated(lambda one: (one.first_token_ns - one.prefilled_ns) / 1e9),
        )  # fmt: skip
    return times
