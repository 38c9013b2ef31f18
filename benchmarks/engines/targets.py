"""Benchmark targets that serve one model: a server directly, and nodes in front of it, measured in turn."""

import asyncio
import json
import random
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
    """Address of a server: its URL up to /v1, an optional Unix `socket`, and its API `key`."""

    url: str
    socket: str = ""
    key: str = ""


@dataclass(frozen=True)
class Answer:
    """One streamed answer: seconds to the first token and from there to the last, the tokens reported in its usage, its
    text and its timings."""

    ttft_s: float
    rest_s: float
    tokens: int
    text: str
    timings: dict[str, float]

    @property
    def token_s(self) -> float:
        """Seconds per token after the first."""
        return self.rest_s / max(1, self.tokens - 1)


@dataclass
class Round:
    """Answers to concurrent requests, and the seconds for all of them."""

    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(answer.tokens for answer in self.answers) / self.seconds


async def stream_chat(client: ClientSession, url: str, body: Json) -> Answer:
    """Stream a chat. Raises RuntimeError for an error response."""
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
                if piece or choice["finish_reason"]:  # a token may have no text
                    now = time.perf_counter()
                    first, last = first or now, now
                    text += piece
    return Answer(first - begin, last - first, tokens, text, timings)


class Targets:
    """All targets by name. `salted`: the servers are vLLM, whose prefix cache a salt bypasses."""

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
        """Return the names in random order."""
        return self.random.sample(list(self.addresses), len(self.addresses))

    def question(self) -> str:
        """Return a new question: a cached prefix would favour the second target."""
        return f"Number {self.random.randrange(10**9)}: explain {' and '.join(self.random.sample(_WORDS, 3))}."

    def body(self, text: str, tokens: int) -> Json:
        """Return a greedy chat request of this many tokens."""
        return {
            "model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    def salt(self) -> Json:
        """Return a field that prevents prefix caching of a request."""
        return {"cache_salt": str(self.random.getrandbits(63))} if self.salted else {}

    async def chat(self, target: str, body: Json) -> Answer:
        """Return a target's answer."""
        return await stream_chat(self.clients[target], self.addresses[target].url, body)

    async def post(self, target: str, path: str, body: Json, *, versioned: bool = True) -> Json:
        """POST for JSON; `versioned` False: the path is outside /v1."""
        url = self.addresses[target].url
        async with self.clients[target].post(
            (url if versioned else url.removesuffix("/v1")) + path, json=body
        ) as answer:
            answer.raise_for_status()
            found: Json = await answer.json()
        return found

    async def each(self, tokens: int) -> dict[str, Answer]:
        """Ask every target a different question, in random order."""
        return {target: await self.chat(target, self.body(self.question(), tokens)) for target in self.shuffled()}

    async def round(self, target: str, bodies: Sequence[Json], streams: int = STREAMS) -> Round:
        """Send these requests, `streams` at a time."""
        waiting, made = list(bodies), Round()

        async def stream() -> None:
            while waiting:
                made.answers.append(await self.chat(target, waiting.pop()))

        begin = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        made.seconds = time.perf_counter() - begin
        return made


def server_of(node: Node, section: ServedSection) -> Address:
    """Return the address of the node's first server: its first instance, or its first URL."""
    if isinstance(section, OpenAiSection):
        return Address(section.urls[0], key=read_engine_key(section))
    socket = min(node.run_dir.glob("engine-*.sock"))
    return Address(f"http://{socket.stem}/v1", str(socket))


def node_of(node: Node) -> Address:
    """Return the node's address."""
    return Address(f"{node.info.url}/v1")
