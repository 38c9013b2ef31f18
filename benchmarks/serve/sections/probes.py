"""Stall of answers by probes in modes wait and prefetch."""

from statistics import fmean

import numpy as np

from benchmarks.serve.bench import Bench, question
from benchmarks.serve.client import Outcome, open_loop
from benchmarks.serve.report import Measure, Section, percentile


def run(bench: Bench) -> Section:
    """Send the same questions in both modes alternately, several concurrently."""
    section = Section(
        "probes",
        "Every 8 tokens an answer probes with its last words. In mode wait it stalls for embedding and search, in mode "
        "prefetch it continues. Both must insert passages: an answer without probe hits does not stall.",
    )
    system = bench.shared_system("node")
    by_mode: dict[str, list[Outcome]] = {"wait": [], "prefetch": []}
    output = 2 * bench.shape.output_tokens
    for number in range(4):
        mode = ("wait", "prefetch", "prefetch", "wait")[number]
        random = np.random.default_rng(bench.seed + number // 2)
        retrieval = {"collection": "docs", "k": 2, "every_tokens": 8, "probe_mode": mode, "probe_tokens": 64}
        bodies = [bench.of_prompt(question(random), output, retrieval=retrieval) for _ in range(bench.count(12))]
        by_mode[mode] += [
            o for o in open_loop(system.url, [(at * 0.25, b) for at, b in enumerate(bodies)]) if o.completed
        ]
    stalled = {mode: fmean(o.timings["probe_stall"] for o in outcomes) * 1e3 for mode, outcomes in by_mode.items()}
    inserted = {mode: fmean(len(o.passages) for o in outcomes) for mode, outcomes in by_mode.items()}
    for mode, outcomes in by_mode.items():
        section.measures += [
            Measure(f"{mode}: stalled, of a request", stalled[mode], "ms"),
            Measure(f"{mode}: TPOT p50", percentile([o.timings["tpot"] * 1e3 for o in outcomes], 50), "ms"),
            Measure(f"{mode}: passages of a request", inserted[mode]),
        ]
    section.measures += [
        Measure("stalled, prefetch / wait", stalled["prefetch"] / stalled["wait"], "×", "≤", 1 / 3),
        Measure("passages, prefetch / wait", inserted["prefetch"] / inserted["wait"], "×", "≥", 0.9),
    ]
    section.details = {"requests": {mode: len(outcomes) for mode, outcomes in by_mode.items()}}
    return section
