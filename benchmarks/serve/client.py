"""Load generators: open-loop (requests at given times), closed-loop (a number outstanding) and sequential."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

Body = dict[str, Any]
_decode = msgspec.json.Decoder().decode


@dataclass
class Outcome:
    """Result of one request at its client. `code` is the finish reason or the error code."""

    code: str = "no_answer"
    tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    prompt: tuple[int, ...] = ()
    passages: list[str] = field(default_factory=list)

    @property
    def completed(self) -> bool:
        return self.code in ("stop", "length")


async def send(url: str, body: Body, timeout_s: float = 120.0) -> Outcome:
    """Send one streamed completion and read it to its end. The code of a request without an answer is "no_answer"."""
    outcome = Outcome()
    try:
        async with asyncio.timeout(timeout_s):
            await _stream(url, body, outcome)
    except (OSError, TimeoutError, ValueError):
        pass  # the outcome so far counts
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
            if line.startswith(b"data: {"):  # one event per line
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
    choice = event["choices"][0]
    outcome.tokens += len(choice.get("token_ids") or ())
    outcome.prompt = tuple(event.get("prompt_token_ids") or outcome.prompt)
    outcome.passages += [passage["id"] for passage in event.get("retrieval", {}).get("passages", ())]
    if choice["finish_reason"]:
        outcome.code, outcome.timings = choice["finish_reason"], event["timings"]


async def _open_loop(url: str, timed: Sequence[tuple[float, Body]], timeout_s: float) -> list[Outcome]:
    begin = time.monotonic()
    sent: list[asyncio.Task[Outcome]] = []
    for at_s, body in timed:
        await asyncio.sleep(max(0.0, begin + at_s - time.monotonic()))
        sent.append(asyncio.create_task(send(url, body, timeout_s)))
    return await asyncio.gather(*sent)


def open_loop(url: str, timed: Sequence[tuple[float, Body]], timeout_s: float = 120.0) -> list[Outcome]:
    """Send each body at its time (seconds from now, ascending); return outcomes in order.

    A client disconnects `timeout_s` after sending, and the node cancels its request.
    """
    return asyncio.run(_open_loop(url, timed, timeout_s))


def closed_loop(url: str, bodies: Sequence[Body], outstanding: int) -> list[Outcome]:
    """Send all bodies, at most `outstanding` at a time."""
    return asyncio.run(_closed_loop(url, bodies, outstanding))


async def _closed_loop(url: str, bodies: Sequence[Body], outstanding: int) -> list[Outcome]:
    slots = asyncio.Semaphore(outstanding)

    async def one(body: Body) -> Outcome:
        async with slots:
            return await send(url, body)

    return await asyncio.gather(*(one(body) for body in bodies))


def sequential(url: str, bodies: Sequence[Body]) -> list[Outcome]:
    """Send the bodies one after the other."""

    async def run() -> list[Outcome]:
        return [await send(url, body) for body in bodies]

    return asyncio.run(run())
