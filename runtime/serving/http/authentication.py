"""Authentication by API keys and the Host header, and the shortest way to the routes that most requests are for."""

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ipc import Memo
from ipc.ring.descriptors import MAX_U16
from runtime.errors import InternalError, Overloaded, TrinityError, Unauthorized
from runtime.retrieval.fair_threads import NO_THREAD_LEFT, no_thread_left
from runtime.serving.frontend.observability import current_tenant
from runtime.serving.http.access import FULL_ACCESS
from runtime.serving.http.middleware import HostNotAllowed, error_response
from runtime.serving.http.service import Settings

log = logging.getLogger(__name__)


class AuthMiddleware:
    """ASGI middleware for authentication: all paths but `open_paths` require a key as bearer token (see `access_of`).

    Without keys every path is open to requests whose Host is a loopback name or the configured one. This prevents DNS
    rebinding: a page whose own name resolves to 127.0.0.1 has this server's origin, and only the Host header differs.

    An unexpected exception is logged and answered without a traceback. (The framework's own handler re-raises it, and
    the server then closes a connection that the client may reuse.)

    POST requests to exactly the paths of `direct` skip the framework's routing and error handling, which take longer
    than such a route itself; `on_error` returns the response to an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        direct: Mapping[str, Callable[[Request], Awaitable[Response]]],
        on_error: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app, self._direct, self._on_error = app, direct, on_error
        keys, self._host = settings.api_keys, settings.http.host.lower()
        self._own_hosts: Memo[bytes, bool] = Memo(lambda host: self._is_own_host(host.decode("latin-1")), most=256)
        self._open_paths = frozenset(settings.http.open_paths)
        flows = [1 + number % MAX_U16 for number in range(len(keys))] if len(keys) > 1 else [0]
        self._access = [
            replace(settings.access.get(key, FULL_ACCESS), flow=flow) for flow, key in zip(flows, keys, strict=False)
        ]
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["access"] = FULL_ACCESS
        if (refusal := self._check(scope)) is not None:
            headers = {"WWW-Authenticate": "Bearer"} if isinstance(refusal, Unauthorized) else {}
            await error_response(refusal, headers)(scope, receive, send)
            return
        current_tenant.set(scope["state"]["access"].tenant)
        route = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
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
        except Exception as error:
            if scope["state"]["unsent"].started:
                raise
            failure: TrinityError = Overloaded(NO_THREAD_LEFT)
            if not no_thread_left(error):
                log.exception("%s %s failed", scope["method"], scope["path"])
                failure = InternalError("internal error; the server's log has more")
            await error_response(failure)(scope, receive, send)

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
