"""Overhead of a node in front of a server: both are measured in turn, and their difference or ratio is compared.

- TTFT added without retrieval, p50: at most 3 ms.
- TTFT added with retrieval, minus embedding and search: at most 4 ms. Directly, the same messages are sent with the
  passages. vLLM gets the same uncached prompt both times; other servers get different questions.
- Time per token: at most 1.02 times.
- Throughput with 8 streams, in alternating rounds: at least .97 times.
- A probe's stall, relative to the server's TTFT for the same sequence with the passages when everything before them is
  cached: at most 1.3 times.
- Greedy answers are identical.
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
from benchmarks.engines.targets import STREAMS, Answer, Targets
from runtime.engines.openai.assembly import fit, inserted_text, with_passages
from runtime.node.config import CollectionSection
from runtime.node.retrieval_config import ProbesSection, PromptsSection
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.passages import Passage

Json = dict[str, Any]

MEASURES = ("ttft", "token", "retrieval", "probe", "throughput", "same")
PARTS = {
    "embed": "embedding",
    "search": "search",
    "assembly": "prompt assembly and choice of a server",
    "server": "the server's first token seen by the node, minus directly",
    "http": "HTTP between client and node",
}
"""Parts of the added TTFT with retrieval; the limit applies to the last three."""
_SAME = 10


@dataclass(frozen=True)
class Delay:
    """Added TTFT through the node, in seconds by part."""

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
        """Everything except embedding and search."""
        return sum(self.parts[name] for name in ("assembly", "server", "http"))


def _passages(found: Sequence[Json], texts: Mapping[str, str] | None = None) -> list[Passage]:
    """Parse the passages of an answer; a probe's texts come from the collection."""
    return [Passage(p["id"], p["title"], p["distance"], p["text"] if texts is None else texts[p["id"]]) for p in found]


async def with_retrieval(targets: Targets, collection: str, passage_tokens: int) -> Delay:
    """Measure the added TTFT of one question."""
    text = targets.question()
    found = await targets.post("through", "/retrieval", {"collection": collection, "query": text, "k": 4})
    other = targets.body(text if targets.salted else targets.question(), 2)
    fitted = fit(_passages(found["passages"]), passage_tokens)
    bodies = {
        "direct": other | with_passages({"messages": other["messages"]}, fitted),
        "through": targets.body(text, 2) | {"retrieval": {"collection": collection, "k": 4}},
    }
    answers = {target: await targets.chat(target, bodies[target] | targets.salt()) for target in targets.shuffled()}
    return Delay.of(answers["through"], answers["direct"])


async def probe(targets: Targets, collection: str, probe_tokens: int, texts: Mapping[str, str]) -> tuple[float, float]:
    """Measure the seconds of a probe's stall, and of the passages' own prefill; `texts`: passages by id."""
    salt = targets.salt()
    retrieval = {"retrieval": {"collection": collection, "k": 2, "every_tokens": 16}}
    body = targets.body(targets.question(), 24) | salt | retrieval | {"return_token_ids": True, "stream": True}
    prompt, written, passages, stall = list[int](), list[int](), list[Json](), 0.0
    url = targets.addresses["through"].url
    async with targets.clients["through"].post(f"{url}/chat/completions", json=body) as answer:
        async for line in answer.content:
            chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            prompt = chunk.get("prompt_token_ids") or prompt
            passages += [one for one in chunk.get("retrieval", {}).get("passages", ()) if one["at_token"]]
            stall = chunk.get("timings", {}).get("probe_stall", stall)
            for choice in chunk.get("choices") or ():
                written += choice.get("token_ids") or ()
    inserted = inserted_text(fit(_passages(passages, texts), probe_tokens))
    tokenize = {"model": targets.model, "prompt": inserted, "add_special_tokens": False}
    tokens = (await targets.post("direct", "/tokenize", tokenize, versioned=False))["tokens"]
    before = [*prompt, *written[:16]]
    own = {"model": targets.model, "max_tokens": 1, "temperature": 0} | targets.salt()
    seconds = 0.0
    for sequence in (before, [*before, *tokens]):  # the first request caches everything before the passages
        begin = time.perf_counter()
        await targets.post("direct", "/completions", own | {"prompt": sequence})
        seconds = time.perf_counter() - begin
    return stall, seconds


async def same(targets: Targets, tokens: int) -> bool:
    """Whether both targets give the same answer."""
    body = targets.body(targets.question(), tokens)
    return len({(await targets.chat(target, body)).text for target in targets.addresses}) == 1


