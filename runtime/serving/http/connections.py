"""HTTP connections: limits on their number, and timeouts for request heads, idle connections and slow readers.

uvicorn has none of these limits except the idle timeout, and answers malformed HTTP with plain text. This subclass of
its protocol adds timers, JSON errors and request ids. It also rejects or corrects heads that h11 accepts against
RFC 9112, or that uvicorn would misread.
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
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from runtime.errors import InvalidRequest, Overloaded, TrinityError
from runtime.node.config import HttpSection
from runtime.serving.http.middleware import DISCARD_BYTES, MAX_BODY_BYTES, REQUEST_ID_HEADER, RequestTooSlow
from runtime.serving.http.responses import error_json, to_json

log = logging.getLogger(__name__)

_HEADER_BYTES = 16 << 10  # of an incomplete request head
CODES = {413: "request_too_large", 431: "header_too_large", 501: "not_implemented", 505: "http_version_not_supported"}
_ABSOLUTE = re.compile(rb"https?://(?:[^/?#@]*@)?([^/?#@]+)(/[^?#]*)?(.*)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which a connection is closed: without a request (a balancer's must be shorter), with an incomplete
    head of one, and while its client reads nothing of a response."""

    idle_s: float = 75.0
    head_s: float = 10.0
    send_s: float = 60.0


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration with our `limits`. `new_id` generates ids for malformed requests, with the path "";
    `on_refused` is called with the status of their response."""

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpSection,
        new_id: Callable[[str], str],
        drain_s: float,
        on_refused: Callable[[int], None] = lambda status: None,
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        super().__init__(
            app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,  # keep our log configuration
            log_level="error",  # it would warn of every malformed request
            access_log=False,
            proxy_headers=False,  # nothing here trusts them
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_graceful_shutdown=math.ceil(drain_s),
        )
        self.timeout_keep_alive = timeouts.idle_s  # type: ignore[assignment]  # passed to call_later
        self.limits = limits
        self.timeouts = timeouts
        self.new_id = new_id
        self.on_refused = on_refused
        self.peers: Counter[str] = Counter()  # open connections by peer


class BoundedConnection(H11Protocol):
    """One connection, created by uvicorn with an `HttpConfig`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        assert isinstance(config, HttpConfig), "created with an HttpConfig"
        super().__init__(config, server_state, app_state | {"disconnect": self._disconnect}, _loop)
        self.conn = _Parser(h11.SERVER, _HEADER_BYTES)
        self._config = config
        self._peer = ""
        self._head_timer = _Timer(self.loop, config.timeouts.head_s, self._head_timed_out)
        self._send_timer = _Timer(self.loop, config.timeouts.send_s, lambda: self.transport.abort())

    # ---- limits on connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        limits, peers = self._config.limits, self._config.peers
        self._peer = peer_of(self.client[0] if self.client else "")
        peers[self._peer] += 1
        if len(self.connections) > limits.max_connections:
            self._refuse(Overloaded(f"{limits.max_connections} connections are open, the limit; try again later"))
        elif peers[self._peer] > limits.max_connections_per_peer:
            limit = limits.max_connections_per_peer
            self._refuse(Overloaded(f"{limit} connections from {self._peer} are open, the limit for one peer"))
        else:
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._head_timer.stop()
        self._send_timer.stop()
        peers = self._config.peers
        peers[self._peer] -= 1
        if not peers[self._peer]:
            del peers[self._peer]

    # ---- timeouts

    def handle_events(self) -> None:
        super().handle_events()
        self._time_head()

    def _time_head(self) -> None:
        """Run the timer while a request's head is awaited; received bytes do not restart it."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._head_timer.stop()
        elif self.timeout_keep_alive_task is None:
            self._head_timer.start()

    def _head_timed_out(self) -> None:
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            seconds = self._config.timeouts.head_s
            self._refuse(RequestTooSlow(f"the request's head did not arrive within {seconds:g} s"))
        else:
            self.transport.close()  # no request begun on this connection, or none since the last response

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer.start()

    def resume_writing(self) -> None:
        self._send_timer.stop()
        super().resume_writing()

    def _disconnect(self) -> None:
        """Close the connection at once, with what its client has not read. May be called on any thread."""
        self.loop.call_soon_threadsafe(lambda: self.transport.abort())

    # ---- refusals

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles h11's exception, which has the details."""
        error = sys.exception()
        reason = str(error).partition(": bytearray(")[0]  # without what was received
        refusal = InvalidRequest(f"this is not valid HTTP: {reason[:128] or msg}")
        if isinstance(error, h11.RemoteProtocolError):
            refusal.status = error.error_status_hint
            refusal.code = CODES.get(refusal.status, refusal.code)
        self._refuse(refusal)

    def _refuse(self, error: TrinityError) -> None:
        """Send an error response unless a response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id, body = self._config.new_id(""), to_json(error_json(error))
            log.debug("refused: %s", error.message, extra={"request": request_id})
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                (REQUEST_ID_HEADER.encode(), request_id.encode()),
                *([(b"retry-after", b"1")] if error.status == 503 else []),
            ]
            self._config.on_refused(error.status)
            reason = http.HTTPStatus(error.status).phrase.encode()
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # the application may still await a body, and must not respond too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class _Parser(h11.Connection):
    """h11's parser with stricter checks of request heads."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event. Raises h11's RemoteProtocolError, also as `_validate`, and for a huge chunk."""
        event = super().next_event()
        size = getattr(self._reader, "_bytes_in_chunk", 0)  # declared, of which a part may never arrive
        if size > MAX_BODY_BYTES + DISCARD_BYTES:  # of a smaller one the rest is discarded, and the client answered
            raise h11.RemoteProtocolError(
                f"a chunk of its body has {size} bytes, the limit is {MAX_BODY_BYTES}", error_status_hint=413
            )
        return _validate(event) if isinstance(event, h11.Request) else event


def _validate(request: h11.Request) -> h11.Request:
    """Return the request with its target as a path.

    Raises RemoteProtocolError for another major version of HTTP, and for a body whose length a proxy in front could
    interpret differently (request smuggling).
    """
    version, names = request.http_version.decode(), {name for name, _ in request.headers}
    if not version.startswith("1."):
        raise h11.RemoteProtocolError(f"its version is {version}; use HTTP/1.1", error_status_hint=505)
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
        headers=[(b"host", host), *headers],  # the target's host replaces the header's (RFC 9112, 3.2.2)
        http_version=request.http_version,
    )


def peer_of(host: str) -> str:
    """Return the peer whose connections are counted together: an IPv4 address or an IPv6 /64, as a host has at least
    one.

    Any other string is a peer of its own.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])  # "%": the zone of a link-local address
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


class _Timer:
    """A one-shot timer that can be stopped and restarted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], None]) -> None:
        self._loop, self._seconds, self._callback = loop, seconds, callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer unless it is running."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()
