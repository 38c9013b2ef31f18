"""Middleware and checks before the routes: request ids, API keys, the Host header, limits on bodies, and responses to
unexpected exceptions.

Every response has an `x-request-id`, errors included: the client's own if it sent one, else a generated one.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ipc import Memo
from ipc.ring.descriptors import MAX_U16
from runtime.errors import InternalError, InvalidRequest, TrinityError, Unauthorized
from runtime.serving.frontend.observability import CLIENT_ID, trace_context, trace_context_of
from runtime.serving.http.access import FULL_ACCESS, Access
from runtime.serving.http.responses import error_json, to_json

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = REQUEST_ID_HEADER.encode()
_PREFIXES = {"/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl", "/v1/retrieval": "ret"}
_DEFAULT_PREFIX = "req"

# The rest of a body that is too large is read and discarded after the response, up to these limits: a client that is
# still sending when the connection closes would see a broken pipe instead of the response.
DISCARD_BYTES = 8 << 20
DISCARD_S = 10.0


class _EarlyResponse(Response):
    """A response that is sent before the request's body has arrived, which is then discarded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        discarded, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while more and discarded <= DISCARD_BYTES:
                    message = await receive()
                    discarded += len(message.get("body", b""))
                    more = message.get("more_body", False)  # a disconnect has none
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: TrinityError, headers: Mapping[str, str] | None = None) -> Response:
    """Return OpenAI's error object with the error's status."""
    response_class = _EarlyResponse if isinstance(error, BodyTooLarge) and error.more else Response
    if isinstance(error, RequestTooSlow):  # the rest of its body is not a request
        headers = {**(headers or {}), "Connection": "close"}
    return response_class(to_json(error_json(error)), error.status, headers, media_type="application/json")


class BodyTooLarge(InvalidRequest):
    """The body exceeds the limit. `more`: a part of it may still arrive."""

    code = "request_too_large"
    status = 413
    more = True


class NotJson(InvalidRequest):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"
    status = 415


class CompressedBody(NotJson):
    """The body is compressed: its size is unknown before it is decompressed."""


class RequestTooSlow(InvalidRequest):
    """A request's head or body did not arrive in time."""

    code = "request_timeout"
    status = 408


class HostNotAllowed(InvalidRequest):
    """The Host header of a request to a server without keys is not one of the server's names."""

    code = "host_not_allowed"
    status = 403


MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 30.0
MAX_RECEIVING_BYTES = 64 << 20
ReadBody = Callable[[Request], Awaitable[bytes]]  # reads a request's body, within the limits of the node


