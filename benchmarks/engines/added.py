"""What a node adds to its server: both asked in turn, and what counts is the difference or the ratio of the two.

- TTFT added without retrieval, p50: at most 3 ms.
- TTFT added with retrieval (directly: the same messages with the passages in them), less embedding and search: 4 ms.
  vLLM is asked the very same prompt both ways, of which nothing is cached; other servers another question each way.
- Time per token: at most 1.02 times.
- Throughput with 8 streams, rounds each way in turn: at least .97 times.
- A probe's stall, against the server's time to the first token behind the same sequence with the passages when it has
  all before them cached: at most 1.3 times.
- Greedy answers are the same both ways.
"""

import json
import statistics
import time
from collections.abc import Collection as Names
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.report import table
from benchmarks.engines.ways import STREAMS, Answer, Ways
from runtime.engines.openai.assembly import fit, inserted_text, with_passages
from runtime.node.config import CollectionSection
from runtime.node.engine_config import ServedSection
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.passages import Passage

Json = dict[str, Any]

MEASURES = ("ttft", "token", "retrieval", "probe", "throughput", "same")
PARTS = {
    "embed": "embedding",
    "search": "search",
    "assembly": "passages into the prompt, choice of a server",
    "server": "the server's first token, as the node sees it, later than directly",
    "http": "between client and node",
}
"""Of the first token's delay with retrieval; the last three are the rest, which has a bar."""
_SAME = 10


@dataclass(frozen=True)
class Delay:
    """By how much a first token came later through the node than directly; seconds, by part."""

    parts: dict[str, float]

    @classmethod
    def of(cls, through: Answer, direct: Answer) -> "Delay":
        spans = through.timings
        return cls(
            {
                "embed": spans["embed"],
                "search": spans["retrieval"],
                "assembly": spans["admission"],
                "server": spans["prefill"] - direct.ttft_s,
                "http": through.ttft_s - spans["ttft"],
            }
        )

    @property
    def rest(self) -> float:
        """What is neither embedding nor search."""
        return sum(self.parts[name] for name in ("assembly", "server", "http"))


def _passages(found: Sequence[Json], texts: Mapping[str, str] | None = None) -> list[Passage]:
    """As an answer names them; of a probe's the texts come from the collection."""
    return [Passage(p["id"], p["title"], p["distance"], p["text"] if texts is None else texts[p["id"]]) for p in found]


async def with_retrieval(ways: Ways, collection: str, passage_tokens: int) -> Delay:
    """The delay of one question's first token."""
    text = ways.question()
    found = await ways.post("through", "/retrieval", {"collection": collection, "query": text, "k": 4})
    other = ways.body(text if ways.salted else ways.question(), 2)
    fitted = fit(_passages(found["passages"]), passage_tokens)
    bodies = {
        "direct": other | with_passages({"messages": other["messages"]}, fitted),
        "through": ways.body(text, 2) | {"retrieval": {"collection": collection, "k": 4}},
    }
    answers = {way: await ways.asked(way, bodies[way] | ways.salt()) for way in ways.shuffled()}
    return Delay.of(answers["through"], answers["direct"])


async def probe(ways: Ways, collection: str, probe_tokens: int, texts: Mapping[str, str]) -> tuple[float, float]:
    """Seconds that an answer stands still for its one probe, and that the passages' own prefill takes; `texts`: of all
    passages by their ids."""
    salt = ways.salt()
    retrieval = {"retrieval": {"collection": collection, "k": 2, "every_tokens": 16}}
    body = ways.body(ways.question(), 24) | salt | retrieval | {"return_token_ids": True, "stream": True}
    prompt, told, passages, stall = list[int](), list[int](), list[Json](), 0.0
    url = ways.addresses["through"].url
    async with ways.clients["through"].post(f"{url}/chat/completions", json=body) as answer:
        async for line in answer.content:
            chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            prompt = chunk.get("prompt_token_ids") or prompt
            passages += [one for one in chunk.get("retrieval", {}).get("passages", ()) if one["at_token"]]
            stall = chunk.get("timings", {}).get("probe_stall", stall)
            for choice in chunk.get("choices") or ():
                told += choice.get("token_ids") or ()
    inserted = inserted_text(fit(_passages(passages, texts), probe_tokens))
    asked = {"model": ways.model, "prompt": inserted, "add_special_tokens": False}
    tokens = (await ways.post("direct", "/tokenize", asked, beside=True))["tokens"]
    before = [*prompt, *told[:16]]
    own = {"model": ways.model, "max_tokens": 1, "temperature": 0} | ways.salt()
    seconds = 0.0
    for sequence in (before, [*before, *tokens]):  # the first has it cache what is before the passages
        begin = time.perf_counter()
        await ways.post("direct", "/completions", own | {"prompt": sequence})
        seconds = time.perf_counter() - begin
    return stall, seconds


