"""Each later token's time while long prompts arrive: prefill in a process of its own, or in decode's loop."""

import numpy as np

from benchmarks.serve.bench import Bench
from benchmarks.serve.client import Body, Outcome, in_turn, offer
from benchmarks.serve.report import Measure, Section, percentile


def run(bench: Bench) -> Section:
    """Short chats, and long prompts that keep half a core busy, at random times; rounds in turn, A B B A."""
    section = Section(
        "tpot",
        "Answers are written while long prompts arrive. The node's two workers against two that do both (a chunk of a "
        "prompt, a step of the batch, in turn), with the same model, chunk, slots and cores. TPOT of a request is the "
        "mean time of its later tokens.",
    )
    node, colocated = bench.kept("node"), bench.kept("colocated")
    random = np.random.default_rng(bench.seed)
    long = bench.long_prompt_tokens
    alone = in_turn(node.url, [bench.body(random, long, 2) for _ in range(3)])
    prefill_s = percentile([o.timings["prefill"] for o in alone if o.whole], 50)
    between_s = prefill_s / 0.5
    seconds = bench.seconds(max(24.0, 6 * between_s))
    found: dict[str, list[Outcome]] = {"node": [], "colocated": []}
    lost = 0
    for number, stand in enumerate((node, colocated, colocated, node)):
        timed = _load(bench, np.random.default_rng(bench.seed + 10 + number // 2), seconds, between_s, long)
        outcomes = offer(stand.url, timed)
        lost += sum(not outcome.whole for outcome in outcomes)
        found[stand.kind] += [o for o in outcomes if o.whole and o.tokens > 2]
    tpot = {kind: [o.timings["tpot"] * 1e3 for o in outcomes] for kind, outcomes in found.items()}
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
    """At random times: what comes in step with something else would be parted by workers that take turns."""
    chats, output = 2.0, bench.shape.output_tokens
    timed = [(at, bench.body(random, 32, output)) for at in random.uniform(0.0, seconds, round(chats * seconds))]
    timed += [(at, bench.body(random, long, 2)) for at in random.uniform(0.0, seconds, round(seconds / between_s))]
    return sorted(timed, key=lambda item: item[0])
