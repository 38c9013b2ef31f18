"""What stands before the routes: a request's id, API keys or host names, the type, size and time of a body, and the
answer to a fault of our own.

Every answer has an `x-request-id`, errors and refusals too: the client's own, if it sent one, or else ours.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import Forbidden, InternalError, InvalidRequest, TrinityError, Unauthorized, UnknownCollection
from runtime.node.api_keys import ApiKey
from runtime.retrieval.attributes.filters import (
    AttributeBinding,
    Filter,
    both_filters,
    decode_filter,
    excludes,
    filter_bytes,
)
from runtime.serving.frontend.observability import CLIENT_ID, trace_context, trace_context_of
from runtime.serving.http.responses import error_json, to_json

# ---- what the API key of a request may reach: every collection, or some, of which it may be bound to one tenant's part


@dataclass(frozen=True)
class Access:
    """grants: by collection, what its searches and writes are bound to, None for all of it; None: everything."""

    grants: Mapping[str, AttributeBinding | None] | None = None

    @property
    def salt(self) -> bytes:
        """Equal for keys that reach the same, which share KV; b"" for those that reach everything."""
        if self.grants is None:
            return b""
        return blake2b(repr(sorted(self.grants.items())).encode(), digest_size=16).digest()

    def visible(self, collections: Iterable[str]) -> list[str]:
        """Those of some collections that may be reached."""
        return [name for name in collections if self.grants is None or name in self.grants]

    def restriction(self, collection: str) -> AttributeBinding | None:
        """What has to hold of each document that is found or written. Raises `Forbidden`."""
        if self.grants is None:
            return None
        if collection not in self.grants:
            raise Forbidden(f"this API key may not reach collection {collection[:128]!r}", "collection")
        return self.grants[collection]

    def resolve(self, name: str, loaded: Iterable[str], param: str, what: str = "collection") -> str:
        """The name of a collection that is loaded and may be reached. Raises `UnknownCollection`, `Forbidden`."""
        if name not in loaded:
            reached = ", ".join(self.visible(loaded)) or "none"
            raise UnknownCollection(f"no {what} {name[:128]!r} is loaded; loaded: {reached}", param)
        self.restriction(name)
        return name

    def require_whole_collection(self, collection: str) -> None:
        """Raises `Forbidden` unless all of a collection may be reached."""
        if self.restriction(collection) is not None:
            raise Forbidden(f"this API key reaches a part of collection {collection!r} alone", "collection")

    def require_operator(self) -> None:
        """Raises `Forbidden` for a key that is bound to collections: those of tenants do not steer the node."""
        if self.grants is not None:
            raise Forbidden("this API key is bound to collections, and does not steer the node")

    def restrict(self, collection: str, asked: Filter | None) -> Filter | None:
        """The filter of a search. Raises `Forbidden` for a collection or a value that is not the key's own."""
        own = self.restriction(collection)
        if own is None:
            return asked
        if asked is not None and excludes(asked, own):
            raise Forbidden(f"this API key may ask for no other {own.key!r} than its own", "filter")
        return both_filters(own.filter(), asked)

    def restrict_bytes(self, collection: str, asked: bytes) -> bytes:
        """`restrict` of a filter as it travels to a pool; b"": none."""
        if self.grants is None:
            return asked
        return filter_bytes(self.restrict(collection, decode_filter(asked) if asked else None))


FULL_ACCESS = Access()


def access_by_key(keys: Iterable[ApiKey]) -> dict[str, Access]:
    """What keys may reach, of those that may not reach everything."""
    return {
        one.key: Access({name: bound and AttributeBinding(*bound) for name, bound in one.grants.items()})
        for one in keys
        if one.grants is not None
    }


def access_of(http: Request) -> Access:
    """What the request's key may reach, as the guard has found it."""
    found = http.state.access
    assert isinstance(found, Access)
    return found


log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_PREFIXES = {"/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl", "/v1/retrieval": "ret"}
_DEFAULT_PREFIX = "req"

# What still comes of a body that is too large is thrown away after the answer, up to so many bytes and seconds: one
# who sends on when the connection closes would see a broken pipe instead of the answer.
DISCARD_BYTES = 8 << 20
DISCARD_S = 10.0


class _EarlyResponse(Response):
    """An answer that does not wait for the request's body, and throws away what comes of it."""

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
    """OpenAI's error object under the error's status."""
    kind = _EarlyResponse if isinstance(error, BodyTooLarge) and error.more else Response
    if isinstance(error, RequestTooSlow):  # what still comes of its body is no request
        headers = {**(headers or {}), "Connection": "close"}
    return kind(to_json(error_json(error)), error.status, headers, media_type="application/json")


class BodyTooLarge(InvalidRequest):
    """The body has more bytes than the limit. `more`: some of it may still come."""

    code = "request_too_large"
    status = 413
    more = True


class NotJson(InvalidRequest):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"
    status = 415


class CompressedBody(NotJson):
    """The body is compressed: its size would be known too late."""


