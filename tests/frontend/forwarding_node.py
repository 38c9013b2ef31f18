"""An HTTP worker and the frontend behind it, in one event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.types import ASGIApp

from runtime.node.config import HttpSection
from runtime.node.supervisor.listen import listen_private
from runtime.serving.http.connections import HttpConfig
from runtime.serving.http.forwarding import Forwarder, answering_or_forwarding
from runtime.serving.http.middleware import id_source
from runtime.serving.http.request_context import RequestContextMiddleware
from runtime.serving.http.response_memory import ResponseMemory
from runtime.serving.http.server import Server, private_limits


class Front:
    """An HTTP worker, whose own application is `own`, and behind it the frontend's `app`."""

    def __init__(self, home: Path, app: ASGIApp, own: ASGIApp) -> None:
        self.path, self.forwarded, self.failures = str(home / "frontend.sock"), 0, 0
        limits, new_id = HttpSection(), id_source(1)
        self.forward = Forwarder(self.path, "the frontend")
        worker = answering_or_forwarding(own, self.forward, ("/v1/retrieval",), self._with_id, self._count)
        config = HttpConfig(worker, limits, new_id, 1.0)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.worker = Server(config, listener)
        self.frontend = Server(HttpConfig(app, private_limits(limits), new_id, 1.0), listen_private(self.path))

    def _with_id(self, refusal: ASGIApp) -> ASGIApp:
        return RequestContextMiddleware(refusal, id_source(2), lambda: False, self._failed, ResponseMemory())

    def _count(self) -> None:
        self.forwarded += 1

    def _failed(self, path: str, status: int, seconds: float) -> None:
        self.failures += 1

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Return head and body of the response to a request on a connection of its own."""
        reader, writer = await self.connect()
        writer.write(request)
        head, body = await answer(reader)
        writer.close()
        return head, body


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return head and body of a response with a declared length, or of one without a body."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    return head, await reader.readexactly(int(lines.get(b"content-length", b"0")))


@contextlib.asynccontextmanager
async def front(home: Path, app: ASGIApp, own: ASGIApp | None = None) -> AsyncIterator[Front]:
    found = Front(home, app, own or app)
    tasks = [asyncio.create_task(server.accept()) for server in (found.frontend, found.worker)]
    try:
        yield found
    finally:
        for server in (found.worker, found.frontend):
            server.should_exit = True
            for connection in list(server.server_state.connections):
                connection.transport.abort()
        await asyncio.gather(*tasks)
        found.forward.close()
        await asyncio.sleep(0)  # in which they close
