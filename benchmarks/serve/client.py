"""Open-loop load: requests leave at their times, whether or not the ones before are answered."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any
from urllib.parse import urlsplit

import msgspec

Body = dict[str, Any]
_decode = msgspec.json.Decoder().decode


@dataclass
class Outcome:
    """One request as its client saw it. `code` is its finish reason or its error's; times are monotonic seconds."""

    sent_s: float
    code: str = "no_answer"
    id: str = ""
    tokens: int = 0
    ended_s: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    prompt: tuple[int, ...] = ()
    passages: list[str] = field(default_factory=list)
    probed: set[int] = field(default_factory=set)  # after how many tokens probes brought passages
    came_s: list[float] = field(default_factory=list)  # when each of its tokens did

    @property
    def whole(self) -> bool:
        return self.code in ("stop", "length")


async def ask(url: str, body: Body, timeout_s: float = 120.0) -> Outcome:
    """One streamed completion, to its end. A request that is not answered has the code "no_answer"."""
    outcome = Outcome(time.monotonic())
    try:
        async with asyncio.timeout(timeout_s):
            await _stream(url, body, outcome)
    except (OSError, TimeoutError, ValueError):
        pass  # what came of it until then is what counts
    outcome.ended_s = time.monotonic()
    return outcome


async def _stream(url: str, body: Body, outcome: Outcome) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 22)
    try:
        data = msgspec.json.encode({"stream": True, **body})
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        while line := await reader.readline():
            if line.startswith(b"data: {"):  # an event is one chunk of the response: it begins a line
                _take(_decode(line[6:]), outcome)
            elif line.startswith(b'{"error"'):
                outcome.code = _decode(line)["error"]["code"]
                return
    finally:
        writer.close()


def _take(event: dict[str, Any], outcome: Outcome) -> None:
    if "error" in event:
        outcome.code = event["error"]["code"]
        return
    outcome.id = event["id"]
    choice = event["choices"][0]
    if tokens := choice.get("token_ids"):
        outcome.tokens += len(tokens)
        outcome.came_s += [time.monotonic()] * len(tokens)
    outcome.prompt = tuple(event.get("prompt_token_ids") or outcome.prompt)
    found = event.get("retrieval", {}).get("passages", ())
    outcome.passages += [passage["id"] for passage in found]
    outcome.probed |= {passage["at_token"] for passage in found} - {0}
    if choice["finish_reason"]:
        outcome.code, outcome.timings = choice["finish_reason"], event["timings"]


async def _offer(
    url: str, timed: Sequence[tuple[float, Body]], patience_s: float, enough: Callable[[], bool]
) -> list[Outcome]:
    begin = time.monotonic()
    sent: list[asyncio.Task[Outcome]] = []
    for at_s, body in timed:
        await asyncio.sleep(max(0.0, begin + at_s - time.monotonic()))
        if enough():
            break
        sent.append(asyncio.create_task(ask(url, body, patience_s)))
    return await asyncio.gather(*sent)


def offer(
    url: str,
    timed: Sequence[tuple[float, Body]],
    patience_s: float = 120.0,
    enough: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Send each body at its time (seconds from now, rising), until there are `enough`; their outcomes, in that order.

    Who has waited `patience_s` for the end of an answer hangs up, and the node drops the request.
    """
    return asyncio.run(_offer(url, timed, patience_s, enough))


def at_once(url: str, bodies: Sequence[Body], outstanding: int) -> list[Outcome]:
    """All of them, each as soon as fewer than `outstanding` are under way."""

    return asyncio.run(_at_once(url, bodies, outstanding))


async def _at_once(url: str, bodies: Sequence[Body], outstanding: int) -> list[Outcome]:
    room = asyncio.Semaphore(outstanding)

    async def one(body: Body) -> Outcome:
        async with room:
            return await ask(url, body)

    return await asyncio.gather(*(one(body) for body in bodies))


def beside(
    url: str, bodies: Sequence[Body], outstanding: int, others: Sequence[Body]
) -> tuple[list[Outcome], list[Outcome]]:
    """As `at_once`, while others are sent one after the other too, over and over; the outcomes of both."""

    async def run() -> tuple[list[Outcome], list[Outcome]]:
        sent: list[Outcome] = []
        more = cycle(others)

        async def keep_on() -> None:
            while not over:
                sent.append(await ask(url, next(more)))

        over = False
        busy = asyncio.create_task(keep_on())
        found = await _at_once(url, bodies, outstanding)
        over = True
        await busy
        return found, sent

    return asyncio.run(run())


def in_turn(url: str, bodies: Sequence[Body]) -> list[Outcome]:
    """One after the other, each when the last has ended."""

    async def run() -> list[Outcome]:
        return [await ask(url, body) for body in bodies]

    return asyncio.run(run())
