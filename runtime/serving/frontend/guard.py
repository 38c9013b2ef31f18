"""What stands before the routes: API keys, the type, size and time of a body, and the answer to a fault of our own."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import InternalError, InvalidRequest, TrinityError, Unauthorized
from runtime.serving.frontend.answers import error_json, to_json

log = logging.getLogger(__name__)

# A body that is too large is read to its end and thrown away, up to so many times its limit: a client that still sends
# when the connection closes would see a broken pipe instead of the answer.
DISCARD = 8


def error_response(error: TrinityError, headers: Mapping[str, str] | None = None) -> Response:
    """OpenAI's error object under the error's status."""
    return Response(to_json(error_json(error)), error.status, headers, media_type="application/json")


class BodyTooLarge(InvalidRequest):
    """The body has more bytes than the limit."""

    code = "request_too_large"
    status = 413


class NotJson(InvalidRequest):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"
    status = 415


class Encoded(NotJson):
    """The body is compressed: its size would be known too late."""


class RequestTooSlow(InvalidRequest):
    """A request's head or body did not arrive in time."""

    code = "request_timeout"
    status = 408


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body, of at most `limit` bytes.

    Raises Encoded, NotJson, BodyTooLarge, RequestTooSlow or starlette's ClientDisconnect.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise Encoded(f"the body is encoded as {encoding[:64]!r}: send it as it is")
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        # Not only for order's sake: a browser sends any other type to us from any web page, without asking first.
        raise NotJson(f"the body's type is {kind[:64]!r}: send the header 'Content-Type: application/json'")
    declared = request.headers.get("content-length", "")
    size = int(declared[:20]) if declared.isdecimal() else 0  # what it says; what comes is counted below
    parts: list[bytes] = []
    received = 0
    try:
        async with asyncio.timeout(timeout_s):
            if size <= limit * DISCARD:
                async for part in request.stream():
                    received += len(part)
                    if max(received, size) <= limit:
                        parts.append(part)
                    elif received > limit * DISCARD:
                        break
    except TimeoutError:
        raise RequestTooSlow(f"the body did not arrive within {timeout_s:g} s; {received} bytes did") from None
    if max(received, size) > limit:
        raise BodyTooLarge(f"the body has {max(received, size)} bytes or more, the limit is {limit}")
    return b"".join(parts)


class Guard:
    """ASGI middleware: all but `open_paths` need one of the keys as a bearer token. Without keys everything is open.

    An exception that no route foresaw is logged here and answered without its traceback. (The framework's own handler
    would raise on, and the server would close the connection under a client that means to go on using it.)
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Sequence[str]) -> None:
        self._app = app
        self._open_paths = frozenset(open_paths)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in self._open_paths:
            problem = self._problem(scope)
            if problem is not None:
                response = error_response(problem, {"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            if started or scope["type"] != "http":
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            response = error_response(InternalError("internal error; the server's log has more"))
            await response(scope, receive, send)

    def _problem(self, scope: Scope) -> TrinityError | None:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer":
            return Unauthorized("this server needs an API key: send the header 'Authorization: Bearer KEY'")
        given = hashlib.sha256(token.strip()).digest()
        # Every key is compared, whole, so that the time taken tells nothing of any.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return None if any(matches) else Unauthorized("the API key is wrong")
