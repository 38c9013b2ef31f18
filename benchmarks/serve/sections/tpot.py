"""TPOT while long prompts arrive: prefill in a process of its own, or in decode's loop."""

import numpy as np

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, open_loop, sequential
from benchmarks.serve.report import Measure, Section, percentile


def run(bench: Bench) -> Section:
    """Send short chats, and long prompts that keep half a core busy, at random times; rounds in the order A B B A."""
    section = Section(
        "tpot",
        "Answers are generated while long prompts arrive. The node's two workers against two colocated ones "
        "(alternating a prompt chunk and a step of the batch), with the same model, chunk size, slots and cores. TPOT "
        "of a request is the mean time per token after the first.",
    )
    node, colocated = bench.shared_system("node"), bench.shared_system("colocated")
    random = np.random.default_rng(bench.seed)
    long = bench.long_prompt_tokens
    alone = sequential(node.url, [bench.body(random, long, 2) for _ in range(3)])
    prefill_s = percentile([o.timings["prefill"] for o in alone if o.completed], 50)
    between_s = prefill_s / 0.5
    seconds = bench.seconds(max(24.0, 6 * between_s))
    outcomes_by_kind: dict[str, list[Outcome]] = {"node": [], "colocated": []}
    lost = 0
    for number, system in enumerate((node, colocated, colocated, node)):
        timed = _load(bench, np.random.default_rng(bench.seed + 10 + number // 2), seconds, between_s, long)
        outcomes = open_loop(system.url, timed)
        lost += sum(not outcome.completed for outcome in outcomes)
        outcomes_by_kind[system.kind] += [o for o in outcomes if o.completed and o.tokens > 2]
    tpot = {kind: [o.timings["tpot"] * 1e3 for o in outcomes] for kind, outcomes in outcomes_by_kind.items()}
    for kind, values in tpot.items():
        section.measures += [Measure(f"{kind}: TPOT p{q}", percentile(values, q), "ms") for q in (50, 99)]
    ratio = percentile(tpot["colocated"], 99) / percentile(tpot["node"], 99)
    section.measures.append(Measure("TPOT p99, colocated / node", ratio, "×", "≥", 2.0))
    section.measures.append(Measure("requests not answered", lost, "", "≤", 0))
    section.details = {
        "long_prompt_tokens": long, "long_prefill_s": prefill_s, "long_every_s": between_s, "seconds": seconds,
        "tpot_ms": tpot,
    }  # fmt: skip
    return section


def _load(
    bench: Bench, random: np.random.Generator, seconds: float, between_s: float, long: int
) -> list[tuple[float, Body]]:
    """Return requests at random times: periodic arrivals could be separated by alternating workers."""
    chats, output = 2.0, bench.shape.output_tokens
    timed = [(at, bench.body(random, 32, output)) for at in random.uniform(0.0, seconds, round(chats * seconds))]
    timed += [(at, bench.body(random, long, 2)) for at in random.uniform(0.0, seconds, round(seconds / between_s))]
    return sorted(timed, key=lambda item: item[0])
