"""Separate vLLM prefill and decode instances, compared with one instance for both, through a node and directly.

All targets run at once and are measured in turn, so that they share the machine's state. Each round sends uncached
prompts of several hundred tokens, first a few one at a time, then 8 at a time.
"""

import statistics
from typing import Any

from benchmarks.common.report import table
from benchmarks.engines.targets import STREAMS, Round, Targets

Json = dict[str, Any]

_NOTE = "A decorator takes a function and returns another one, which is bound to the name of the first. "
_SEQUENTIAL = 4  # sequential requests per round
LABELS = {"direct": "directly", "together": "through a node", "apart": "through a node, separate prefill and decode"}


async def compare(targets: Targets, *, rounds: int, tokens: int, prompt_tokens: int) -> Json:
    """Run rounds of all targets, each time in a new random order."""
    note = _NOTE * (prompt_tokens // 20)

    def bodies(count: int) -> list[Json]:
        return [targets.body(f"{targets.question()} {note}", tokens) | targets.salt() for _ in range(count)]

    for _ in range(2):
        await targets.each(4)
    alone: dict[str, list[Round]] = {target: [] for target in targets.addresses}
    busy: dict[str, list[Round]] = {target: [] for target in targets.addresses}
    for _ in range(rounds):
        for target in targets.shuffled():
            alone[target].append(await targets.round(target, bodies(_SEQUENTIAL), streams=1))
            busy[target].append(await targets.round(target, bodies(2 * STREAMS)))
    return {
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "ways": {
            target: {
                "ttft_alone_ms": [one.ttft_ms() for one in alone[target]],
                "token_alone_ms": [one.token_ms() for one in alone[target]],
                "ttft_ms": [one.ttft_ms() for one in busy[target]],
                "token_ms": [one.token_ms() for one in busy[target]],
                "longest_ms": [one.longest_ms() for one in busy[target]],
                "rate": [one.rate for one in busy[target]],
            }
            for target in targets.addresses
        },
    }


def report(found: Json) -> list[str]:
    """Format the result as Markdown."""
    columns = {
        "ttft_alone_ms": ("TTFT, one stream, ms", ".0f"),
        "token_alone_ms": ("time per token", ".1f"),
        "ttft_ms": (f"TTFT, {STREAMS} streams", ".0f"),
        "token_ms": ("time per token", ".1f"),
        "longest_ms": ("longest pause of an answer", ".0f"),
        "rate": ("tokens/s", ".1f"),
    }
    rows = [
        (LABELS[target], *(f"{statistics.median(values[key]):{form}}" for key, (_, form) in columns.items()))
        for target, values in found["ways"].items()
    ]
    count = len(found["ways"]["direct"]["rate"])
    return [
        f"Medians of {count} rounds per target; prompts of about {found['prompt_tokens']} tokens, answers of "
        f"{found['tokens']}.",
        "",
        *table(("", *(title for title, _ in columns.values())), rows),
    ]
