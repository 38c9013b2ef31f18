"""What comes before the routes: request ids, limits on bodies, and responses to errors.

Every response has an `x-request-id`, errors included: the client's own if it sent one, else a generated one.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import InvalidRequest, TrinityError
from runtime.retrieval.fair_gate import FairLimit
from runtime.serving.http.responses import error_json, to_json

REQUEST_ID_HEADER = "x-request-id"
RETRY_AFTER_S = 1
"""When to try again what was refused for lack of room, in `Retry-After`."""
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
    """Return OpenAI's error object with the error's status, and when to try again if that may help."""
    response_class = _EarlyResponse if isinstance(error, BodyTooLarge) and error.more else Response
    if isinstance(error, RequestTooSlow):  # the rest of its body is not a request
        headers = {**(headers or {}), "Connection": "close"}
    if error.status in (429, 503):
        headers = {**(headers or {}), "Retry-After": str(RETRY_AFTER_S)}
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


_JSON = b"application/json"
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
    encoding = content_type = None  # the first of each
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            content_type = value if content_type is None else content_type
        elif name == b"content-encoding":
            encoding = value if encoding is None else encoding
    if encoding is not None and encoding.strip().lower() not in (b"identity", b""):
        raise CompressedBody(f"the body has Content-Encoding {_shown(encoding)}: send it uncompressed")
    if content_type != _JSON and (content_type or b"").partition(b";")[0].strip().lower() != _JSON:
        # Against CSRF: a web page may send other types across origins without a CORS preflight.
        raise NotJson(
            f"the body's type is {_shown(content_type or b'')}: send the header 'Content-Type: application/json'"
        )
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


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:64])


def _none(limit: int) -> None:
    """The application runs without our server."""


class Application(Starlette):
    """Without the framework's handling of unexpected errors, which `AuthMiddleware` handles, on every request's way.

    limits: of POST requests in progress, by path.
    """

    def __init__(self, limits: Mapping[str, FairLimit]) -> None:
        super().__init__()
        self.limits = limits

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:  # type: ignore[override]
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        return self.middleware_stack(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        for factory, arguments, options in reversed(self.user_middleware):
            app = factory(app, *arguments, **options)
        return app


def id_source(epoch: int) -> Callable[[str], str]:
    """Return a generator of request ids by path, unique within the node (`epoch`: the frontend's)."""
    count = itertools.count(1)
    return lambda path: f"{_PREFIXES.get(path, _DEFAULT_PREFIX)}-{epoch:x}-{next(count)}"


def request_id(http: Request) -> str:
    """Return the generated id of a request."""
    return str(http.scope["state"]["request_id"])


def arrived_ns(http: Request) -> int:
    """Return when all of a request had arrived, in monotonic ns; 0: it has not, or there is no server of ours."""
    when: Callable[[], int] = http.scope["state"].get("arrived_ns", int)
    return when()


def client_id_of(http: Request) -> str:
    """Return the client's id of a request; "" if it sent none or an invalid one."""
    return str(http.scope["state"]["client_id"])