async def throughput(targets: Targets, number: int, tokens: int) -> float:
    """Return the throughput ratio of one round per target."""
    order = ("direct", "through") if number % 2 else ("through", "direct")
    bodies = {target: [targets.body(targets.question(), tokens) for _ in range(3 * STREAMS)] for target in order}
    rates = {target: (await targets.round(target, bodies[target])).rate for target in order}
    return rates["through"] / rates["direct"]


async def measure(
    targets: Targets,
    collection: CollectionSection | None,
    *,
    only: Names[str],
    pairs: int,
    rounds: int,
    tokens: int,
) -> Json:
    """Run the measures in `only`; `targets`: "direct" and "through"."""
    found: Json = {"pairs": pairs}
    for _ in range(3):
        await targets.each(4)
    if "ttft" in only:
        short = [await targets.each(2) for _ in range(pairs)]
        found["ttft_direct_ms"] = statistics.median(one["direct"].ttft_s for one in short) * 1e3
        found["ttft_added_ms"] = [(one["through"].ttft_s - one["direct"].ttft_s) * 1e3 for one in short]
    if "token" in only:
        long = [await targets.each(tokens) for _ in range(max(5, pairs // 5))]
        found["token_direct_ms"] = statistics.median(one["direct"].token_s for one in long) * 1e3
        found["token_ratio"] = [one["through"].token_s / one["direct"].token_s for one in long]
    if collection is not None and "retrieval" in only:
        delays = [await with_retrieval(targets, collection.name, PromptsSection().passage_tokens) for _ in range(pairs)]
        found["retrieval_ms"] = {name: [delay.parts[name] * 1e3 for delay in delays] for name in PARTS}
        found["retrieval_rest_ms"] = [delay.rest * 1e3 for delay in delays]
    if collection is not None and "probe" in only:
        texts = texts_of(collection)
        probes = [
            await probe(targets, collection.name, ProbesSection().passage_tokens, texts)
            for _ in range(max(5, pairs // 3))
        ]
        found["probe_stall_ms"] = [stall * 1e3 for stall, _ in probes]
        found["probe_ratio"] = [stall / own for stall, own in probes]
    if "throughput" in only:
        found["throughput_ratio"] = [await throughput(targets, number, tokens) for number in range(rounds)]
    if "same" in only:
        found["same"] = sum([await same(targets, tokens) for _ in range(_SAME)])
    return found


def texts_of(collection: CollectionSection) -> dict[str, str]:
    """Return all passages of a collection by id."""
    with closing(Collection.open(Path(collection.path))) as held:
        return {found.id: found.text for found in held.all_documents()}


def spread(values: Sequence[float], form: str) -> tuple[str, str]:
    """Format the median and, of four or more values, the quartiles."""
    middle = f"{statistics.median(values):{form}}"
    if len(values) < 4:
        return middle, ""
    low, _, high = statistics.quantiles(values, n=4)
    return middle, f"{low:{form}} … {high:{form}}"


def report(found: Json) -> list[str]:
    """Format the result as Markdown."""

    def row(key: str, what: str, form: str, bar: float, *, most: bool = True) -> list[tuple[str, ...]]:
        if key not in found:
            return []
        middle, quartiles = spread(found[key], form)
        value = statistics.median(found[key])
        met = "met" if (value <= bar if most else value >= bar) else "missed"
        return [(what, middle, quartiles, str(len(found[key])), f"{'≤' if most else '≥'} {bar}", met)]

    rows = [
        *row("ttft_added_ms", "TTFT added without retrieval, ms", ".2f", 3.0),
        *row("retrieval_rest_ms", "TTFT added with retrieval, minus embedding and search, ms", ".2f", 4.0),
        *row("probe_ratio", "probe stall relative to the passages' own prefill", ".2f", 1.3),
        *row("token_ratio", "time per token, ratio", ".3f", 1.02),
        *row("throughput_ratio", "throughput at 8 streams, ratio", ".3f", 0.97, most=False),
    ]
    lines = table(("", "median", "quartiles", "of", "bar", ""), rows)
    if "retrieval_ms" in found:
        parts = [(PARTS[name], *spread(values, ".2f")) for name, values in found["retrieval_ms"].items()]
        lines += ["", "Added TTFT with retrieval, by part, ms:", ""]
        lines += table(("", "median", "quartiles"), parts)
    if "same" in found:
        lines += ["", f"Identical greedy answers: {found['same']} of {_SAME}."]
    directly = [
        f"{text} {found[key]:.1f} ms"
        for key, text in (("ttft_direct_ms", "TTFT"), ("token_direct_ms", "time per token"))
        if key in found
    ]
    return [*lines, "", f"Directly: {', '.join(directly)}."] if directly else lines
