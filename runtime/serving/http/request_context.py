"""What every request and response has: ids, trace context, the memory that a response takes, metrics."""

import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import TrinityError
from runtime.serving.frontend.observability import CLIENT_ID, NO_TRACE_CONTEXT, trace_context, trace_context_of
from runtime.serving.http.middleware import REQUEST_ID_HEADER, error_response
from runtime.serving.http.response_memory import CONNECTION_BYTES, ResponseMemory, UnsentResponse

_REQUEST_ID = REQUEST_ID_HEADER.encode()


class RequestContextMiddleware:
    """Outermost ASGI middleware: request ids, trace context, memory of responses and their metrics.

    While the node drains, responses close their connection, so a load balancer does not send a request over a kept one
    that is just being closed. `on_response` is called with every response's path, status and seconds, from the
    request's arrival to the head of the response: how fast the client sends and reads does not count, and how long the
    request waits for the event loop does.
    """

    def __init__(
        self,
        app: ASGIApp,
        new_id: Callable[[str], str],
        draining: Callable[[], bool],
        on_response: Callable[[str, int, float], None],
        memory: ResponseMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._new_id, self._draining = app, new_id, draining
        self._on_response, self._memory, self._clock = on_response, memory, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, path = self._clock(), scope["path"]
        own_id, client_id = self._new_id(path), client_id_in(scope["headers"])
        traced = any(name == b"traceparent" for name, _ in scope["headers"])
        state = scope.setdefault("state", {})
        unsent = self._memory.begin(state.get("disconnect", _no_connection))
        state.update(request_id=own_id, client_id=client_id, unsent=unsent)
        trace_context.set(trace_context_of(Headers(scope=scope)) if traced else NO_TRACE_CONTEXT)
        response = ResponseSender(scope, receive, send, unsent, client_id or own_id, self._draining, self._clock)
        try:
            await self._app(scope, receive, response)
        finally:
            unsent.release()
            now = self._clock() if response.begun_at is None else response.begun_at
            arrived = state.get("arrived_ns", int)() / 1e9
            self._on_response(path, response.status, now - (arrived if 0.0 < arrived <= now else begin))


class ResponseSender:
    """An ASGI `send` that adds the request's id, and hands the response to the connection in parts, which count in a
    `ResponseMemory` while they wait.

    status, begun_at: of the response, 500 and None before it has begun.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        unsent: UnsentResponse,
        request_id: str,
        draining: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._unsent, self._request_id, self._draining, self._clock = unsent, request_id, draining, clock
        self._start: Message | None = None  # held back until the first part of the body has room
        self._refused = False
        self.status = 500
        self.begun_at: float | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start, self._unsent.started = message, True
            return
        body, more_body = message.get("body", b""), message.get("more_body", False)
        if self._refused:
            return
        if more_body or self._unsent.held_bytes or len(body) > CONNECTION_BYTES:
            await self._send_in_parts(body, more_body)
        else:  # in one part, which never counts
            await self._send_start()
            await self._send(message)

    async def _send_in_parts(self, body: bytes, more_body: bool) -> None:
        try:
            self._unsent.reserve(len(body))
        except TrinityError as error:
            self._refused = True
            if self._start is None:  # too late for an error
                self._unsent.disconnect()
            else:
                self._start, self._refused = None, False
                await error_response(error)(self._scope, self._receive, self)
                self._refused = True
            return
        await self._send_start()
        self._unsent.start_sending()
        for begin in range(0, max(len(body), 1), CONNECTION_BYTES):  # each waits until the one before was read
            end = begin + CONNECTION_BYTES
            part: Message = {"body": body[begin:end], "more_body": more_body or end < len(body)}
            await self._send({"type": "http.response.body", **part})
            self._unsent.sent_bytes = begin
        self._unsent.release()  # a stream may go on for long

    async def _send_start(self) -> None:
        if self._start is not None:
            message, self._start = self._start, None
            headers = self._begin(message["status"], message["headers"])
            await self._send({**message, "headers": headers})

    def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Record the beginning of the response; return its headers."""
        self.status, self.begun_at, self._unsent.started = status, self._clock(), True
        sent = [header for header in headers if header[0] != _REQUEST_ID]
        sent.append((_REQUEST_ID, self._request_id.encode()))
        if self._draining():
            sent = [header for header in sent if header[0] != b"connection"]
            sent.append((b"connection", b"close"))
        return sent


def _no_connection() -> None:
    """Disconnect nothing: the application runs without a server."""


def client_id_in(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the client's own id of a request; "" for none, several, or an invalid one."""
    values = [value for name, value in headers if name == _REQUEST_ID]
    value = values[0].decode("latin-1") if len(values) == 1 else ""
    return value if CLIENT_ID.fullmatch(value) else ""
