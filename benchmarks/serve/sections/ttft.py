"""The first token with retrieval, against the same prompt without."""

from itertools import chain

import numpy as np

from benchmarks.serve.bench import Bench, question
from benchmarks.serve.client import Outcome, in_turn
from benchmarks.serve.report import Measure, Section, percentile

_OVERHEAD_MS = 2.0


def run(bench: Bench) -> Section:
    """A B B A. No two prompts begin alike, so that no cached prefix helps one of them: a chat's system message, before
    the passages, has a number of its own; of the prompt given as tokens the first one is changed."""
    section = Section(
        "ttft",
        "A question with four passages from the pool; the prompt that came of it twice, given as tokens; the question "
        "again. What retrieval adds should be its embedding and its search, and "
        f"{_OVERHEAD_MS:g} ms. The pass through the model is the same in all four, and its noise the greatest part of "
        "what they differ by: the difference without it is given too.",
    )
    stand = bench.kept("node")
    random = np.random.default_rng(bench.seed)
    rounds: list[tuple[Outcome, Outcome, Outcome, Outcome]] = []
    for _ in range(bench.count(12)):
        text = question(random)
        (first,) = in_turn(stand.url, [_asked(bench, random, text)])
        given = [bench.of_prompt([(first.prompt[0] + n) % bench.info.vocabulary, *first.prompt[1:]], 2) for n in (1, 2)]
        second, third, fourth = in_turn(stand.url, [*given, _asked(bench, random, text)])
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


def _asked(bench: Bench, random: np.random.Generator, text: str) -> dict[str, object]:
    system = {"role": "system", "content": f"This is case {int(random.integers(10**15)):015d}."}
    messages = [system, {"role": "user", "content": text}]
    return bench.of_chat(messages, 2, retrieval={"collection": "docs", "k": 4})


def _added(rounds: list[tuple[Outcome, Outcome, Outcome, Outcome]], without: list[str]) -> list[float]:
    """What the first and the last took longer than the two between them, ms of TTFT without some of its stages."""

    def ms(outcome: Outcome) -> float:
        return (outcome.timings["ttft"] - sum(outcome.timings[name] for name in without)) * 1e3

    return [(ms(a) + ms(d) - ms(b) - ms(c)) / 2 for a, b, c, d in rounds]
