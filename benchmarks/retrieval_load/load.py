"""Load generators over kept HTTP/1.1 connections, light enough to share two cores with the node that they load."""

import asyncio
import random
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


@dataclass
class Load:
    """Result of a run: seconds of each answered request from when it was due, statuses, and the run's length. `after`:
    requests that were sent in it and answered after it. `late_s`: how long after it was due each one of an open loop
    was ready to be sent, the generator's own part of `seconds`."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    length_s: float = 0.0
    after: int = 0

    @property
    def rate(self) -> float:
        """Answered requests a second."""
        return len(self.seconds) / self.length_s

    def quantile_ms(self, q: float) -> float:
        return float(np.quantile(self.seconds, q)) * 1e3 if self.seconds else float("nan")

    def add(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        (self.seconds if status == 200 else self.refused_s).append(seconds)


class _Connection(asyncio.Protocol):
    """One kept connection; `on_answer` is called with itself and the status of each complete response."""

    def __init__(self, run: "_Run") -> None:
        self._run, self._received, self.due_s = run, b"", 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio's

    def send(self, request: bytes, due_s: float) -> None:
        self.due_s = due_s
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head = self._received.find(b"\r\n\r\n")
        if head < 0:
            return
        length = _LENGTH.search(self._received, 0, head)
        if length and len(self._received) >= head + 4 + int(length[1]):
            status, self._received = int(self._received[9:12]), b""
            self._run.answered(self, status)

    def connection_lost(self, error: Exception | None) -> None:
        self._run.lost(self)


class _Run:
    def __init__(self, requests: Iterator[bytes], seconds: float) -> None:
        self.load, self.requests, self.seconds = Load(), requests, seconds
        self.begin = time.perf_counter()
        self.ended = asyncio.get_running_loop().create_future()

    async def connect(self, port: int) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", port)
        return connection

    def lost(self, connection: _Connection) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the node closed a connection"))

    def answered(self, connection: _Connection, status: int) -> None:
        raise NotImplementedError


class _Closed(_Run):
    """Each connection sends its next request when it has its answer. The last ones are waited for, and not counted."""

    outstanding = 0

    def send(self, connection: _Connection) -> None:
        self.outstanding += 1
        connection.send(next(self.requests), time.perf_counter())

    def answered(self, connection: _Connection, status: int) -> None:
        now = time.perf_counter()
        self.outstanding -= 1
        if now <= self.begin + self.seconds:
            self.load.add(status, now - connection.due_s)
            self.send(connection)
            return
        self.load.after += 1
        if not self.outstanding:
            self.ended.set_result(None)


class _Open(_Run):
    """Requests are due at given times, whatever is outstanding, and wait for a free connection if there is none."""

    def __init__(self, requests: Iterator[bytes], seconds: float) -> None:
        super().__init__(requests, seconds)
        self.free: deque[_Connection] = deque()  # in turn, since the node closes one that idles for seconds
        self.waiting: deque[float] = deque()
        self.outstanding, self.closing = 0, False

    def arrive(self, due_s: float) -> None:
        self.outstanding += 1
        self.load.late_s.append(time.perf_counter() - due_s)
        if self.free:
            self.free.popleft().send(next(self.requests), due_s)
        else:
            self.waiting.append(due_s)

    def answered(self, connection: _Connection, status: int) -> None:
        now = time.perf_counter()
        self.load.add(status, now - connection.due_s)
        self.outstanding -= 1
        if self.waiting:
            connection.send(next(self.requests), self.waiting.popleft())
        else:
            self.free.append(connection)
        if self.closing and not self.outstanding and not self.ended.done():
            self.ended.set_result(None)


def closed_loop(port: int, requests: Iterator[bytes], connections: int, seconds: float) -> Load:
    """Keep a request outstanding on each connection for `seconds`."""

    async def run() -> Load:
        loop = _Closed(requests, seconds)
        opened = [await loop.connect(port) for _ in range(connections)]
        loop.begin = time.perf_counter()
        for one in opened:
            loop.send(one)
        await asyncio.wait_for(loop.ended, seconds + 60)
        loop.load.length_s = seconds
        for one in opened:
            one.transport.abort()
        return loop.load

    load: Load = uvloop.run(run())
    return load


def open_loop(
    port: int, requests: Iterator[bytes], rate: float, seconds: float, seed: int, connections: int = 256
) -> Load:
    """Send requests with Poisson arrivals of `rate` a second for `seconds`; wait for all answers."""

    async def run() -> Load:
        loop = _Open(requests, seconds)
        loop.free = deque([await loop.connect(port) for _ in range(connections)])
        opened, arrivals = list(loop.free), random.Random(seed)
        loop.begin = due = time.perf_counter()
        while (due := due + arrivals.expovariate(rate)) < loop.begin + seconds:
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            loop.arrive(due)
        loop.closing, loop.load.length_s = True, seconds
        if loop.outstanding:
            await asyncio.wait_for(loop.ended, 60)
        else:
            loop.ended.set_result(None)
        for one in opened:
            one.transport.abort()
        return loop.load

    load: Load = uvloop.run(run())
    return load


def http_requests(path: str, bodies: Sequence[bytes]) -> list[bytes]:
    """Return complete HTTP requests."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    return [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]
