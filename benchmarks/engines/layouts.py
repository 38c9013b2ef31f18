"""vLLM with prefill and decode apart, against one instance that does both and against that one asked directly.

All are up at once and asked in turn, so that all have the same machine. Each round is asked for 8 answers at a time
behind prompts of several hundred tokens, of which nothing is cached; before it, as many answers one after the other.
"""

import statistics
from typing import Any

from benchmarks.common.report import table
from benchmarks.engines.ways import STREAMS, Round, Ways

Json = dict[str, Any]

_NOTE = "A decorator takes a function and returns another one, which is bound to the name of the first. "
_ALONE = 4  # requests of a round that are asked one after the other
WAYS = {"direct": "directly", "together": "through a node", "apart": "through a node, prefill and decode apart"}


async def compare(ways: Ways, *, rounds: int, tokens: int, prompt_tokens: int) -> Json:
    """Rounds of every way in turn, in another order each time."""
    note = _NOTE * (prompt_tokens // 20)

    def bodies(count: int) -> list[Json]:
        return [ways.body(f"{ways.question()} {note}", tokens) | ways.salt() for _ in range(count)]

    for _ in range(2):
        await ways.each(4)
    alone: dict[str, list[Round]] = {way: [] for way in ways.addresses}
    busy: dict[str, list[Round]] = {way: [] for way in ways.addresses}
    for _ in range(rounds):
        for way in ways.shuffled():
            alone[way].append(await ways.round(way, bodies(_ALONE), streams=1))
            busy[way].append(await ways.round(way, bodies(2 * STREAMS)))
    return {
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "ways": {
            way: {
                "ttft_alone_ms": [one.ttft_ms() for one in alone[way]],
                "token_alone_ms": [one.token_ms() for one in alone[way]],
                "ttft_ms": [one.ttft_ms() for one in busy[way]],
                "token_ms": [one.token_ms() for one in busy[way]],
                "longest_ms": [one.longest_ms() for one in busy[way]],
                "rate": [one.rate for one in busy[way]],
            }
            for way in ways.addresses
        },
    }


def report(found: Json) -> list[str]:
    """The result as Markdown."""
    columns = {
        "ttft_alone_ms": ("TTFT, one stream, ms", ".0f"),
        "token_alone_ms": ("time per token", ".1f"),
        "ttft_ms": (f"TTFT, {STREAMS} streams", ".0f"),
        "token_ms": ("time per token", ".1f"),
        "longest_ms": ("longest pause of an answer", ".0f"),
        "rate": ("tokens/s", ".1f"),
    }
    rows = [
        (WAYS[way], *(f"{statistics.median(values[key]):{form}}" for key, (_, form) in columns.items()))
        for way, values in found["ways"].items()
    ]
    count = len(found["ways"]["direct"]["rate"])
    return [
        f"Medians of {count} rounds each way, in turn; prompts of about {found['prompt_tokens']} tokens, answers of "
        f"{found['tokens']}.",
        "",
        *table(("", *(title for title, _ in columns.values())), rows),
    ]
