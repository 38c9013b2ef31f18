"""Service times of a running node, fitted to requests that have it to themselves, as the simulator takes them.

A node's processes, clients and cores are what they are, while `trinity calibrate` measures a model and an index alone.
Prefill and decode share a machine's memory, caches and whatever else runs on it: how much longer one takes beside the
other is measured too, with some of each under way. Queueing and batching is nothing that these times know of.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, at_once, beside, in_turn
from benchmarks.serve.stand import Stand
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
_ALONE_TOKENS = (32, 96, 224, 448, 896)  # of questions that are asked one at a time
_PROBING = (96, 3 * EVERY + 5)  # tokens of a question and its answer, during which it probes
_TOGETHER = 4  # such at once
_SHORT_TOKENS = (16, 120)  # of questions without passages: prompts of one pass
_BATCHES = ((1, 32), (4, 32), (8, 32), (16, 32), (1, 448), (4, 448), (8, 448))  # rows decoded together, their questions
_STEPS = 40  # of each of these batches
_MOST_TOKENS = 1000  # of their answers
_WORDS = ("list", "class", "import", "yield", "tuple", "string", "module", "loop", "value", "error", "file", "method")


def asked(bench: Bench, random: np.random.Generator, tokens: int, answer: int, *, retrieval: bool = True) -> Body:
    """A chat of about `tokens` tokens that begins as no other does: passages come behind the system's message, so that
    nothing of a prompt is in a cache."""
    system = {"role": "system", "content": f"This is case {next(bench.numbers):015d}."}
    words = " ".join(random.choice(_WORDS, tokens // 4 + 1))[:tokens]  # a token is a byte
    more: dict[str, Any] = {"retrieval": _RETRIEVAL} if retrieval else {}
    return bench.of_chat([system, {"role": "user", "content": words}], answer, **more)


class Waits(NamedTuple):
    """Of the pools' queries for a slot: how many, and how long together."""

    queries: float
    seconds: float

    @classmethod
    def so_far(cls, stand: Stand) -> "Waits":
        tables = [table for table in stand.tables.values() if table.role == "pool"]
        found = [table.read(PoolMetrics.WAIT[stage]) for table in tables for stage in STAGES]
        return cls(sum(sum(counts) for *counts, _ in found), sum(seconds for *_, seconds in found))

    def mean_s(self, before: "Waits") -> float:
        """Of those since."""
        return (self.seconds - before.seconds) / max(self.queries - before.queries, 1.0)


def fitted(bench: Bench, stand: Stand, base: ServiceTimes) -> ServiceTimes:
    """From some single requests, and some that are decoded together; what else is needed is `base`'s."""
    random = np.random.default_rng(bench.seed + 3)
    repeats = bench.count(8, least=4)
    before = Waits.so_far(stand)
    answer = bench.shape.output_tokens  # prefill rests meanwhile, and is slower after it
    bodies = [asked(bench, random, tokens, answer) for _ in range(repeats) for tokens in _ALONE_TOKENS]
    alone = [outcome for outcome in in_turn(stand.url, bodies) if outcome.whole]
    short = [asked(bench, random, tokens, answer, retrieval=False) for _ in range(repeats) for tokens in _SHORT_TOKENS]
    shorter = [outcome for outcome in in_turn(stand.url, short) if outcome.whole]
    times = _passes([*alone, *shorter], stand.plan.config.prefill.expected_chunk_tokens, base)
    times = _steps(bench, stand, random, times)
    embed_s = _median(alone, "embed")
    times = replace(
        times,
        embed_s=embed_s,
        embed_core_s=embed_s,  # each worker has one core
        frontend_s=_median(alone, "queue"),
        prompt_s=0.0,
        link_s=0.0,
    )
    retrieval_s, pull_s = _one(stand, times, round(fmean(len(outcome.prompt) for outcome in alone)))
    times = replace(
        times,
        source=f"single requests on the running node; the rest: {base.source}",
        prompt_s=max(_median(alone, "admission") + _median(alone, "retrieval") - retrieval_s, 0.0),
        link_s=max(_median(alone, "room") + _median(alone, "pull") - pull_s, 0.0),
    )
    times = _beside(bench, stand, random, times)
    return replace(times, wake_s=max(Waits.so_far(stand).mean_s(before) - times.ring_s, 0.0))


