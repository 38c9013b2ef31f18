"""What stands before the routes: API keys, and the size and the time of a body."""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import InvalidRequest, TrinityError, Unauthorized
from runtime.serving.answers import error_json, to_json

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


class BodyTooSlow(InvalidRequest):
    """The body did not arrive in time."""

    code = "request_timeout"
    status = 408


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body, of at most `limit` bytes. Raises BodyTooLarge, BodyTooSlow or starlette's ClientDisconnect."""
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
        raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s; {received} bytes did") from None
    if max(received, size) > limit:
        raise BodyTooLarge(f"the body has {max(received, size)} bytes or more, the limit is {limit}")
    return b"".join(parts)


class Guard:
    """ASGI middleware: paths under /v1 need one of the keys as a bearer token. Without keys everything is open."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"].startswith("/v1"):
            problem = self._problem(scope)
            if problem is not None:
                response = error_response(problem, {"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> TrinityError | None:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer":
            return Unauthorized("this server needs an API key: send the header 'Authorization: Bearer KEY'")
        given = hashlib.sha256(token.strip()).digest()
        # Every key is compared, whole, so that the time taken tells nothing of any.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return None if any(matches) else Unauthorized("the API key is wrong")
