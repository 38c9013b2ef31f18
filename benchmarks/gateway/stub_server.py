"""Stubs for `benchmarks.gateway`: a server that streams as fast as requested, and a minimal byte proxy.

`python -m benchmarks.gateway.stub_server` answers as vLLM does, with token ids; `… --proxy PORT` forwards that server's
bytes unchanged. Each prints its port.
"""

import argparse
import asyncio
import json
import socket
from typing import Any

import uvloop

Json = dict[str, Any]
MODEL = "stand-in"
WORD = " word"
PACE = "pace_us"
"""Request field: µs between two chunks; 0: as fast as possible."""

_BURST = 16  # chunks between two yields to the event loop


class StubServer(asyncio.Protocol):
    """Server side of a connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a socket's
        self._transport, self._received = transport, b""
        self._stream: asyncio.Task[None] | None = None

    def connection_lost(self, error: Exception | None) -> None:
        if self._stream is not None:
            self._stream.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        size = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
        if not end or len(rest) < size:
            return
        self._received = rest[size:]
        path = head.split(b" ", 2)[1].decode()
        if head.startswith(b"GET"):
            self._answer({"object": "list", "data": [{"id": MODEL, "max_model_len": 1 << 20}]})
        elif path == "/tokenize":
            self._answer({"tokens": [1, 2, 3]})
        else:
            body = json.loads(rest[:size])
            chat = path.endswith("/chat/completions")
            self._stream = asyncio.get_running_loop().create_task(self._answer_stream(chat, body))

    def _answer(self, value: Json) -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    async def _answer_stream(self, chat: bool, body: Json) -> None:
        loop, pace = asyncio.get_running_loop(), body.get(PACE, 0) / 1e6
        write, due = self._transport.write, loop.time()
        write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        tokens = body["max_tokens"]
        for number in range(tokens):
            choice: Json = {"index": 0, "delta": {"content": WORD}} if chat else {"index": 0, "text": WORD}
            choice |= {"logprobs": None, "finish_reason": "length" if number == tokens - 1 else None}
            chunk = {"id": "chatcmpl-8f1d3c0e2b7a4f5d", "object": "chat.completion.chunk", "created": 1_763_800_000}
            chunk |= {"model": MODEL, "choices": [choice]}
            if body.get("return_token_ids"):
                choice["token_ids"] = [12345]
                chunk |= {} if number else {"prompt_token_ids": [1, 2, 3, 4, 5]}
            write(_event(json.dumps(chunk, separators=(",", ":")).encode()))
            due += pace
            if pace or number % _BURST == _BURST - 1:
                await asyncio.sleep(max(0.0, due - loop.time()) if pace else 0)
        usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
        write(_event(json.dumps({"choices": [], "usage": usage}).encode()) + _event(b"[DONE]") + b"0\r\n\r\n")


def _event(data: bytes) -> bytes:
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


class Proxy(asyncio.Protocol):
    """One end of a proxied connection; forwards data to the `other` end."""

    other: asyncio.Transport

    def __init__(self, target: int = 0) -> None:
        self._target = target

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a socket's
        if self._target:
            ahead = socket.create_connection(("127.0.0.1", self._target))
            asyncio.get_running_loop().create_task(self._connect(transport, ahead))

    async def _connect(self, transport: asyncio.Transport, ahead: socket.socket) -> None:
        back = Proxy()
        back.other = transport
        self.other, _ = await asyncio.get_running_loop().create_connection(lambda: back, sock=ahead)

    def data_received(self, data: bytes) -> None:
        self.other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.other.close()


async def serve(target: int) -> None:
    """Serve until the process ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server((lambda: Proxy(target)) if target else StubServer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proxy", type=int, default=0, metavar="PORT", help="forward to this port")
    uvloop.run(serve(parser.parse_args().proxy))