def _beside(bench: Bench, stand: Stand, random: np.random.Generator, times: ServiceTimes) -> ServiceTimes:
    """What a probe costs, and how much longer prefill and decode take while the other one is at work.

    The same requests go through the simulated node: what is not known yet is what the real one takes longer. A row
    alone cannot tell what its probe takes decode's loop from what it waits for itself; of some at once each waits for
    the former, and only its own row for the latter.
    """
    tokens, answer = _PROBING
    waves = bench.count(6, least=3)

    def probing(many: int) -> list[Body]:
        return [asked(bench, random, tokens, answer) for _ in range(many)]

    alone = _whole(in_turn(stand.url, probing(2 * waves)))
    together = _whole(at_once(stand.url, probing(waves * _TOGETHER), _TOGETHER))
    prompts = [asked(bench, random, 448, 2) for _ in range(100)]
    theirs, ours = map(_whole, beside(stand.url, probing(waves * _TOGETHER), _TOGETHER, prompts))
    unknown_s = max(_decoding_s(alone) - _replayed(stand, times, alone)[0], 0.0) / ((answer - 1) // EVERY)

    def with_rest(times: ServiceTimes) -> ServiceTimes:
        return replace(times, probe_wait_s=unknown_s - times.probe_s)

    times = with_rest(
        solved(
            times, "probe_s", (0.0, unknown_s), _decoding_s(together),
            lambda tried: _replayed(stand, with_rest(tried), together)[0],
        )
    )  # fmt: skip
    for _ in range(2):  # each depends a little on the other
        times = solved(
            times, "decode_beside", (1.0, 2.0), _decoding_s(theirs),
            lambda tried: _replayed(stand, tried, theirs, ours)[0],
        )  # fmt: skip
        times = solved(
            times, "prefill_beside", (1.0, 2.0), median(one.timings["prefill"] for one in ours),
            lambda tried: _replayed(stand, tried, theirs, ours)[1],
        )  # fmt: skip
    return times


def _whole(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.whole]


def _decoding_s(outcomes: Sequence[Outcome]) -> float:
    return median(outcome.timings["tpot"] * (outcome.tokens - 1) for outcome in outcomes)


def solved(
    times: ServiceTimes,
    name: str,
    between: tuple[float, float],
    real_s: float,
    simulated_s: Callable[[ServiceTimes], float],
) -> ServiceTimes:
    """`times` with the value of `name` for which what is simulated, which rises with it, takes as long as the real."""
    low, high = between
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if simulated_s(replace(times, **{name: middle})) < real_s else (low, middle)
    return replace(times, **{name: (low + high) / 2})


def _replayed(
    stand: Stand, times: ServiceTimes, probing: Sequence[Outcome], prompts: Sequence[Outcome] = ()
) -> tuple[float, float]:
    """On the simulated node: how long those that probe decode, and the prompts are in prefill; medians in s."""
    both = sorted([*probing, *prompts], key=lambda one: one.sent_s)
    asked_for = {one.id for one in prompts}
    decoding, prefilling = [], [0.0] * (not prompts)
    for one, request in zip(both, played(stand, times, both).requests, strict=True):
        if one.id in asked_for:
            prefilling.append((request.prefilled_ns - request.begun_ns) / 1e9)
        else:
            decoding.append((request.end_ns - request.first_token_ns) / 1e9)
    return median(decoding), median(prefilling)


def played(stand: Stand, times: ServiceTimes, outcomes: Sequence[Outcome], seed: int = 0) -> Simulation:
    """The same requests at the same times, with as many hits of their probes, through the simulated node."""
    begin = min(outcome.sent_s for outcome in outcomes)
    probes = sum((outcome.tokens - 1) // EVERY for outcome in outcomes)
    hits = sum(len(outcome.probed) for outcome in outcomes) / max(probes, 1)
    workload = Workload(probe_every_tokens=EVERY, probe_hit=min(hits, 1.0))
    setup = Setup(config=stand.plan.config, times=times, workload=workload, seed=seed)
    arrivals = [Arrival(one.sent_s - begin, max(len(one.prompt), 1), one.tokens) for one in outcomes]
    simulation = Simulation(setup, arrivals)
    simulation.run()
    return simulation


def _one(stand: Stand, times: ServiceTimes, prompt_tokens: int) -> tuple[float, float]:
    """A request alone on the simulated node: how long until its passages are there, and until its KV is, in s."""
    simulation = Simulation(Setup(config=stand.plan.config, times=times), [Arrival(0.0, prompt_tokens, 1)])
    simulation.run()
    (one,) = simulation.requests
    return (one.searched_ns - one.embedded_ns) / 1e9, (one.first_token_ns - one.prefilled_ns) / 1e9


def _passes(alone: Sequence[Outcome], chunk: int, base: ServiceTimes) -> ServiceTimes:
    """Prefill: a pass, a token, a token behind others; a pair of tokens costs what it did for the model alone."""
    parts, took = [], []
    for outcome in alone:
        tokens = len(outcome.prompt)
        *rest, pairs = prefill_parts([(start, min(chunk, tokens - start)) for start in range(0, tokens, chunk)])
        parts.append(rest)
        took.append(outcome.timings["prefill"] - pairs * base.prefill_pair_s)
    a_pass, token, behind = costs(parts, took)
    return replace(base, prefill_pass_s=a_pass, prefill_token_s=token, prefill_behind_s=behind)


def _steps(bench: Bench, stand: Stand, random: np.random.Generator, times: ServiceTimes) -> ServiceTimes:
    """Decode: a step, a row of it, and a token of context; from the times between tokens while all rows run."""
    parts: list[tuple[float, float, float]] = []
    took: list[float] = []
    for rows, tokens in _BATCHES:
        ramp_s = rows * (times.prefill_pass_s * (1 + tokens // 256) + (tokens + 64) * times.prefill_token_s)
        answer = min(round(ramp_s / (took[-1] if took else 2e-3)) + _STEPS, _MOST_TOKENS)
        bodies = [asked(bench, random, tokens, answer, retrieval=False) for _ in range(rows)]
        outcomes = at_once(stand.url, bodies, rows)
        if codes := sorted({outcome.code for outcome in outcomes if not outcome.whole}):
            raise SystemExit(f"service times cannot be fitted: requests ended with {codes}")
        begin, end = max(o.came_s[0] for o in outcomes), min(o.came_s[-1] for o in outcomes)
        between = []  # means: the times between two tokens that came together say nothing of a step
        for outcome in outcomes:
            came = [moment for moment in outcome.came_s if begin <= moment <= end]
            if len(came) > 1:
                between.append((came[-1] - came[0]) / (len(came) - 1))
        if between:
            took.append(median(between))
            context = sum(len(outcome.prompt) + outcome.tokens - _STEPS / 2 for outcome in outcomes)
            parts.append((1.0, rows, context))
    step, row, context_s = costs(parts, took)
    return replace(times, decode_step_s=step, decode_row_s=row, decode_context_s=context_s)


def _median(outcomes: Sequence[Outcome], stage: str) -> float:
    return median(outcome.timings.get(stage, 0.0) for outcome in outcomes)