class RequestTooSlow(InvalidRequest):
    """A request's head or body did not arrive in time."""

    code = "request_timeout"
    status = 408


class HostNotAllowed(InvalidRequest):
    """A server without keys was asked under a name that is not its own."""

    code = "host_not_allowed"
    status = 403


MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 30.0
ReadBody = Callable[[Request], Awaitable[bytes]]  # a request's body, within the limits of its node


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body, of at most `limit` bytes.

    Raises CompressedBody, NotJson, BodyTooLarge, RequestTooSlow or starlette's ClientDisconnect.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise CompressedBody(f"the body is encoded as {encoding[:64]!r}: send it as it is")
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        # Not only for order's sake: a browser sends any other type to us from any web page, without asking first.
        raise NotJson(f"the body's type is {kind[:64]!r}: send the header 'Content-Type: application/json'")
    return await bounded_body(request, limit, timeout_s)


async def bounded_body(request: Request, limit: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body, whatever it is. Raises BodyTooLarge, RequestTooSlow or starlette's ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    size = int(declared[:20]) if declared.isdecimal() else 0  # what it says; what comes is counted below
    parts: list[bytes] = []
    received, more = 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while more and max(received, size) <= limit:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                received += len(parts[-1])
                more = message.get("more_body", False)
    except TimeoutError:
        raise RequestTooSlow(f"the body did not arrive within {timeout_s:g} s; {received} bytes did") from None
    if max(received, size) > limit:
        refusal = BodyTooLarge(f"the body has {max(received, size)} bytes or more, the limit is {limit}")
        refusal.more = more
        raise refusal
    return b"".join(parts)


class AuthMiddleware:
    """ASGI middleware: all but `open_paths` need one of the keys as a bearer token; `access_of` has what it reaches.

    Without keys everything is open, to requests whose Host is this machine's loopback or `host`, the configured one: a
    page whose own name was made to resolve to 127.0.0.1 (DNS rebinding) is of our origin to the browser, and only the
    Host header tells.

    An exception that no route foresaw is logged here and answered without its traceback. (The framework's own handler
    would raise on, and the server would close the connection under a client that means to go on using it.)
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], open_paths: Sequence[str], host: str, access: Mapping[str, Access]
    ) -> None:
        self._app = app
        self._host = host.lower()
        self._open_paths = frozenset(open_paths)
        self._access = [access.get(key, FULL_ACCESS) for key in keys]
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["access"] = FULL_ACCESS
        if scope["type"] == "http" and (problem := self._check(scope)) is not None:
            headers = {"WWW-Authenticate": "Bearer"} if isinstance(problem, Unauthorized) else {}
            await error_response(problem, headers)(scope, receive, send)
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

    def _check(self, scope: Scope) -> TrinityError | None:
        if not self._digests:
            return self._check_host(scope)
        return None if scope["path"] in self._open_paths else self._check_key(scope)

    def _check_host(self, scope: Scope) -> TrinityError | None:
        """HTTP/1.0 may send no Host; every browser sends one."""
        for name, value in scope["headers"]:
            if name == b"host" and not self._is_own_host(host := value.decode("latin-1")):
                return HostNotAllowed(
                    f"the request's Host is {host[:128]!r}: a server without API keys answers to localhost, a loopback "
                    f"address and its http.host ({self._host}) alone"
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
        given = hashlib.sha256(token.strip()).digest()
        # Every key is compared, whole, so that the time taken tells nothing of any.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            return Unauthorized("the API key is wrong")
        scope["state"]["access"] = self._access[matches.index(True)]
        return None


def id_source(epoch: int) -> Callable[[str], str]:
    """Gives a request's id by its path, unlike that of any other request of the node (`epoch`: the frontend's)."""
    count = itertools.count(1)
    return lambda path: f"{_PREFIXES.get(path, _DEFAULT_PREFIX)}-{epoch:x}-{next(count)}"


def request_id(http: Request) -> str:
    """The node's id of a request."""
    return str(http.state.request_id)


def client_id_of(http: Request) -> str:
    """What the client calls it; "" if it sent no id, or one that is longer or has other characters than it may."""
    return str(http.state.client_id)


class RequestContextMiddleware:
    """ASGI middleware around everything that answers: each request gets its id and each answer the header; a node that
    drains ends its connections, so that none which a balancer keeps for later is closed just when a request is sent
    over it; `on_response` is told of every answer's path, status and seconds, from the request's head to its last byte.
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
        begin, status = self._clock(), 500
        own, sent = self._new_id(scope["path"]), _client_id(scope)
        scope.setdefault("state", {}).update(request_id=own, client_id=sent)
        trace_context.set(trace_context_of(Headers(scope=scope)))

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = sent or own
                if self._draining():
                    headers["connection"] = "close"
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            self._on_response(scope["path"], status, self._clock() - begin)


def _client_id(scope: Scope) -> str:
    given = Headers(scope=scope).getlist(REQUEST_ID_HEADER)
    return given[0] if len(given) == 1 and CLIENT_ID.fullmatch(given[0]) else ""
