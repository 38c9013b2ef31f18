"""Service times of a running node for the simulator, fitted to requests that have the node to themselves.

They include the node's processes, clients and cores, whereas `trinity calibrate` measures a model and an index in
isolation. Prefill and decode share memory, caches and other resources of the machine, so their slowdown by each other
is measured too, with concurrent requests. The times exclude queueing and batching.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, closed_loop, sequential, with_background
from benchmarks.serve.system import System
from ipc import STAGES
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.simulator.node import Simulation
from runtime.simulator.setup import Setup
from runtime.simulator.times.calibrate import costs, prefill_parts
from runtime.simulator.times.service import ServiceTimes
from runtime.simulator.traces import Arrival
from runtime.simulator.workload import Workload

EVERY = 8  # tokens between probes
_RETRIEVAL = {"collection": "docs", "k": 4, "every_tokens": EVERY}
_ALONE_TOKENS = (32, 96, 224, 448, 896)  # of questions sent sequentially
_PROBING = (96, 3 * EVERY + 5)  # tokens of a question and of its answer with probes
_TOGETHER = 4  # of them concurrently
_SHORT_TOKENS = (16, 120)  # of questions without passages, prefilled in one pass
_BATCHES = (
    (1, 32),
    (4, 32),
    (8, 32),
    (16, 32),
    (1, 448),
    (4, 448),
    (8, 448),
)  # rows decoded together, tokens of their questions
_STEPS = 40  # of each of these batches
_MOST_TOKENS = 1000  # of their answers
_WORDS = ("list", "class", "import", "yield", "tuple", "string", "module", "loop", "value", "error", "file", "method")


def chat_request(
    bench: Bench, random: np.random.Generator, tokens: int, answer: int, *, retrieval: bool = True
) -> Body:
    """Return a chat of about `tokens` tokens with a unique system message: passages follow it, so no part of the prompt
    is cached."""
    system = {"role": "system", "content": f"This is case {next(bench.numbers):015d}."}
    words = " ".join(random.choice(_WORDS, tokens // 4 + 1))[:tokens]  # a token is a byte
    more: dict[str, Any] = {"retrieval": _RETRIEVAL} if retrieval else {}
    return bench.of_chat([system, {"role": "user", "content": words}], answer, **more)


class SlotWaits(NamedTuple):
    """Waits of queries for a slot of the pools: their number and total time."""

    queries: float
    seconds: float

    @classmethod
    def read(cls, system: System) -> "SlotWaits":
        tables = [table for table in system.tables.values() if table.role == "pool"]
        found = [table.read(PoolMetrics.WAIT[stage]) for table in tables for stage in STAGES]
        return cls(sum(sum(counts) for *counts, _ in found), sum(seconds for *_, seconds in found))

    def mean_s(self, before: "SlotWaits") -> float:
        """Return the mean wait since `before`."""
        return (self.seconds - before.seconds) / max(self.queries - before.queries, 1.0)


def fit_service_times(bench: Bench, system: System, base: ServiceTimes) -> ServiceTimes:
    """Fit service times from sequential requests and from batches; other values are those of `base`."""
    random = np.random.default_rng(bench.seed + 3)
    repeats = bench.count(8, least=4)
    before = SlotWaits.read(system)
    answer = bench.shape.output_tokens  # prefill idles meanwhile, and is slower afterwards
    bodies = [chat_request(bench, random, tokens, answer) for _ in range(repeats) for tokens in _ALONE_TOKENS]
    alone = [outcome for outcome in sequential(system.url, bodies) if outcome.completed]
    short = [
        chat_request(bench, random, tokens, answer, retrieval=False) for _ in range(repeats) for tokens in _SHORT_TOKENS
    ]
    shorter = [outcome for outcome in sequential(system.url, short) if outcome.completed]
    times = _fit_prefill([*alone, *shorter], system.plan.config.prefill.pass_tokens, base)
    times = _fit_decode(bench, system, random, times)
    embed_s = _median(alone, "embed")
    times = replace(
        times,
        embed_s=embed_s,
        embed_core_s=embed_s,  # each worker has one core
        frontend_s=_median(alone, "queue"),
        prompt_s=0.0,
        link_s=0.0,
    )
    retrieval_s, pull_s = _simulate_single(system, times, round(fmean(len(outcome.prompt) for outcome in alone)))
    times = replace(
        times,
        source=f"single requests on the running node; the rest: {base.source}",
        prompt_s=max(_median(alone, "admission") + _median(alone, "retrieval") - retrieval_s, 0.0),
        link_s=max(_median(alone, "room") + _median(alone, "pull") - pull_s, 0.0),
    )
    times = _fit_interference(bench, system, random, times)
    return replace(times, wake_s=max(SlotWaits.read(system).mean_s(before) - times.ring_s, 0.0))


def _fit_interference(bench: Bench, system: System, random: np.random.Generator, times: ServiceTimes) -> ServiceTimes:
    """Fit the cost of a probe, and the slowdown of prefill and decode by each other.

    The same requests are simulated: the unknown parameters explain the difference to the measured times. A single row
    cannot separate its probe's cost for decode's loop from the row's own wait; of concurrent rows each waits for the
    former, and only its own row for the latter.
    """
    tokens, answer = _PROBING
    waves = bench.count(6, least=3)

    def probing(many: int) -> list[Body]:
        return [chat_request(bench, random, tokens, answer) for _ in range(many)]

    alone = _completed(sequential(system.url, probing(2 * waves)))
    together = _completed(closed_loop(system.url, probing(waves * _TOGETHER), _TOGETHER))
    prompts = [chat_request(bench, random, 448, 2) for _ in range(100)]
    theirs, ours = map(_completed, with_background(system.url, probing(waves * _TOGETHER), _TOGETHER, prompts))
    unknown_s = max(_decoding_s(alone) - _simulated_medians(system, times, alone)[0], 0.0) / ((answer - 1) // EVERY)

    def with_rest(times: ServiceTimes) -> ServiceTimes:
        return replace(times, probe_wait_s=unknown_s - times.probe_s)

    times = with_rest(
        bisect(
            times, "probe_s", (0.0, unknown_s), _decoding_s(together),
            lambda tried: _simulated_medians(system, with_rest(tried), together)[0],
        )
    )  # fmt: skip
    for _ in range(2):  # the parameters are weakly coupled
        times = bisect(
            times, "decode_beside", (1.0, 2.0), _decoding_s(theirs),
            lambda tried: _simulated_medians(system, tried, theirs, ours)[0],
        )  # fmt: skip
        times = bisect(
            times, "prefill_beside", (1.0, 2.0), median(one.timings["prefill"] for one in ours),
            lambda tried: _simulated_medians(system, tried, theirs, ours)[1],
        )  # fmt: skip
    return times


def _completed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.completed]


def _decoding_s(outcomes: Sequence[Outcome]) -> float:
    return median(outcome.timings["tpot"] * (outcome.tokens - 1) for outcome in outcomes)


def bisect(
    times: ServiceTimes,
    name: str,
    between: tuple[float, float],
    real_s: float,
    simulated_s: Callable[[ServiceTimes], float],
) -> ServiceTimes:
    """Return `times` with `name` set by bisection so that the simulated time, which rises with it, equals the real."""
    low, high = between
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if simulated_s(replace(times, **{name: middle})) < real_s else (low, middle)
    return replace(times, **{name: (low + high) / 2})


def _simulated_medians(
    system: System, times: ServiceTimes, probing: Sequence[Outcome], prompts: Sequence[Outcome] = ()
) -> tuple[float, float]:
    """Return medians in s of the simulated decode time of `probing` and prefill time of `prompts`."""
    both = sorted([*probing, *prompts], key=lambda one: one.sent_s)
    prompt_request_ids = {one.id for one in prompts}
    decoding, prefilling = [], [0.0] * (not prompts)
    for one, request in zip(both, simulate(system, times, both).requests, strict=True):
        if one.id in prompt_request_ids:
            prefilling.append((request.prefilled_ns - request.begun_ns) / 1e9)
        else:
            decoding.append((request.end_ns - request.first_token_ns) / 1e9)
    return median(decoding), median(prefilling)


def simulate(system: System, times: ServiceTimes, outcomes: Sequence[Outcome], seed: int = 0) -> Simulation:
    """Simulate the same requests at the same times, with the same share of probe hits."""
    begin = min(outcome.sent_s for outcome in outcomes)
    probes = sum((outcome.tokens - 1) // EVERY for outcome in outcomes)
    hits = sum(len(outcome.probe_hits) for outcome in outcomes) / max(probes, 1)
    workload = Workload(probe_every_tokens=EVERY, probe_hit=min(hits, 1.0))
    setup = Setup(config=system.plan.config, times=times, workload=workload, seed=seed)
    arrivals = [Arrival(one.sent_s - begin, max(len(one.prompt), 1), one.tokens) for one in outcomes]
    simulation = Simulation(setup, arrivals)
    simulation.run()
    return simulation


def _simulate_single(system: System, times: ServiceTimes, prompt_tokens: int) -> tuple[float, float]:
    """Return the retrieval time and the hand-over time, in s, of a single simulated request."""
    simulation = Simulation(Setup(config=system.plan.config, times=times), [Arrival(0.0, prompt_tokens, 1)])
    simulation.run()
    (one,) = simulation.requests
    return (one.searched_ns - one.embedded_ns) / 1e9, (one.first_token_ns - one.prefilled_ns) / 1e9


def _fit_prefill(alone: Sequence[Outcome], chunk: int, base: ServiceTimes) -> ServiceTimes:
    """Fit prefill: a pass, a token, a token after others; the cost of a pair of tokens is that of `base`."""
    parts, took = [], []
    for outcome in alone:
        tokens = len(outcome.prompt)
        *rest, pairs = prefill_parts([(start, min(chunk, tokens - start)) for start in range(0, tokens, chunk)])
        parts.append(rest)
        took.append(outcome.timings["prefill"] - pairs * base.prefill_pair_s)
    a_pass, token, behind = costs(parts, took)
    return replace(base, prefill_pass_s=a_pass, prefill_token_s=token, prefill_behind_s=behind)


def _fit_decode(bench: Bench, system: System, random: np.random.Generator, times: ServiceTimes) -> ServiceTimes:
    """Fit decode: a step, a row, and a token of context, from the times between tokens while all rows run."""
    parts: list[tuple[float, float, float]] = []
    took: list[float] = []
    for rows, tokens in _BATCHES:
        ramp_s = rows * (times.prefill_pass_s * (1 + tokens // 256) + (tokens + 64) * times.prefill_token_s)
        answer = min(round(ramp_s / (took[-1] if took else 2e-3)) + _STEPS, _MOST_TOKENS)
        bodies = [chat_request(bench, random, tokens, answer, retrieval=False) for _ in range(rows)]
        outcomes = closed_loop(system.url, bodies, rows)
        if codes := sorted({outcome.code for outcome in outcomes if not outcome.completed}):
            raise SystemExit(f"service times cannot be fitted: requests ended with {codes}")
        begin, end = max(o.token_times_s[0] for o in outcomes), min(o.token_times_s[-1] for o in outcomes)
        between = []  # means: single intervals are distorted by tokens that arrive together
        for outcome in outcomes:
            moments = [moment for moment in outcome.token_times_s if begin <= moment <= end]
            if len(moments) > 1:
                between.append((moments[-1] - moments[0]) / (len(moments) - 1))
        if between:
            took.append(median(between))
            context = sum(len(outcome.prompt) + outcome.tokens - _STEPS / 2 for outcome in outcomes)
            parts.append((1.0, rows, context))
    step, row, context_s = costs(parts, took)
    return replace(times, decode_step_s=step, decode_row_s=row, decode_context_s=context_s)


def _median(outcomes: Sequence[Outcome], stage: str) -> float:
    return median(outcome.timings.get(stage, 0.0) for outcome in outcomes)
