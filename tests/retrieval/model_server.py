"""A fake server of models over real HTTP, with scripted answers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Answer = tuple[int, dict[str, str], Any] | Callable[[BaseHTTPRequestHandler], None]
"""Status, headers and content (JSON or bytes; None for the model's), or what a request's handler does instead."""


class ModelServer:
    """`script`: answers to give first. `asked`: the bodies received; `keys`: the Authorization headers received."""

    path = "/v1/models"

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.lock = threading.Lock()
        self.released = threading.Event()
        """Set at the end of the test."""
        self.url = ""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return what the model answers."""
        raise NotImplementedError


S = TypeVar("S", bound=ModelServer)


@contextmanager
def serving(stand: S) -> Iterator[S]:
    """Run a server on a loopback port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stand.lock:
                stand.asked.append(body)
                stand.keys.append(self.headers.get("Authorization", ""))
                answer: Answer = stand.script.pop(0) if stand.script else (200, {}, None)
            if not isinstance(answer, tuple):
                self.close_connection = True
                answer(self)
                return
            status, headers, content = answer
            found = stand.answer(body) if content is None else content
            sent = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status if self.path == stand.path else 404)
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
        stand.released.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
