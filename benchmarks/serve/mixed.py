"""What requests cost each other on a running node, fitted to chats as they come, some at once.

Requests alone say nothing of it, and prompts beside rows that probe say what probes cost too. These are without
retrieval, at one load, about that at which requests begin to be late; what the simulator makes of other loads is its
own. What a step takes longer is all taken for work of frontend and client, on decode's core, of which each request that
comes has some: taken for a longer step while prefill is at work, it spreads the times of tokens more than is found.
"""

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
from msgspec.structs import replace

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, at_once
from benchmarks.serve.fitted import solved
from benchmarks.serve.stand import Stand
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload

_REQUESTS, _TOGETHER = 400, 8


def replay(stand: Stand, times: ServiceTimes, bodies: Sequence[Body], outcomes: Sequence[Outcome]) -> list[SimRequest]:
    """The same requests at the same times on the simulated node. They share nothing; their blocks are written to KV
    tiers."""
    assert stand.plan.config.own_model is not None
    tokens = stand.plan.config.own_model.kv_block_tokens
    begin = min(outcome.sent_s for outcome in outcomes)
    arrivals = []
    for number, (body, outcome) in enumerate(zip(bodies, outcomes, strict=True)):
        blocks = tuple(range(number << 16, (number << 16) + len(body["prompt"]) // tokens))
        arrivals.append(Arrival(outcome.sent_s - begin, len(body["prompt"]), body["max_tokens"], blocks, tokens))
    simulation = Simulation(Setup(config=stand.plan.config, times=times, workload=Workload(retrieval=False)), arrivals)
    simulation.run()
    return simulation.requests


def beside(bench: Bench, stand: Stand, times: ServiceTimes) -> ServiceTimes:
    """`times` with what a request that comes takes decode's steps, and longer passes and hand-overs."""
    shape, random = bench.shape, np.random.default_rng(bench.seed + 5)
    bodies = [
        bench.body(random, max(8, round(shape.prompt_tokens * random.lognormal(-0.32, 0.8))), shape.output_tokens)
        for _ in range(bench.count(_REQUESTS))
    ]
    found = sorted(zip(at_once(stand.url, bodies, _TOGETHER), bodies, strict=True), key=lambda one: one[0].sent_s)
    outcomes, bodies = [outcome for outcome, _ in found], [body for _, body in found]
    if codes := sorted({outcome.code for outcome in outcomes if not outcome.whole}):
        raise SystemExit(f"service times cannot be fitted: requests ended with {codes}")

    def simulated(span: Callable[[SimRequest], float]) -> Callable[[ServiceTimes], float]:
        return lambda tried: median(span(request) for request in replay(stand, tried, bodies, outcomes))

    def real(stage: str) -> float:
        return median(outcome.timings[stage] for outcome in outcomes)

    times = replace(times, decode_beside=1.0)
    for _ in range(2):  # each depends a little on the others
        times = solved(times, "request_core_s", (0.0, 20e-3), real("tpot"), simulated(lambda one: one.tpot_s))
        times = solved(
            times, "prefill_beside", (1.0, 2.0), real("prefill"),
            simulated(lambda one: (one.prefilled_ns - one.begun_ns) / 1e9),
        )  # fmt: skip
        times = solved(
            times, "link_s", (0.0, 20e-3), real("handover"),
            simulated(lambda one: (one.first_token_ns - one.prefilled_ns) / 1e9),
        )  # fmt: skip
    return times
