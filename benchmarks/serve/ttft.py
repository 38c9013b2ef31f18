"""The first token with retrieval, against the same prompt without."""

import numpy as np

from benchmarks.serve.bench import Bench, question
from benchmarks.serve.client import in_turn
from benchmarks.serve.report import Measure, Section, percentile

_OVERHEAD_MS = 2.0


def run(bench: Bench) -> Section:
    """In turn: a question with retrieval; then the prompt that came of it, as tokens (its first one changed, so that
    no cached prefix helps)."""
    section = Section(
        "ttft",
        "A question with four passages from the pool; then a prompt of just as many tokens, given as such. What "
        f"retrieval adds should be its embedding and its search, and {_OVERHEAD_MS:g} ms.",
    )
    stand = bench.kept("node")
    random = np.random.default_rng(bench.seed)
    added, embed, search, with_ms, without_ms = [], [], [], [], []
    for _ in range(bench.count(24)):
        asked = bench.of_prompt(question(random), 2, retrieval={"collection": "docs", "k": 4})
        (first,) = in_turn(stand.url, [asked])
        other = [(first.prompt[0] + 1) % bench.info.vocabulary, *first.prompt[1:]]
        (second,) = in_turn(stand.url, [bench.of_prompt(other, 2)])
        with_ms.append(first.timings["ttft"] * 1e3)
        without_ms.append(second.timings["ttft"] * 1e3)
        added.append(with_ms[-1] - without_ms[-1])
        embed.append(first.timings["embed"] * 1e3)
        search.append(first.timings["retrieval"] * 1e3)
    bar = percentile(embed, 50) + percentile(search, 50) + _OVERHEAD_MS
    section.measures = [
        Measure("TTFT with retrieval, p50", percentile(with_ms, 50), "ms"),
        Measure("TTFT without, p50", percentile(without_ms, 50), "ms"),
        Measure("embedding, p50", percentile(embed, 50), "ms"),
        Measure("search, p50", percentile(search, 50), "ms"),
        Measure("added by retrieval, p50 of pairs", percentile(added, 50), "ms", "≤", round(bar, 2)),
    ]
    section.details = {"added_ms": added, "embed_ms": embed, "search_ms": search}
    return section
