"""One HTTP request and its response, as the application sees them (ASGI)."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TypeAlias

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl

from runtime.retrieval.fair_gate import FairLimit

log = logging.getLogger(__name__)

Headers: TypeAlias = list[tuple[bytes, bytes]]  # names in lower case
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_WITHOUT_BODY = (204, 304)
_CLOSE = (b"connection", b"close")


class Exchange:
    """A request whose body may still arrive, and its response. `on_end` is called when the response is complete."""

    def __init__(
        self,
        scope: Scope,
        transport: asyncio.Transport,
        flow: FlowControl,
        default_headers: Headers,
        on_end: Callable[[], None],
        close: Callable[[], None],
        limit: FairLimit | None,
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        """default_headers: of every response; close: closes the connection; limit: has arrived in it from when all of
        its body has until the application begins to respond."""
        self._scope, self._transport, self._flow = scope, transport, flow
        self._default_headers, self._on_end, self._close = default_headers, on_end, close
        self._limit, self.keep_alive = limit, keep_alive
        self._expects_continue = expects_continue
        self._body, self.arrived, self._received = bytearray(), False, False
        self._arrived_ns = 0
        self._waiting: asyncio.Future[None] | None = None  # of `receive`
        self.disconnected = self.started = self.ended = False
        self._start: tuple[int, Iterable[tuple[bytes, bytes]]] | None = (
            None  # held back until the first part of the body: one write
        )
        self._chunked = False
        self._left: int | None = None  # bytes of the response that are still to be sent, if it declares them

    # ---- called by the connection

    def add_body(self, part: bytes) -> None:
        """Add a part of the request's body; reading pauses while much of it waits for the application."""
        self._body += part
        if len(self._body) > HIGH_WATER_LIMIT:
            self._flow.pause_reading()
        if self._waiting is not None:
            self._wake()

    def end_body(self) -> None:
        """The request's body is complete."""
        self.arrived, self._arrived_ns = True, time.monotonic_ns()
        if self._limit is not None:
            self._limit.arrived += 1
        if self._waiting is not None:
            self._wake()

    def disconnect(self) -> None:
        """Nothing more is received, and nothing that the application sends is."""
        self.disconnected = True
        self._wake()

    async def run(self, app: ASGIApp) -> None:
        """Let the application respond. If it fails, the connection closes."""
        try:
            await app(self._scope, self.receive, self.send)
            if not self.ended and not self.disconnected:
                log.error("%s %s has no complete response", self._scope["method"], self._scope["path"])
        except Exception:
            log.exception("%s %s failed", self._scope["method"], self._scope["path"])
        finally:
            self._leave()
            if not self.ended:
                self._close()

    def _leave(self) -> None:
        """The application has done its work, whether or not its response is read."""
        if self._limit is not None and self.arrived:
            self._limit.arrived -= 1
        self._limit = None

    def _wake(self) -> None:
        """Let `receive` go on."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # ---- called by the application

    def arrived_body(self, limit: int) -> bytes | None:
        """Return the body if all of it has arrived, of at most `limit` bytes; None: `receive` it."""
        if not self.arrived or self._received or self.disconnected or len(self._body) > limit:
            return None
        self._received = True
        body, self._body = bytes(self._body), bytearray()
        return body

    def arrived_ns(self) -> int:
        """Return when all of the body had arrived, in monotonic ns; 0: it has not."""
        return self._arrived_ns

    async def receive(self) -> Message:
        """Return what has arrived of the body, or wait for more; after all of it, for the end or a disconnect."""
        if self._expects_continue and not self.arrived and not self._transport.is_closing():
            self._expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.disconnected or self.ended or self._body or (self.arrived and not self._received)):
            self._flow.resume_reading()
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self.disconnected or self.ended:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._received = self.arrived
        return {"type": "http.request", "body": body, "more_body": not self.arrived}

    async def send(self, message: Message) -> None:
        """Send a part of the response; waits while the client does not read."""
        self._leave()
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        if self.ended:
            raise RuntimeError("the response is already complete")
        if self._start is None and not self.started:
            if self._expects_continue and not self.arrived:  # nobody knows whether its body or a request follows
                self.keep_alive = False
            self._expects_continue, self._start = False, (message["status"], message.get("headers", ()))
        else:
            self._write(message.get("body", b""), message.get("more_body", False))

    def _write(self, body: bytes, more: bool) -> None:
        head, self._start = (b"" if self._start is None else self._head(*self._start)), None
        self.started = True
        if self._scope["method"] == "HEAD":
            body = b""
        elif self._chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the response is longer or shorter than its Content-Length")
        self._transport.write(head + body)
        if not more:
            self.ended = True
            if self._waiting is not None:
                self._wake()
            if not self.keep_alive:
                self._close()
            self._on_end()

    def _head(self, status: int, own: Iterable[tuple[bytes, bytes]]) -> bytes:
        headers: Headers = [*self._default_headers, *own]
        length = closes = False
        for name, value in headers:
            if name == b"content-length":
                length, self._left = True, int(value)
            elif name == b"connection" and value.lower() == b"close":
                closes = True
        if status in _WITHOUT_BODY:  # whatever length it declares is of another response
            length, self._left = True, 0
        self._chunked = not length and self._scope["http_version"] != "1.0"
        if self._chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        self.keep_alive = self.keep_alive and not closes
        if not self.keep_alive and not closes:
            headers.append(_CLOSE)
        return head_of(status, headers)


def head_of(status: int, headers: Headers) -> bytes:
    """Return the head of a response. Raises RuntimeError for a header with a line break."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    head = b"".join([_STATUS_LINES[status], *lines, b"\r\n"])
    if not head.count(b"\n") == head.count(b"\r") == len(lines) + 2 or b"\0" in head:
        raise RuntimeError("a header of the response has a line break")
    return head
