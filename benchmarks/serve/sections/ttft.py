"""TTFT with retrieval, against the same prompt without."""

from itertools import chain

import numpy as np

from benchmarks.serve.bench import Bench, question
from benchmarks.serve.client import Outcome, sequential
from benchmarks.serve.report import Measure, Section, percentile

_OVERHEAD_MS = 2.0


def run(bench: Bench) -> Section:
    """Measure in the order A B B A. No two prompts share a prefix, so none benefits from the prefix cache: the system
    message, before the passages, has a unique number; of a prompt sent as token ids the first one is changed."""
    section = Section(
        "ttft",
        "A question with four passages from the pool; the resulting prompt twice, sent as token ids; the question "
        "again. Retrieval should add no more than its embedding, its search and "
        f"{_OVERHEAD_MS:g} ms. The model's pass is the same in all four, and its noise dominates the difference, so "
        "the difference without the pass is reported too.",
    )
    system = bench.shared_system("node")
    random = np.random.default_rng(bench.seed)
    rounds: list[tuple[Outcome, Outcome, Outcome, Outcome]] = []
    for _ in range(bench.count(12)):
        text = question(random)
        (first,) = sequential(system.url, [_chat(bench, random, text)])
        given = [bench.of_prompt([(first.prompt[0] + n) % bench.info.vocabulary, *first.prompt[1:]], 2) for n in (1, 2)]
        second, third, fourth = sequential(system.url, [*given, _chat(bench, random, text)])
        rounds.append((first, second, third, fourth))
    retrieved = list(chain.from_iterable((a, d) for a, _, _, d in rounds))
    embed = [outcome.timings["embed"] * 1e3 for outcome in retrieved]
    search = [outcome.timings["retrieval"] * 1e3 for outcome in retrieved]
    added, outside = _added(rounds, []), _added(rounds, ["prefill"])
    bar = percentile(embed, 50) + percentile(search, 50) + _OVERHEAD_MS
    section.measures = [
        Measure("TTFT with retrieval, p50", percentile([o.timings["ttft"] * 1e3 for o in retrieved], 50), "ms"),
        Measure("embedding, p50", percentile(embed, 50), "ms"),
        Measure("search, p50", percentile(search, 50), "ms"),
        Measure("added by retrieval, p50", percentile(added, 50), "ms", "≤", round(bar, 2)),
        Measure("added outside the pass, p50", percentile(outside, 50), "ms", "≤", round(bar, 2)),
    ]
    section.details = {"added_ms": added, "outside_ms": outside, "embed_ms": embed, "search_ms": search}
    return section


def _chat(bench: Bench, random: np.random.Generator, text: str) -> dict[str, object]:
    system = {"role": "system", "content": f"This is case {int(random.integers(10**15)):015d}."}
    messages = [system, {"role": "user", "content": text}]
    return bench.of_chat(messages, 2, retrieval={"collection": "docs", "k": 4})


def _added(rounds: list[tuple[Outcome, Outcome, Outcome, Outcome]], without: list[str]) -> list[float]:
    """Return by how many ms of TTFT, without some stages, the outer two exceed the inner two."""

    def ms(outcome: Outcome) -> float:
        return (outcome.timings["ttft"] - sum(outcome.timings[name] for name in without)) * 1e3

    return [(ms(a) + ms(d) - ms(b) - ms(c)) / 2 for a, b, c, d in rounds]
