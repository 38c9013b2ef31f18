"""A connection to an HTTP server without sockets: the test says when what is received, and when the server goes on."""

import asyncio
from typing import Any

from starlette.types import ASGIApp
from uvicorn.server import ServerState

from runtime.node.config import HttpSection
from runtime.serving.http.admission import Admission
from runtime.serving.http.connections import BoundedConnection, HttpConfig, Timeouts


class Client(asyncio.Transport):
    """A connection to a server without sockets. Its client reads nothing of what is sent before it closes."""

    def __init__(
        self,
        app: ASGIApp,
        timeouts: Timeouts = Timeouts(),  # noqa: B008
        admission: Admission | None = None,
    ) -> None:
        super().__init__()
        self.received, self.reads, self.closing = b"", True, False
        self.closed, self.aborted = asyncio.Event(), asyncio.Event()
        config = HttpConfig(app, HttpSection(), lambda path: "req-1", drain_s=1, admission=admission, timeouts=timeouts)
        config.load()
        self.connection = BoundedConnection(config, ServerState(), {})
        self.connection.connection_made(self)

    async def sends(self, data: bytes) -> None:
        self.send(data)
        await self.idle()

    def send(self, data: bytes) -> None:
        """Send without letting the server do more than receive."""
        self.connection.data_received(data)

    async def idle(self) -> None:
        """Let the server do all it can."""
        for _ in range(20):
            await asyncio.sleep(0)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.received += data

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True
        self.closed.set()

    def abort(self) -> None:
        self.close()
        self.aborted.set()
        self.connection.connection_lost(None)
