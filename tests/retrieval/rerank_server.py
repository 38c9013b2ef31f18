"""A fake server of `POST /v1/rerank` over real HTTP, with scripted faults."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = Callable[[socket.socket, dict[str, Any]], bool]
"""Answers a request; returns whether the connection is kept."""


def respond(status: int, content: Any) -> Answer:
    """Answer with a status and JSON, or bytes."""

    def answer(connection: socket.socket, body: dict[str, Any]) -> bool:
        sent = content if isinstance(content, bytes) else json.dumps(content).encode()
        connection.sendall(f"HTTP/1.1 {status} X\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
        return True

    return answer


def by_length(connection: socket.socket, body: dict[str, Any]) -> bool:
    """Score texts by their length, as vLLM answers: best first, with the documents."""
    texts = body["documents"]
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))[: body["top_n"]]
    results = [{"index": n, "document": {"text": texts[n]}, "relevance_score": len(texts[n]) / 8} for n in order]
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    return respond(200, {"id": "rerank-1", "model": body["model"], "results": results, "usage": usage})(
        connection, body
    )


def hang_up(connection: socket.socket, body: dict[str, Any]) -> bool:
    """Close the connection without an answer."""
    return False


class FakeRerankServer:
    """`script`: answers to give first; then `by_length`. `asked`: bodies received; `heads`: request heads."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.asked: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.released = threading.Event()
        self.url = ""

    def hang(self, connection: socket.socket, body: dict[str, Any]) -> bool:
        """Answer nothing until the test ends."""
        self.released.wait(60)
        return False

    def drip(self, connection: socket.socket, body: dict[str, Any]) -> bool:
        """Send a response byte by byte, until the client or the test ends."""
        connection.sendall(b"HTTP/1.1 200 X\r\nContent-Length: 100000\r\n\r\n")
        while not self.released.wait(0.005):
            connection.sendall(b" ")
        return False

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                while head := self._head(file):
                    length = int(head.lower().partition("content-length: ")[2].split()[0])
                    self.heads.append(head)
                    self.asked.append(json.loads(file.read(length)))
                    answer = self.script.pop(0) if self.script else by_length
                    if not answer(connection, self.asked[-1]):
                        return
            except (OSError, IndexError, ValueError):
                return

    def _head(self, file: Any) -> str:
        lines = []
        while line := file.readline().decode().strip():
            lines.append(line)
        return "\n".join(lines)


@contextmanager
def rerank_server() -> Iterator[FakeRerankServer]:
    """Run a server on a loopback port."""
    stand = FakeRerankServer()
    listening = socket.create_server(("127.0.0.1", 0))
    stand.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=stand.serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield stand
    finally:
        stand.released.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)
