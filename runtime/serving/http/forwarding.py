"""Passes requests on to another process of the node: over its private socket, streaming both ways. Who
reads slowly makes the other side wait.

```
client ──▶ connection ──▶ Forwarder ──▶ private socket ──▶ connection ──▶ application    the head as sent, the body's
       ◀──            ◀── send      ◀──                ◀──            ◀──                parts as they come
```
While the other process restarts, connections wait in its socket's backlog. A request whose connection ends before the
response is not sent again, as nobody knows whether it has been processed. One that changes nothing is, once: a process
that restarts closes connections while requests are on their way.

The head is passed on as the client sent it, key, Host and request id included: the other process checks it like any
client's, so nothing needs to be trusted that a client could forge.
"""

import asyncio
import contextlib
import select
from collections.abc import Callable, Collection

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import TrinityError, Unavailable, WorkerLost
from runtime.serving.http.middleware import error_response

_PART_BYTES = 64 << 10
_KEPT = 64  # connections without a request
_HOP_BY_HOP = (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
_OF_BODY = (b"content-length", b"transfer-encoding", b"expect")
_SAFE = ("GET", "HEAD", "OPTIONS")  # methods of requests that may be sent twice
_OWN = (*_HOP_BY_HOP, b"date", b"server")
"""Headers of a response that the connection to the client sets itself."""


class Forwarder:
    """ASGI application that lets the process `name` answer, which accepts HTTP on the unix socket `path`.

    Raises `Unavailable` if it accepts no connection, and `WorkerLost` if it ends before its response begins: nothing
    has been sent then. If it ends later, the client's connection closes.
    """

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name
        self._kept: list[_Connection] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        repeatable = scope["method"] in _SAFE and not any(name in _OF_BODY for name, _ in scope["headers"])
        while True:
            try:
                await self._exchange(await self._connect(), scope, receive, send)
                return
            except WorkerLost:
                if not repeatable:
                    raise
                repeatable = False
                self.close()  # the others end as well

    async def _exchange(self, connection: "_Connection", scope: Scope, receive: Receive, send: Send) -> None:
        reader, writer = connection
        response, request = _Response(is_head=scope["method"] == "HEAD"), _Request(scope, receive, writer)
        sending = asyncio.create_task(request.send(response.continues))
        try:
            while not response.complete and (data := await _read(reader)):
                response.feed(data)
                for message in response.take():
                    await send(message)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if response.keeps and request.complete and len(self._kept) < _KEPT and not writer.is_closing():
                self._kept.append(connection)
            else:
                writer.close()
        if response.complete or request.disconnected:
            return
        if not response.started:
            raise WorkerLost(f"{self._name} ended before it answered; whether it processed the request is unknown")
        scope["state"]["disconnect"]()
        while (await receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """Close the connections that are kept for later requests."""
        while self._kept:
            self._kept.pop()[1].close()

    async def _connect(self) -> "_Connection":
        """Return a kept connection that is still open, else a new one."""
        while self._kept:
            reader, writer = self._kept.pop()
            if not _is_readable(writer.get_extra_info("socket").fileno()):  # else by its end
                return reader, writer
            writer.close()
        try:
            return await asyncio.open_unix_connection(self._path, limit=_PART_BYTES)
        except OSError as error:
            raise Unavailable(f"{self._name} accepts no connection: {error.strerror}; try again later") from None


_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLRDHUP)
    return bool(poll.poll(0))


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return what arrives next; nothing at the end, also of a connection that was cut."""
    try:
        return await reader.read(_PART_BYTES)
    except OSError:
        return b""


class _Request:
    """A request on its way. `complete`: all of its body is sent; `disconnected`: its client has left."""

    def __init__(self, scope: Scope, receive: Receive, writer: asyncio.StreamWriter) -> None:
        self.complete = self.disconnected = False
        self._scope, self._receive, self._writer = scope, receive, writer
        self._chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])

    async def send(self, continues: asyncio.Event) -> None:
        """Send it, then wait for the client's end, with which the connection closes.

        A client that waits for "100 Continue" is told to send its body when the other process wants it.
        """
        body: bytes | None = self._scope["state"]["arrived_body"](_PART_BYTES)
        if body is not None:
            self._write(self._head() + self._framed(body, more=False))
            self.complete = True
        else:
            self._write(self._head())
            expected = {value.lower() for name, value in self._scope["headers"] if name == b"expect"}
            if expected == {b"100-continue"}:  # nothing else is ever fulfilled
                await continues.wait()
        with contextlib.suppress(OSError):  # it reads no more: its response, or its end, arrives
            while (message := await self._receive())["type"] != "http.disconnect":
                if self.complete:
                    continue
                more = message.get("more_body", False)
                self._write(self._framed(message.get("body", b""), more=more))
                await self._writer.drain()
                self.complete = not more
            self.disconnected = True
            self._writer.transport.abort()

    def _head(self) -> bytes:
        scope = self._scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = [header for header in scope["headers"] if header[0] not in _HOP_BY_HOP]
        if self._chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        if not any(name == b"host" for name, _ in headers):  # of HTTP/1.0, where it may be missing
            headers.append((b"host", b"localhost"))
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (scope["method"].encode(), target, lines)

    def _framed(self, body: bytes, *, more: bool) -> bytes:
        if not self._chunked:
            return body
        return (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        if data:
            self._writer.write(data)


class _Response:
    """Parser of one response, as ASGI messages. `continues` is set when the request's body is wanted."""

    def __init__(self, *, is_head: bool) -> None:
        self.started = self.complete = False
        self.continues = asyncio.Event()
        self._is_head, self._parser = is_head, httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._start: Message | None = None
        self._body: list[bytes] = []
        self._closes = False

    @property
    def keeps(self) -> bool:
        """Whether the connection may carry another request."""
        return self.complete and not self._closes and not self._is_head

    def feed(self, data: bytes) -> None:
        """Parse more. Raises `httptools.HttpParserError`: the processes of a node speak valid HTTP."""
        self._parser.feed_data(data)

    def take(self) -> list[Message]:
        """Return what has arrived since the last call."""
        messages: list[Message] = [] if self._start is None else [self._start]
        if self._body or self.complete:
            body = b"".join(self._body)
            messages.append({"type": "http.response.body", "body": body, "more_body": not self.complete})
        self._start, self._body = None, []
        return messages

    # ---- called by httptools

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.continues.set()
        if (status := self._parser.get_status_code()) == 100:
            return
        closes = [header for header in self._headers if header == (b"connection", b"close")]
        self._closes = bool(closes)
        headers = [header for header in self._headers if header[0] not in _OWN] + closes
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        self.started = True
        self.complete = self._is_head

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        self.complete = self.complete or self.started


def asking_others(app: ASGIApp, others: Collection[ASGIApp], prefix: str) -> ASGIApp:
    """Return `app`, which asks others for what it does not find under the path `prefix`: the first that has it answers.

    They are asked without a body, and their responses are small.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(prefix):
            await app(scope, receive, send)
            return
        headers = [header for header in scope["headers"] if header[0] not in _OF_BODY]
        response: list[Message] = []
        not_found: list[Message] = []

        async def keep(message: Message) -> None:
            response.append(message)

        for asked in (app, *others):
            response = []
            state = {**scope["state"], "arrived_body": lambda limit: b""}
            with contextlib.suppress(Unavailable, WorkerLost):  # what it had is lost with it
                await asked({**scope, "headers": headers, "state": state}, receive, keep)
            not_found = not_found or response
            if response and response[0]["status"] != 404:
                break
        else:
            response = not_found
        for message in response:
            await send(message)

    return answer


def answering_or_forwarding(
    app: ASGIApp,
    forward: ASGIApp,
    paths: Collection[str],
    refuse: Callable[[ASGIApp], ASGIApp],
    on_forwarded: Callable[[], None],
) -> ASGIApp:
    """Return the application of an HTTP worker: `app` answers the POST requests to `paths`, which change nothing, and
    `forward` lets the frontend answer the rest.

    refuse: adds what every response has to that to an error of `forward`.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] in paths:
            await app(scope, receive, send)
            return
        on_forwarded()
        try:
            await forward(scope, receive, send)
        except TrinityError as error:
            await refuse(error_response(error))(scope, receive, send)

    return answer
