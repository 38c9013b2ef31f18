"""CPU time per chunk of a streamed answer in a node, compared with a proxy that only copies bytes.

`python -m benchmarks.gateway` starts a stub server, a byte proxy and a node in front of it, and sends requests through
each in turn: streams at full speed, and 8 streams paced like a model. It measures the CPU time of the process in
between, then each part of the node's own code alone.

Writes gateway.json and gateway.md.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.common.machine import machine, machine_load
from benchmarks.common.report import table, write
from benchmarks.gateway.stub_server import MODEL, PACE, WORD
from runtime.engines.openai.relay import Relay
from runtime.engines.openai.server import from_json
from runtime.serving.frontend.requests import Relayed, Request, RequestTable
from runtime.serving.http.responses import ChatResponse
from runtime.serving.messages import Generation, Sampling
from runtime.testing.node import running

Json = dict[str, Any]
PATTERNS = {"one stream, as fast as it comes": (1, 8000, 0), "8 streams, a token every 8 ms": (8, 250, 8000)}
"""Streams, chunks of each, µs between two of them."""


class Client(asyncio.Protocol):
    """A client connection with minimal parsing, one request at a time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a socket's
        self._transport = transport

    def ask(self, tokens: int, pace_us: int) -> "asyncio.Future[float]":
        """Send a request; the future returns seconds to the first token once the answer is complete."""
        turns = [{"role": "user", "content": "hello"}]
        request = {"model": MODEL, "messages": turns, "max_tokens": tokens, "stream": True, PACE: pace_us}
        body = json.dumps(request).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._whole: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._tail, self._words, self._first_s, self._tokens = b"", 0, 0.0, tokens
        self._begin = time.perf_counter()
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return self._whole

    def data_received(self, data: bytes) -> None:
        if not self._words and WORD.encode() in data:
            self._first_s = time.perf_counter() - self._begin
        self._words += data.count(WORD.encode())
        self._tail = (self._tail + data)[-16:]
        if self._tail.endswith(b"0\r\n\r\n"):
            if self._words != self._tokens:
                self._whole.set_exception(RuntimeError(f"{self._words} of {self._tokens} tokens received"))
            else:
                self._whole.set_result(self._first_s)


def processor_s(pid: int) -> float:
    """Return a process's CPU time, from nanosecond counters."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9


async def measure(targets: dict[str, tuple[int, int]], rounds: int) -> Json:
    """Measure `targets`: name → port, and pid of the process in between."""
    loop = asyncio.get_running_loop()
    costs: dict[str, dict[str, list[float]]] = {pattern: {target: [] for target in targets} for pattern in PATTERNS}
    firsts: dict[str, list[float]] = {target: [] for target in targets}
    most = max(streams for streams, _, _ in PATTERNS.values())
    clients = {
        target: [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(most)]
        for target, (port, _) in targets.items()
    }
    for number in range(rounds + 1):  # the first warms up
        for pattern, (streams, tokens, pace_us) in PATTERNS.items():
            for target, (_, pid) in targets.items():
                begin = processor_s(pid)
                await asyncio.gather(*(client.ask(tokens, pace_us) for client in clients[target][:streams]))
                if number:
                    costs[pattern][target].append((processor_s(pid) - begin) / (streams * tokens) * 1e6)
        for _ in range(40):
            for target in targets:
                found = await clients[target][0].ask(2, 0)
                if number:
                    firsts[target].append(found * 1e3)
    return {
        "us_per_chunk": {
            pattern: {target: statistics.median(found) for target, found in one.items()}
            for pattern, one in costs.items()
        },
        "ttft_ms": {target: statistics.median(found) for target, found in firsts.items()},
    }


def parts() -> dict[str, float]:
    """Return µs per chunk of the node's own code, by part; minimum of several runs."""
    choice = {"index": 0, "delta": {"content": WORD}, "logprobs": None, "finish_reason": None, "token_ids": [12345]}
    data = json.dumps({"id": "chatcmpl-1", "created": 1, "model": MODEL, "choices": [choice]}).encode()
    request = Request("1", Generation(Sampling(16), 0, 1, prompt="x"))
    table = RequestTable(lambda ended, request: None)
    table.open(request)
    emitted: list[Any] = []
    relay = Relay("1", emitted.append, time.monotonic_ns, chat=True, body={})
    relay.begin()
    answer = ChatResponse("1", MODEL, 0)
    piece = Relayed("1", WORD, (12345,), choices=(choice,))
    found = {}

    def each(name: str, work: Callable[[], object], runs: int = 5000) -> None:
        found[name] = min(timeit.repeat(work, number=runs, repeat=7)) / runs * 1e6

    each("JSON → chunk", lambda: from_json(data))
    chunks = iter([from_json(data) for _ in range(7 * 5000)])
    each("chunk → piece", lambda: relay.feed(next(chunks)))
    each("piece → its request", lambda: table.deliver(piece))
    each("piece → event", lambda: (answer.add(piece), answer.chunk(piece)))
    return found


def report(found: Json) -> str:
    """Format the result as Markdown."""
    machine_line = f"{found['machine']['processor']}, {found['machine']['cores']} cores"
    lines = [
        "# CPU time per chunk through a node",
        "",
        f"`{found['command']}`. {machine_line}; {found['load_before']} before.",
        "",
    ]
    rows = [(name, f"{one['proxy']:.1f}", f"{one['node']:.1f}") for name, one in found["us_per_chunk"].items()]
    ttft = {target: value - found["ttft_ms"]["direct"] for target, value in found["ttft_ms"].items()}
    rows.append(("TTFT added, p50, ms", f"{ttft['proxy']:.2f}", f"{ttft['node']:.2f}"))
    parts = [(name, f"{value:.2f}") for name, value in found["parts_us"].items()]
    lines += [*table(("CPU time per chunk, µs", "byte proxy", "node"), rows), ""]
    return "\n".join([*lines, *table(("the node's own code, alone and warm", "µs"), parts)])


@contextlib.contextmanager
def stub(*options: str) -> Iterator[tuple[int, int]]:
    """Run a stub; yield its port and pid."""
    command = [sys.executable, "-m", "benchmarks.gateway.stub_server", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    before = machine_load()
    with tempfile.TemporaryDirectory() as directory, stub() as server, stub("--proxy", str(server[0])) as proxy:
        config = Path(directory) / "gateway.toml"
        config.write_text(
            f'[node]\nname = "gateway-benchmark"\n[http]\nport = 0\n[model]\nengine = "openai"\nname = "{MODEL}"\n'
            f'url = "http://127.0.0.1:{server[0]}/v1"\n'
        )
        with running(config, "--quiet") as node:
            port = urlsplit(node.info.url).port
            assert port is not None
            targets = {"direct": server, "proxy": proxy, "node": (port, node.pids()["frontend-0"])}
            found = uvloop.run(measure(targets, options.rounds))
    found |= {
        "parts_us": parts(), "command": "python -m benchmarks.gateway", "machine": machine(), "load_before": before,
        "load_after": machine_load(),
    }  # fmt: skip
    write(found, report(found), options.out / "gateway")
