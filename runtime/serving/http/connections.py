"""HTTP connections: bounds on their number and on the time of a request's head, of a pause and of a client's reading,
and their end when the node drains.

uvicorn bounds none of these (but the pause), and answers what is no HTTP with plain text. This is its own protocol with
timers around it, and with the same JSON errors and request ids as everywhere else. Heads that h11 lets pass although
RFC 9112 does not, or that uvicorn would misread, are seen to here too.
"""

import asyncio
import http
import ipaddress
import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from runtime.errors import InvalidRequest, Overloaded, TrinityError
from runtime.node.config import HttpSection
from runtime.serving.http.middleware import REQUEST_ID_HEADER, RequestTooSlow
from runtime.serving.http.responses import error_json, to_json

log = logging.getLogger(__name__)

_HEADER_BYTES = 16 << 10  # of a request's head: at so many more of it is not waited for
CODES = {431: "header_too_large", 501: "not_implemented", 505: "http_version_not_supported"}
_ABSOLUTE = re.compile(rb"https?://(?:[^/?#@]*@)?([^/?#@]+)(/[^?#]*)?(.*)", re.IGNORECASE | re.DOTALL)


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration of our server, with the bounds that `limits` has. `new_id` names what never became a
    request, by its path (""); `refused` is told of the status with which it was answered."""

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpSection,
        new_id: Callable[[str], str],
        drain_s: float,
        refused: Callable[[int], None] = lambda status: None,
    ) -> None:
        super().__init__(
            app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,  # its lines go where ours go
            log_level="error",  # it would warn of everything malformed, as often as one likes to send it
            access_log=False,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_graceful_shutdown=math.ceil(drain_s),
        )
        self.timeout_keep_alive = limits.idle_timeout_s  # type: ignore[assignment]  # it goes to call_later
        self.limits = limits
        self.new_id = new_id
        self.refused = refused
        self.peers: Counter[str] = Counter()  # open connections of each


class BoundedConnection(H11Protocol):
    """One connection. uvicorn makes it; its configuration must be an `HttpConfig`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        assert isinstance(config, HttpConfig), "made by it alone"
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Parser(h11.SERVER, _HEADER_BYTES)
        self._bounds = config
        self._peer = ""
        self._head = _Timer(self.loop, config.limits.header_timeout_s, self._head_late)
        self._sending = _Timer(self.loop, config.limits.send_timeout_s, lambda: self.transport.abort())

    # ---- how many

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        limits, peers = self._bounds.limits, self._bounds.peers
        self._peer = peer_of(self.client[0] if self.client else "")
        peers[self._peer] += 1
        if len(self.connections) > limits.max_connections:
            self._refuse(Overloaded(f"{limits.max_connections} connections are open, the limit; try again later"))
        elif peers[self._peer] > limits.max_connections_per_peer:
            most = limits.max_connections_per_peer
            self._refuse(Overloaded(f"{most} connections from {self._peer} are open, the limit for one"))
        else:
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._head.stop()
        self._sending.stop()
        peers = self._bounds.peers
        peers[self._peer] -= 1
        if not peers[self._peer]:
            del peers[self._peer]

    # ---- how long

    def handle_events(self) -> None:
        super().handle_events()
        self._time_head()

    def _time_head(self) -> None:
        """Have the timer run while a request's head is waited for; it does not start again with every byte."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._head.stop()
        elif self.timeout_keep_alive_task is None:
            self._head.start()

    def _head_late(self) -> None:
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            seconds = self._bounds.limits.header_timeout_s
            self._refuse(RequestTooSlow(f"the request's head did not arrive within {seconds:g} s"))
        else:
            self.transport.close()  # nothing was asked, or not since the last answer

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending.start()

    def resume_writing(self) -> None:
        self._sending.stop()
        super().resume_writing()

    # ---- what is no request

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it where it handles h11's error, which knows more."""
        error = sys.exception()
        refusal = InvalidRequest(f"this is not valid HTTP: {str(error)[:128] or msg}")
        if isinstance(error, h11.RemoteProtocolError):
            refusal.status = error.error_status_hint
            refusal.code = CODES.get(refusal.status, refusal.code)
        self._refuse(refusal)

    def _refuse(self, error: TrinityError) -> None:
        """Answer, if no answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id, body = self._bounds.new_id(""), to_json(error_json(error))
            log.debug("refused: %s", error.message, extra={"request": request_id})
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                (REQUEST_ID_HEADER.encode(), request_id.encode()),
                *([(b"retry-after", b"1")] if error.status == 503 else []),
            ]
            self._bounds.refused(error.status)
            reason = http.HTTPStatus(error.status).phrase.encode()
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # the application, which may still wait for a body, must not answer too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class _Parser(h11.Connection):
    """h11's parser, stricter with a request's head."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Raises h11's RemoteProtocolError, also for what `_checked` refuses."""
        event = super().next_event()
        return _checked(event) if isinstance(event, h11.Request) else event


def _checked(request: h11.Request) -> h11.Request:
    """The request with its target as a path. Raises RemoteProtocolError for another major version of HTTP, and for a
    body whose end a proxy in front could see elsewhere than we do."""
    version, names = request.http_version.decode(), {name for name, _ in request.headers}
    if not version.startswith("1."):
        raise h11.RemoteProtocolError(f"its version is {version}, HTTP/1.1 is spoken here", error_status_hint=505)
    if b"transfer-encoding" in names and (b"content-length" in names or version == "1.0"):
        what = "Transfer-Encoding in HTTP/1.0" if version == "1.0" else "both Content-Length and Transfer-Encoding"
        raise h11.RemoteProtocolError(what)
    absolute = _ABSOLUTE.fullmatch(request.target)
    if absolute is None:
        return request
    host, path, query = absolute.groups()
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=(path or b"/") + query,
        headers=[(b"host", host), *headers],  # the target's counts, and not the header's (RFC 9112, 3.2.2)
        http_version=request.http_version,
    )


def peer_of(host: str) -> str:
    """Whose connections are counted together: an IPv4 address, or 64 bits of an IPv6 one, which one host has at least.

    What is neither is its own peer.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])  # "%": the zone of a link-local one
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


class _Timer:
    """Does something once, so many seconds after its start, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, act: Callable[[], None]) -> None:
        self._loop, self._seconds, self._act = loop, seconds, act
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Does nothing while it runs."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._over)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _over(self) -> None:
        self._handle = None
        self._act()
