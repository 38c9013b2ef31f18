"""Service times of a running node, fitted to requests that have it to themselves, as the simulator takes them.

A node's processes, clients and cores are what they are, while `trinity calibrate` measures a model and an index alone.
Prefill and decode share a machine's memory, caches and whatever else runs on it: how much longer one takes beside the
other is measured too, with one of each under way. Queueing and batching is nothing that these times know of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, at_once, beside, in_turn
from benchmarks.serve.stand import Stand
from runtime.node.control.law import quantile
from runtime.node.metrics.columns import PoolMetrics
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


def waits(stand: Stand) -> list[float]:
    """Prefill queries' waits for a slot so far, by bucket."""
    tables = [table for table in stand.tables.values() if table.role == "pool"]
    return [
        sum(bucket) for bucket in zip(*(table.read(PoolMetrics.WAIT["prefill"])[:-1] for table in tables), strict=True)
    ]


def fitted(bench: Bench, stand: Stand, base: ServiceTimes) -> ServiceTimes:
    """From some single requests, and some that are decoded together; what else is needed is `base`'s."""
    random = np.random.default_rng(bench.seed + 3)
    repeats = bench.count(8, least=4)
    before = waits(stand)
    bodies = [asked(bench, random, tokens, 2) for _ in range(repeats) for tokens in _ALONE_TOKENS]
    alone = [outcome for outcome in in_turn(stand.url, bodies) if outcome.whole]
    short = [asked(bench, random, tokens, 2, retrieval=False) for _ in range(repeats) for tokens in _SHORT_TOKENS]
    waited = [new - old for new, old in zip(waits(stand), before, strict=True)]
    shorter = [outcome for outcome in in_turn(stand.url, short) if outcome.whole]
    times = _passes([*alone, *shorter], stand.plan.config.prefill.expected_chunk_tokens, base)
    times = _steps(bench, stand, random, times)
    wait_s = quantile(0.5, PoolMetrics.WAIT["prefill"].buckets, waited)
    embed_s = _median(alone, "embed")
    times = replace(
        times,
        embed_s=embed_s,
        embed_core_s=embed_s,  # each worker has one core
        frontend_s=_median(alone, "queue"),
        wake_s=max(wait_s - times.ring_s, 0.0),
        prompt_s=0.0,
        link_s=0.0,
    )
    simulated = _one(stand, times, round(fmean(len(outcome.prompt) for outcome in alone)))
    times = replace(
        times,
        source=f"single requests on the running node; the rest: {base.source}",
        prompt_s=max(_median(alone, "admission") + _median(alone, "retrieval") - simulated.retrieval_s, 0.0),
        link_s=max(_median(alone, "room") + _median(alone, "pull") - simulated.pull_s, 0.0),
    )
    return _beside(bench, stand, random, times)


def _beside(bench: Bench, stand: Stand, random: np.random.Generator, times: ServiceTimes) -> ServiceTimes:
    """What a probe costs decode's loop, and how much longer prefill and decode take while the other one is at work."""
    count = bench.count(12, least=6)
    tokens, answer = _PROBING
    probing = [asked(bench, random, tokens, answer) for _ in range(count)]
    alone = [outcome for outcome in in_turn(stand.url, probing) if outcome.whole]
    probing = [asked(bench, random, tokens, answer) for _ in range(count)]
    prompts = [asked(bench, random, tokens, 2, retrieval=False) for _ in range(20 * count) for tokens in (448, 120)]
    theirs, ours = beside(stand.url, probing, prompts)
    hits = sum(len(outcome.probed) for outcome in alone) / (len(alone) * ((answer - 1) // EVERY))
    simulated = _one(stand, times, round(fmean(len(one.prompt) for one in alone)), answer, min(hits, 1.0))
    unknown_s = fmean(map(_decoding_s, alone)) - simulated.decode_s
    chunk = stand.plan.config.prefill.expected_chunk_tokens
    clear = [one for one in ours if one.whole and not any(_both_prefill(one, other) for other in theirs)]
    expected_s = sum(_prefill_s(times, len(one.prompt), chunk) for one in clear)
    taken_s = sum(one.timings["prefill"] for one in clear)
    slower = fmean(_decoding_s(one) for one in theirs if one.whole) / fmean(map(_decoding_s, alone))
    return replace(
        times,
        probe_s=max(unknown_s / ((answer - 1) // EVERY), 0.0),
        prefill_beside=max(taken_s / expected_s, 1.0),
        decode_beside=max(slower, 1.0),
    )


def _both_prefill(one: Outcome, other: Outcome) -> bool:
    """Whether both may have been in prefill at a time."""
    ends = [each.sent_s + each.timings.get("ttft", 0.0) for each in (one, other)]
    return one.sent_s < ends[1] and other.sent_s < ends[0]


def _decoding_s(outcome: Outcome) -> float:
    return outcome.timings["tpot"] * (outcome.tokens - 1)


def _prefill_s(times: ServiceTimes, tokens: int, chunk: int) -> float:
    """Of a prompt's passes, one after the other."""
    starts = range(0, tokens, chunk)
    return sum(times.prefill_pass_s + times.prefill_s(start, min(chunk, tokens - start)) for start in starts)


@dataclass(frozen=True)
class _Simulated:
    retrieval_s: float
    pull_s: float
    decode_s: float


def _one(stand: Stand, times: ServiceTimes, prompt_tokens: int, answer: int = 1, hits: float = 0.0) -> _Simulated:
    """A request alone on the simulated node."""
    workload = Workload(probe_every_tokens=EVERY, probe_hit=hits)
    setup = Setup(config=stand.plan.config, times=times, workload=workload)
    simulation = Simulation(setup, [Arrival(0.0, prompt_tokens, answer)])
    simulation.run()
    (one,) = simulation.requests
    return _Simulated(
        (one.searched_ns - one.embedded_ns) / 1e9,
        (one.first_token_ns - one.prefilled_ns) / 1e9,
        (one.end_ns - one.first_token_ns) / 1e9,
    )


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
