"""Several ways to one model, asked in turn: a server itself, and through nodes in front of it."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import aiohttp
from aiohttp import ClientSession

from runtime.node.engine_config import OpenAiSection, ServedSection
from runtime.node.placement.plan import read_engine_key
from runtime.testing.node import Node

Json = dict[str, Any]

STREAMS = 8
_WORDS = (
    "iterator", "generator", "decorator", "context", "manager", "exception", "class", "module", "closure",
    "descriptor", "slice", "tuple",
)  # fmt: skip


class Address(NamedTuple):
    """Of a server: its URL up to /v1; with `socket` at the Unix socket of that path; `key`: what it asks for."""

    url: str
    socket: str = ""
    key: str = ""


@dataclass(frozen=True)
class Answer:
    """One streamed answer: seconds to its first token and from there to its last, the longest pause between two pieces,
    how many tokens it has by its usage, its text, and its last timings."""

    ttft_s: float
    rest_s: float
    tokens: int
    text: str
    timings: dict[str, float]
    longest_s: float = 0.0

    @property
    def token_s(self) -> float:
        """Seconds for each token after the first."""
        return self.rest_s / max(1, self.tokens - 1)


@dataclass
class Round:
    """Answers that were asked for several at a time, and how long all of them took."""

    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def ttft_ms(self) -> float:
        """The median."""
        return statistics.median(answer.ttft_s for answer in self.answers) * 1e3

    def token_ms(self) -> float:
        """The median over the answers."""
        return statistics.median(answer.token_s for answer in self.answers) * 1e3

    def longest_ms(self) -> float:
        """The median of each answer's longest pause."""
        return statistics.median(answer.longest_s for answer in self.answers) * 1e3


async def asked(client: ClientSession, url: str, body: Json) -> Answer:
    """Ask for a streamed chat. Raises RuntimeError for an error answer."""
    begin = time.perf_counter()
    first, last, longest, text, tokens, timings = 0.0, 0.0, 0.0, "", 0, dict[str, float]()
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
                    now = time.perf_counter()
                    longest = max(longest, now - last) if first else 0.0
                    first, last = first or now, now
                    text += piece
    return Answer(first - begin, last - first, tokens, text, timings, longest)


class Ways:
    """All of them, by name. `salted`: the servers are vLLM, so a prompt that was asked before can be asked as new."""

    def __init__(self, addresses: Mapping[str, Address], model: str, seed: int, *, salted: bool = False) -> None:
        self.addresses, self.model, self.salted = dict(addresses), model, salted
        self.random = random.Random(seed)
        self.clients: dict[str, ClientSession] = {}

    async def __aenter__(self) -> Self:
        for name, address in self.addresses.items():
            connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=64, keepalive_timeout=4.0)
            if address.socket:
                connector = aiohttp.UnixConnector(address.socket, limit=64, keepalive_timeout=4.0)
            headers = {"authorization": f"Bearer {address.key}"} if address.key else {}
            timeout = aiohttp.ClientTimeout(total=600)
            self.clients[name] = ClientSession(connector=connector, headers=headers, timeout=timeout)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for client in self.clients.values():
            await client.close()

    def shuffled(self) -> Sequence[str]:
        """The names in a random order."""
        return self.random.sample(list(self.addresses), len(self.addresses))

    def question(self) -> str:
        """Another one each time: a cached prefix would flatter whoever is asked second."""
        return f"Number {self.random.randrange(10**9)}: explain {' and '.join(self.random.sample(_WORDS, 3))}."

    def body(self, text: str, tokens: int) -> Json:
        """A chat of one question, greedy, of so many tokens."""
        return {
            "model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    def salt(self) -> Json:
        """With it in its body nothing of a request is cached."""
        return {"cache_salt": str(self.random.getrandbits(63))} if self.salted else {}

    async def asked(self, way: str, body: Json) -> Answer:
        """An answer, one way."""
        return await asked(self.clients[way], self.addresses[way].url, body)

    async def post(self, way: str, path: str, body: Json, *, beside: bool = False) -> Json:
        """A whole JSON answer; `beside`: the path is not under /v1 but beside it."""
        url = self.addresses[way].url
        async with self.clients[way].post((url.removesuffix("/v1") if beside else url) + path, json=body) as answer:
            answer.raise_for_status()
            found: Json = await answer.json()
        return found

    async def each(self, tokens: int) -> dict[str, Answer]:
        """Another question each way, in a random order."""
        return {way: await self.asked(way, self.body(self.question(), tokens)) for way in self.shuffled()}

    async def round(self, way: str, bodies: Sequence[Json], streams: int = STREAMS) -> Round:
        """These requests, so many at a time."""
        waiting, made = list(bodies), Round()

        async def stream() -> None:
            while waiting:
                made.answers.append(await self.asked(way, waiting.pop()))

        begin = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        made.seconds = time.perf_counter() - begin
        return made


def server_of(node: Node, section: ServedSection) -> Address:
    """The node's first server itself: of its own instances the first, or what its first URL leads to."""
    if isinstance(section, OpenAiSection):
        return Address(section.urls[0], key=read_engine_key(section))
    socket = min(node.run_dir.glob("engine-*.sock"))
    return Address(f"http://{socket.stem}/v1", str(socket))


def node_of(node: Node) -> Address:
    """The node."""
    return Address(f"{node.info.url}/v1")
