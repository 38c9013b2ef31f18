"""What a node in front of a server costs: the server asked directly and through the node, in turn.

`python -m benchmarks.engines --config gateway.toml` starts a node of a configuration and asks it and its server: with
`engine = "openai"` the first of its URLs, where it must run already, with `engine = "vllm"` the node's own first
instance, at its socket. Everything is paired: like requests go both ways,
in an order drawn at random, and what counts is the difference or the ratio of the two.

- TTFT added without retrieval, p50: at most 3 ms.
- TTFT added with retrieval (directly: the same messages with the passages in them), less embedding and search: 4 ms.
- Time per token: at most 1.02 times.
- Throughput with 8 streams, rounds each way in turn: at least .97 times.
- A probe's stall, against the server's time to the first token behind the same sequence with the passages when it has
  all before them cached: at most 1.3 times.
- Greedy answers are the same both ways.

Writes engines.json and engines.md.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import ClientSession

from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import table, write
from runtime.engines.openai.assembly import fit, inserted_text, with_passages
from runtime.node.config import CollectionSection
from runtime.node.config_file import load_config
from runtime.node.engine_config import OpenAiSection, ServedSection
from runtime.node.placement.plan import read_engine_key
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.passages import Passage
from runtime.testing.node import Node, running

Json = dict[str, Any]
STREAMS = 8
_WORDS = [
    "iterator",
    "generator",
    "decorator",
    "context",
    "manager",
    "exception",
    "class",
    "module",
    "closure",
    "descriptor",
    "slice",
    "tuple",
]


@dataclass(frozen=True)
class Answer:
    """One streamed answer: seconds to its first token and from there to its last, its text, its last timings."""

    ttft_s: float
    rest_s: float
    tokens: int
    text: str
    timings: dict[str, float]


async def asked(client: ClientSession, url: str, body: Json) -> Answer:
    """Ask for a streamed chat. Raises RuntimeError for an error answer."""
    begin = time.perf_counter()
    first, last, text, tokens, timings = 0.0, 0.0, "", 0, dict[str, float]()
    async with client.post(f"{url}/chat/completions", json=body | {"stream": True}) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"])
            timings = chunk.get("timings") or timings
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            for choice in chunk.get("choices") or ():
                piece = choice["delta"].get("content") or ""
                if piece or choice["finish_reason"]:  # two tokens may have no text between them
                    last = time.perf_counter()
                    first = first or last
                    text += piece
    return Answer(first - begin, last - first, tokens, text, timings)


class Bench:
    """Both ways to one model."""

    def __init__(self, direct: str, through: str, model: str, key: str, seed: int, socket: str = "") -> None:
        """`socket`: the path of the one at which `direct` is."""
        self.urls = {"direct": direct, "through": through}
        self.model, self.random = model, random.Random(seed)
        self._key, self._socket = key, socket

    async def __aenter__(self) -> Self:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}

        def session(connector: aiohttp.BaseConnector) -> ClientSession:
            return ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=600))

        direct: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=64, keepalive_timeout=4.0)
        if self._socket:
            direct = aiohttp.UnixConnector(self._socket, limit=64, keepalive_timeout=4.0)
        through = aiohttp.TCPConnector(limit=64, keepalive_timeout=4.0)
        self.clients = {"direct": session(direct), "through": session(through)}
        return self

    async def __aexit__(self, *exception: object) -> None:
        for client in self.clients.values():
            await client.close()

    async def asked(self, way: str, body: Json) -> Answer:
        """An answer, one way."""
        return await asked(self.clients[way], self.urls[way], body)

    def question(self) -> str:
        return f"Number {self.random.randrange(10**9)}: explain {' and '.join(self.random.sample(_WORDS, 3))}."

    def body(self, text: str, tokens: int) -> Json:
        return {
            "model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    async def pair(self, tokens: int) -> dict[str, Answer]:
        """Another question each way: a cached prefix would flatter whichever is second."""
        found = {}
        for way in self.random.sample(list(self.urls), 2):
            found[way] = await self.asked(way, self.body(self.question(), tokens))
        return found

    async def same(self, tokens: int) -> bool:
        body = self.body(self.question(), tokens)
        return len({(await self.asked(way, body)).text for way in self.urls}) == 1

    async def with_retrieval(self, collection: str, passage_tokens: int) -> float:
        """TTFT added, less embedding and search: each way a question of its own, with passages."""
        text = self.question()
        search = {"collection": collection, "query": text, "k": 4}
        async with self.clients["through"].post(f"{self.urls['through']}/retrieval", json=search) as answer:
            found = (await answer.json())["passages"]
        passages = [Passage(one["id"], one["title"], one["distance"], one["text"]) for one in found]
        # The passages are the same both ways, and would be read once if vLLM's prefix cache had them for the second.
        salts = [{"cache_salt": str(self.random.getrandbits(63))} if self._socket else {} for _ in range(2)]
        other = self.body(self.question(), 2) | salts[0]
        assembled = other | with_passages({"messages": other["messages"]}, fit(passages, passage_tokens))
        retrieval = {"retrieval": {"collection": collection, "k": 4}}
        asks: dict[str, Callable[[], Any]] = {
            "direct": lambda: self.asked("direct", assembled),
            "through": lambda: self.asked("through", self.body(text, 2) | retrieval | salts[1]),
        }
        answers = {way: await asks[way]() for way in self.random.sample(list(asks), 2)}
        spans = answers["through"].timings
        added: float = answers["through"].ttft_s - answers["direct"].ttft_s - spans["embed"] - spans["retrieval"]
        return added

    async def probe(self, collection: str, probe_tokens: int, texts: Mapping[str, str]) -> tuple[float, float]:
        """Seconds that an answer stands still for its one probe, and that the passages' own prefill takes; `texts`:
        of all passages by their ids."""
        salt = {"cache_salt": str(self.random.getrandbits(63))}
        retrieval = {"retrieval": {"collection": collection, "k": 2, "every_tokens": 16}}
        body = self.body(self.question(), 24) | salt | retrieval | {"return_token_ids": True, "stream": True}
        prompt, told, passages, stall = list[int](), list[int](), list[Json](), 0.0
        async with self.clients["through"].post(f"{self.urls['through']}/chat/completions", json=body) as answer:
            async for line in answer.content:
                chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                prompt = chunk.get("prompt_token_ids") or prompt
                passages += [one for one in chunk.get("retrieval", {}).get("passages", ()) if one["at_token"]]
                stall = chunk.get("timings", {}).get("probe_stall", stall)
                for choice in chunk.get("choices") or ():
                    told += choice.get("token_ids") or ()
        found = [Passage(one["id"], one["title"], one["distance"], texts[one["id"]]) for one in passages]
        text = {"model": self.model, "prompt": inserted_text(fit(found, probe_tokens)), "add_special_tokens": False}
        root = self.urls["direct"].removesuffix("/v1")
        async with self.clients["direct"].post(f"{root}/tokenize", json=text) as answer:
            inserted = (await answer.json())["tokens"]
        before = [*prompt, *told[:16]]
        own = {"model": self.model, "max_tokens": 1, "temperature": 0, "cache_salt": f"own {salt['cache_salt']}"}
        url, seconds = f"{self.urls['direct']}/completions", 0.0
        for sequence in (before, [*before, *inserted]):  # the first has it cache what is before the passages
            begin = time.perf_counter()
            async with self.clients["direct"].post(url, json=own | {"prompt": sequence}) as answer:
                answer.raise_for_status()
                await answer.read()
            seconds = time.perf_counter() - begin
        return stall, seconds

    async def round(self, way: str, requests: int, tokens: int) -> float:
        """Tokens a second over so many requests, eight at a time."""
        waiting = [self.body(self.question(), tokens) for _ in range(requests)]
        made = 0

        async def streams() -> None:
            nonlocal made
            while waiting:
                made += (await self.asked(way, waiting.pop())).tokens

        begin = time.perf_counter()
        await asyncio.gather(*(streams() for _ in range(STREAMS)))
        return made / (time.perf_counter() - begin)


async def measure(
    bench: Bench, collection: CollectionSection | None, section: ServedSection, pairs: int, rounds: int, tokens: int
) -> Json:
    """Everything, paired."""
    for _ in range(3):
        await bench.pair(4)
    short = [await bench.pair(2) for _ in range(pairs)]
    added = [one["through"].ttft_s - one["direct"].ttft_s for one in short]
    long = [await bench.pair(tokens) for _ in range(max(5, pairs // 5))]
    ratios = [one["through"].rest_s / one["direct"].rest_s for one in long]
    retrieval, probes = list[float](), list[tuple[float, float]]()
    if collection is not None:
        with closing(Collection.open(Path(collection.path))) as held:
            assert held.documents is not None, "it has passages"
            texts = {found.id: found.text for found in held.documents.get(range(held.documents.size))}
        retrieval = [await bench.with_retrieval(collection.name, section.passage_tokens) for _ in range(pairs)]
        probes = [await bench.probe(collection.name, section.probe_tokens, texts) for _ in range(max(5, pairs // 3))]
    throughput = []
    for number in range(rounds):
        order = ("direct", "through") if number % 2 else ("through", "direct")
        rates = {way: await bench.round(way, 3 * STREAMS, tokens) for way in order}
        throughput.append(rates["through"] / rates["direct"])
    return {
        "ttft_added_ms": statistics.median(added) * 1e3,
        "ttft_direct_ms": statistics.median(one["direct"].ttft_s for one in short) * 1e3,
        "ttft_retrieval_added_ms": statistics.median(retrieval) * 1e3 if retrieval else None,
        "probe_ratio": statistics.median(stall / own for stall, own in probes) if probes else None,
        "probe_stall_ms": statistics.median(stall for stall, _ in probes) * 1e3 if probes else None,
        "token_ratio": statistics.median(ratios),
        "token_direct_ms": statistics.median(one["direct"].rest_s / (tokens - 1) for one in long) * 1e3,
        "throughput_ratio": statistics.median(throughput),
        "throughput_rounds": throughput,
        "same": sum([await bench.same(tokens) for _ in range(10)]),
        "pairs": pairs,
    }


def report(found: Json) -> str:
    """The result as Markdown."""

    def row(what: str, value: float | None, form: str, bar: float, most: bool = True) -> tuple[str, ...]:
        if value is None:
            return what, "not measured: no collection", "", ""
        met = "met" if (value <= bar if most else value >= bar) else "missed"
        return what, f"{value:{form}}", f"{'≤' if most else '≥'} {bar}", met

    measured = [
        row("TTFT added without retrieval, p50, ms", found["ttft_added_ms"], ".2f", 3.0),
        row("TTFT added with retrieval, less embedding, search", found["ttft_retrieval_added_ms"], ".2f", 4),
        row("a probe's stall to the passages' own prefill, ratio", found["probe_ratio"], ".2f", 1.3),
        row("time per token, ratio", found["token_ratio"], ".3f", 1.02),
        row("throughput at 8 streams, ratio", found["throughput_ratio"], ".3f", 0.97, most=False),
        row("greedy answers that are the same, of 10", found["same"], ".0f", 10, most=False),
    ]
    rounds = ", ".join(f"{one:.3f}" for one in found["throughput_rounds"])
    return "\n".join(
        [
            "# A node in front of a server", "", f"`{found['command']}`, server: {found['server']}",
            f"Machine: {found['machine']['processor']}, {found['machine']['cores']} cores; {found['load_before']} "
            f"before, {found['load_after']} after.",
            f"Asked directly: first token after {found['ttft_direct_ms']:.1f} ms, {found['token_direct_ms']:.1f} ms "
            f"for each later one. {found['pairs']} pairs.", "",
            *table(("", "measured", "bar", ""), measured),
            "", f"Throughput ratios of the rounds: {rounds}.",
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help='a node with engine = "openai"; its server runs')
    parser.add_argument("--server", default="", help="what the server is, for the record")
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    config = load_config(options.config)
    section = config.model
    if not isinstance(section, ServedSection):
        sys.exit(f'{options.config}: [model] has neither engine = "openai" nor engine = "vllm"')
    collection = config.collections[0] if config.collections else None
    before = machine_load()

    async def measured(node: Node) -> Json:
        through = f"{node.info.url}/v1"
        if isinstance(section, OpenAiSection):
            bench = Bench(section.urls[0], through, section.name, read_engine_key(section), options.seed)
        else:
            socket = str(node.run_dir / "engine-0.sock")
            bench = Bench("http://engine-0/v1", through, section.name, "", options.seed, socket)
        async with bench:
            return await measure(bench, collection, section, options.pairs, options.rounds, options.tokens)

    with running(options.config, "--quiet") as node:
        found = asyncio.run(measured(node))
    found |= {
        "command": f"python -m benchmarks.engines --config {options.config.name}", "server": options.server,
        "machine": machine(), "load_before": before, "load_after": machine_load(), "seed": options.seed,
    }  # fmt: skip
    write(found, report(found), options.out / "engines")


if __name__ == "__main__":
    main()