async def same(ways: Ways, tokens: int) -> bool:
    """Whether an answer is the same both ways."""
    body = ways.body(ways.question(), tokens)
    return len({(await ways.asked(way, body)).text for way in ways.addresses}) == 1


async def throughput(ways: Ways, number: int, tokens: int) -> float:
    """The ratio of one round each way."""
    order = ("direct", "through") if number % 2 else ("through", "direct")
    bodies = {way: [ways.body(ways.question(), tokens) for _ in range(3 * STREAMS)] for way in order}
    rates = {way: (await ways.round(way, bodies[way])).rate for way in order}
    return rates["through"] / rates["direct"]


async def measure(
    ways: Ways,
    collection: CollectionSection | None,
    section: ServedSection,
    *,
    only: Names[str],
    pairs: int,
    rounds: int,
    tokens: int,
) -> Json:
    """What is asked for of `MEASURES`; `ways` are "direct" and "through"."""
    found: Json = {"pairs": pairs}
    for _ in range(3):
        await ways.each(4)
    if "ttft" in only:
        short = [await ways.each(2) for _ in range(pairs)]
        found["ttft_direct_ms"] = statistics.median(one["direct"].ttft_s for one in short) * 1e3
        found["ttft_added_ms"] = [(one["through"].ttft_s - one["direct"].ttft_s) * 1e3 for one in short]
    if "token" in only:
        long = [await ways.each(tokens) for _ in range(max(5, pairs // 5))]
        found["token_direct_ms"] = statistics.median(one["direct"].token_s for one in long) * 1e3
        found["token_ratio"] = [one["through"].token_s / one["direct"].token_s for one in long]
    if collection is not None and "retrieval" in only:
        delays = [await with_retrieval(ways, collection.name, section.passage_tokens) for _ in range(pairs)]
        found["retrieval_ms"] = {name: [delay.parts[name] * 1e3 for delay in delays] for name in PARTS}
        found["retrieval_rest_ms"] = [delay.rest * 1e3 for delay in delays]
    if collection is not None and "probe" in only:
        texts = texts_of(collection)
        probes = [await probe(ways, collection.name, section.probe_tokens, texts) for _ in range(max(5, pairs // 3))]
        found["probe_stall_ms"] = [stall * 1e3 for stall, _ in probes]
        found["probe_ratio"] = [stall / own for stall, own in probes]
    if "throughput" in only:
        found["throughput_ratio"] = [await throughput(ways, number, tokens) for number in range(rounds)]
    if "same" in only:
        found["same"] = sum([await same(ways, tokens) for _ in range(_SAME)])
    return found


def texts_of(collection: CollectionSection) -> dict[str, str]:
    """All passages of a collection by their ids."""
    with closing(Collection.open(Path(collection.path))) as held:
        assert held.documents is not None, "it has passages"
        return {found.id: found.text for found in held.documents.get(range(held.documents.size))}


def spread(values: Sequence[float], form: str) -> tuple[str, str]:
    """Median and, of four or more, quartiles."""
    middle = f"{statistics.median(values):{form}}"
    if len(values) < 4:
        return middle, ""
    low, _, high = statistics.quantiles(values, n=4)
    return middle, f"{low:{form}} … {high:{form}}"


def report(found: Json) -> list[str]:
    """The result as Markdown."""

    def row(key: str, what: str, form: str, bar: float, *, most: bool = True) -> list[tuple[str, ...]]:
        if key not in found:
            return []
        middle, quartiles = spread(found[key], form)
        value = statistics.median(found[key])
        met = "met" if (value <= bar if most else value >= bar) else "missed"
        return [(what, middle, quartiles, str(len(found[key])), f"{'≤' if most else '≥'} {bar}", met)]

    rows = [
        *row("ttft_added_ms", "TTFT added without retrieval, ms", ".2f", 3.0),
        *row("retrieval_rest_ms", "TTFT added with retrieval, less embedding and search, ms", ".2f", 4.0),
        *row("probe_ratio", "a probe's stall to the passages' own prefill, ratio", ".2f", 1.3),
        *row("token_ratio", "time per token, ratio", ".3f", 1.02),
        *row("throughput_ratio", "throughput at 8 streams, ratio", ".3f", 0.97, most=False),
    ]
    lines = table(("", "median", "quartiles", "of", "bar", ""), rows)
    if "retrieval_ms" in found:
        parts = [(PARTS[name], *spread(values, ".2f")) for name, values in found["retrieval_ms"].items()]
        lines += ["", "The delay of the first token with retrieval, by part, ms:", ""]
        lines += table(("", "median", "quartiles"), parts)
    if "same" in found:
        lines += ["", f"Greedy answers that are the same both ways: {found['same']} of {_SAME}."]
    directly = [
        f"{text} {found[key]:.1f} ms"
        for key, text in (("ttft_direct_ms", "first token after"), ("token_direct_ms", "each later one after"))
        if key in found
    ]
    return [*lines, "", f"Asked directly: {', '.join(directly)}."] if directly else lines
