"""A fake server of OpenAI's `/v1/embeddings` over real HTTP, with scripted answers."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class EmbeddingServer:
    """Embeds a text as [its length, 1, 0, …]. `script`: answers to send first: (status, headers, body or None for
    the vectors). `asked`: the bodies received; `keys`: the Authorization headers received."""

    def __init__(self, dim: int = 4) -> None:
        self.dim = dim
        self.script: list[tuple[int, dict[str, str], Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.lock = threading.Lock()
        self.url = ""

    @property
    def texts(self) -> list[str]:
        return [text for body in self.asked for text in body["input"]]

    def vector(self, text: str) -> list[float]:
        return [float(len(text)), 1.0, *[0.0] * (self.dim - 2)]

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        data = [{"object": "embedding", "index": n, "embedding": self.vector(t)} for n, t in enumerate(body["input"])]
        return {"object": "list", "data": data[::-1], "model": body["model"]}


@contextmanager
def embedding_server(dim: int = 4) -> Iterator[EmbeddingServer]:
    """Run a server on a loopback port."""
    stand = EmbeddingServer(dim)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stand.lock:
                stand.asked.append(body)
                stand.keys.append(self.headers.get("Authorization", ""))
                status, headers, content = stand.script.pop(0) if stand.script else (200, {}, None)
            sent = json.dumps(stand.answer(body) if content is None else content).encode()
            self.send_response(status if self.path == "/v1/embeddings" else 404)
            for name, value in {**headers, "Content-Length": str(len(sent))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *args: Any) -> None:
            """Suppress the request log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stand.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stand
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