class BodyMemory:
    """Memory of the bodies that are being received, over all connections: at most `limit_bytes`.

    If a part of one finds no room, those that have been arriving for longest are given up: a client that sends its
    request slowly, or half of it, cannot keep memory that others need.
    """

    def __init__(self, limit_bytes: int = MAX_RECEIVING_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._received: dict[asyncio.Timeout, int] = {}  # bytes by body, the oldest first

    def count(self, body: asyncio.Timeout, size: int) -> None:
        """Count `size` bytes received of a body, which is given up by expiring its timeout."""
        self._received[body] = size
        while sum(self._received.values()) > self._limit_bytes:
            oldest = next(iter(self._received))
            oldest.reschedule(0)
            del self._received[oldest]

    def release(self, body: asyncio.Timeout) -> None:
        """Count nothing for a body. Idempotent."""
        self._received.pop(body, None)


async def read_body(request: Request, memory: BodyMemory, limit: int, timeout_s: float) -> bytes:
    """Return the body, at most `limit` bytes.

    Raises CompressedBody, NotJson, BodyTooLarge, RequestTooSlow or starlette's ClientDisconnect.
    """
    encoding = _header(request.scope, b"content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise CompressedBody(f"the body has Content-Encoding {encoding[:64]!r}: send it uncompressed")
    content_type = _header(request.scope, b"content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        # Against CSRF: a web page may send other types across origins without a CORS preflight.
        raise NotJson(f"the body's type is {content_type[:64]!r}: send the header 'Content-Type: application/json'")
    return await bounded_body(request, memory, limit, timeout_s)


async def bounded_body(
    request: Request, memory: BodyMemory, limit: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S
) -> bytes:
    """Return the body of any type. Raises BodyTooLarge, RequestTooSlow or starlette's ClientDisconnect."""
    arrived: bytes | None = request.scope.get("state", {}).get("arrived_body", _none)(limit)
    if arrived is not None:  # as that of most requests, in one piece with the head: there is nothing to wait for
        return arrived
    declared = request.headers.get("content-length", "")
    size = int(declared[:20]) if declared.isdecimal() else 0  # as declared; received bytes are counted below
    parts: list[bytes] = []
    received, more = 0, True
    timeout = asyncio.timeout(timeout_s)
    try:
        async with timeout:
            while more and max(received, size) <= limit:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                received += len(parts[-1])
                more = message.get("more_body", False)
                memory.count(timeout, received)
    except TimeoutError:
        slow = f"the body did not arrive within {timeout_s:g} s"
        if timeout.when() == 0:
            slow = "the body arrives slowly, and the bodies of others need the memory"
        raise RequestTooSlow(f"{slow}; {received} bytes received") from None
    finally:
        memory.release(timeout)
    if max(received, size) > limit:
        refusal = BodyTooLarge(f"the body has {max(received, size)} bytes or more, the limit is {limit}")
        refusal.more = more
        raise refusal
    return b"".join(parts)


def _header(scope: Scope, wanted: bytes, default: str) -> str:
    """Return the first of a request's headers of this name."""
    for name, value in scope["headers"]:
        if name == wanted:
            return str(value, "latin-1")
    return default


def _none(limit: int) -> None:
    """The application runs without our server."""


class Application(Starlette):
    """Without the framework's handling of unexpected errors, which `AuthMiddleware` handles, on every request's way."""

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        for factory, arguments, options in reversed(self.user_middleware):
            app = factory(app, *arguments, **options)
        return app


class AuthMiddleware:
    """ASGI middleware for authentication: all paths but `open_paths` require a key as bearer token (see `access_of`).

    Without keys every path is open to requests whose Host is a loopback name or the configured `host`. This prevents
    DNS rebinding: a page whose own name resolves to 127.0.0.1 has this server's origin, and only the Host header
    differs.

    An unexpected exception is logged and answered without a traceback. (The framework's own handler re-raises it, and
    the server then closes a connection that the client may reuse.)

    POST requests to exactly the paths of `direct` skip the framework's routing and error handling, which take longer
    than such a route itself; `on_error` returns the response to an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        open_paths: Sequence[str],
        host: str,
        access: Mapping[str, Access],
        direct: Mapping[str, Callable[[Request], Awaitable[Response]]],
        on_error: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app, self._direct, self._on_error = app, direct, on_error
        self._host = host.lower()
        self._own_hosts: Memo[bytes, bool] = Memo(lambda host: self._is_own_host(host.decode("latin-1")), most=256)
        self._open_paths = frozenset(open_paths)
        flows = [1 + number % MAX_U16 for number in range(len(keys))] if len(keys) > 1 else [0]
        self._access = [
            replace(access.get(key, FULL_ACCESS), flow=flow) for flow, key in zip(flows, keys, strict=False)
        ]
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["access"] = FULL_ACCESS
        if scope["type"] == "http" and (refusal := self._check(scope)) is not None:
            headers = {"WWW-Authenticate": "Bearer"} if isinstance(refusal, Unauthorized) else {}
            await error_response(refusal, headers)(scope, receive, send)
            return
        route = self._direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        try:
            if route is not None:
                http = Request(scope, receive, send)
                try:
                    response = await route(http)
                except TrinityError as error:
                    response = await self._on_error(http, error)
                await response(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Exception:
            if scope["type"] != "http" or scope["state"]["unsent"].started:
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            response = error_response(InternalError("internal error; the server's log has more"))
            await response(scope, receive, send)

    def _check(self, scope: Scope) -> TrinityError | None:
        if not self._digests:
            return self._check_host(scope)
        return None if scope["path"] in self._open_paths else self._check_key(scope)

    def _check_host(self, scope: Scope) -> TrinityError | None:
        """A request without Host passes: HTTP/1.0 clients may omit it, browsers always send it."""
        for name, value in scope["headers"]:
            if name == b"host" and not self._own_hosts[value]:
                host = value.decode("latin-1")[:128]
                return HostNotAllowed(
                    f"the request's Host is {host!r}: a server without API keys accepts only localhost, loopback "
                    f"addresses and its http.host ({self._host})"
                )
        return None

    def _is_own_host(self, host: str) -> bool:
        host = host.strip().lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].removesuffix(".")
        if name in (self._host, "localhost") or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def _check_key(self, scope: Scope) -> TrinityError | None:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer":
            return Unauthorized("this server needs an API key: send the header 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(token.strip()).digest()
        # Every key is compared in constant time, so the timing reveals nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            return Unauthorized("the API key is wrong")
        scope["state"]["access"] = self._access[matches.index(True)]
        return None


def id_source(epoch: int) -> Callable[[str], str]:
    """Return a generator of request ids by path, unique within the node (`epoch`: the frontend's)."""
    count = itertools.count(1)
    return lambda path: f"{_PREFIXES.get(path, _DEFAULT_PREFIX)}-{epoch:x}-{next(count)}"


def request_id(http: Request) -> str:
    """Return the generated id of a request."""
    return str(http.scope["state"]["request_id"])


def client_id_of(http: Request) -> str:
    """Return the client's id of a request; "" if it sent none or an invalid one."""
    return str(http.scope["state"]["client_id"])


class RequestContextMiddleware:
    """Outermost ASGI middleware: request ids, trace context and response metrics.

    While the node drains, responses close their connection, so a load balancer does not send a request over a kept one
    that is just being closed. `on_response` is called with every response's path, status and seconds, from the
    request's head to that of the response: how fast the client reads does not count.
    """

    def __init__(
        self,
        app: ASGIApp,
        new_id: Callable[[str], str],
        draining: Callable[[], bool],
        on_response: Callable[[str, int, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._new_id, self._draining = app, new_id, draining
        self._on_response, self._clock = on_response, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, seconds = self._clock(), 500, -1.0
        own_id, client_ids, traced = self._new_id(scope["path"]), [], False
        for name, value in scope["headers"]:
            if name == _REQUEST_ID:
                client_ids.append(value)
            elif name == b"traceparent":
                traced = True
        client_id = _client_id(client_ids)
        scope.setdefault("state", {}).update(request_id=own_id, client_id=client_id)
        trace_context.set(trace_context_of(Headers(scope=scope) if traced else {}))

        async def send_with_id(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status, seconds = message["status"], self._clock() - begin
                headers = [header for header in message["headers"] if header[0] != _REQUEST_ID]
                headers.append((_REQUEST_ID, (client_id or own_id).encode()))
                if self._draining():
                    headers = [header for header in headers if header[0] != b"connection"]
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._on_response(scope["path"], status, self._clock() - begin if seconds < 0 else seconds)


def _client_id(values: Sequence[bytes]) -> str:
    """Return the client's id from its headers; "" for several, or an invalid one."""
    value = values[0].decode("latin-1") if len(values) == 1 else ""
    return value if CLIENT_ID.fullmatch(value) else ""
