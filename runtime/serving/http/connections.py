"""HTTP connections: limits on their number, and timeouts for request heads, idle connections and slow readers.

uvicorn's server accepts them; its own connections have none of these limits except the idle timeout, and answer
malformed HTTP with plain text. Errors here are JSON with a request id.
"""

import asyncio
import ipaddress
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from runtime.errors import InvalidRequest, Overloaded, TrinityError
from runtime.node.config import HttpSection
from runtime.serving.http.admission import Admission
from runtime.serving.http.exchange import Exchange, head_of
from runtime.serving.http.middleware import REQUEST_ID_HEADER, RETRY_AFTER_S, RequestTooSlow
from runtime.serving.http.request_context import client_id_in
from runtime.serving.http.request_parser import Body, Discarded, Head, Requests
from runtime.serving.http.responses import error_json, to_json

log = logging.getLogger(__name__)

_ASGI = {"version": "3.0", "spec_version": "2.3"}


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which a connection is closed: without a request (a balancer's must be shorter), with an incomplete
    head of one, and while its client reads nothing of a response."""

    idle_s: float = 75.0
    head_s: float = 10.0
    send_s: float = 60.0


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration with our `limits`. `new_id` generates ids for requests that are refused here, by their
    path, "" for malformed ones; `on_refused` is called with the path and the status of the response. `connections`:
    those that there are files for, if that is fewer than the limit."""

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpSection,
        new_id: Callable[[str], str],
        drain_s: float,
        on_refused: Callable[[str, int], None] = lambda path, status: None,
        admission: Admission | None = None,
        timeouts: Timeouts = Timeouts(),
        connections: int | None = None,
    ) -> None:
        super().__init__(
            app,
            interface="asgi3",
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,  # keep our log configuration
            log_level="error",  # it would warn of every malformed request
            access_log=False,
            proxy_headers=False,  # nothing here trusts them
            timeout_graceful_shutdown=math.ceil(drain_s),
        )
        self.timeout_keep_alive = timeouts.idle_s  # type: ignore[assignment]  # passed to call_later
        self.max_connections, self.max_per_peer = limits.max_connections, limits.max_connections_per_peer
        if connections is not None and connections < self.max_connections:
            self.max_connections, self.max_per_peer = connections, max(1, connections // 2)
        self.timeouts = timeouts
        self.new_id = new_id
        self.on_refused = on_refused
        self.admission = admission or Admission({})
        self.peers: Counter[str] = Counter()  # open connections by peer


class BoundedConnection(asyncio.Protocol):
    """One connection, created by uvicorn's server with an `HttpConfig`.

    httptools parses requests; each is answered when its head is complete. One that a client sends without waiting for
    the answer before (pipelining) is parsed after that. Meanwhile reading goes on, as that is how a client is noticed
    that has left, and pauses only while much is unparsed.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        assert isinstance(config, HttpConfig), "created with an HttpConfig"
        self._config, self._server = config, server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._state = app_state | {"disconnect": self._disconnect}
        self._requests = Requests(self._begin)
        self._answering: Exchange | None = None
        self._unparsed = b""  # waits for the answer before
        self._peer = ""
        timeouts = config.timeouts
        self._head_timer = _Timer(self._loop, timeouts.head_s, self._head_timed_out)
        self._idle_timer = _Timer(self._loop, timeouts.idle_s, self._close)
        self._send_timer = _Timer(self._loop, timeouts.send_s, lambda: self.transport.abort())

    # ---- limits on connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        self.transport, self._flow = transport, FlowControl(transport)
        self._server.connections.add(self)  # type: ignore[arg-type]  # declared for uvicorn's own
        client, config, peers = get_remote_addr(transport), self._config, self._config.peers
        self._addresses: Scope = {"server": get_local_addr(transport), "client": client, "scheme": "http"}
        self._peer = peer_of(client[0] if client else "")
        peers[self._peer] += 1
        if len(self._server.connections) > config.max_connections:
            self._refuse(Overloaded(f"{config.max_connections} connections are open, the limit; try again later"))
        elif peers[self._peer] > (limit := config.max_per_peer):
            self._refuse(Overloaded(f"{limit} connections from {self._peer} are open, the limit for one peer"))
        else:
            self._head_timer.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._end_request()
        self._flow.resume_writing()
        for timer in (self._head_timer, self._idle_timer, self._send_timer):
            timer.cancel()
        peers = self._config.peers
        peers[self._peer] -= 1
        if not peers[self._peer]:
            del peers[self._peer]

    def shutdown(self) -> None:
        """Close the connection once its request is answered. Called by uvicorn's server when it ends."""
        if self._answering is None:
            self._close()
        else:
            self._answering.keep_alive = False

    def eof_received(self) -> None:
        """The client sends nothing more. Whether it still reads is unknown, and it is treated as one that does not."""
        self._close()

    # ---- requests

    def data_received(self, data: bytes) -> None:
        try:
            while data and (self._answering is None or not self._answering.arrived):
                data = self._requests.feed(data)
        except InvalidRequest as error:
            arriving = self._requests.arriving
            if arriving is not None and arriving.ended:
                self._close()
            else:
                self._refuse(error)
            return
        if data:
            self._unparsed = (self._unparsed + data).lstrip(b"\r\n")  # as the parser does: none may pause reading
            if len(self._unparsed) > HIGH_WATER_LIMIT:
                self._flow.pause_reading()  # also again, if the application waits for a disconnect
        if self._answering is not None or self.transport.is_closing():
            self._head_timer.stop()
        elif self._requests.complete:  # the rest of a body that nobody read
            self._head_timer.stop()
            self._idle_timer.start()  # unless it runs, too: a line break leaves the connection idle
        else:
            self._idle_timer.stop()
            self._head_timer.start()  # unless it runs: received bytes do not restart it

    def _begin(self, head: Head) -> Body:
        """Answer a request or refuse it; return where its body goes."""
        self._idle_timer.stop()
        raw_path, _, query = head.target.partition(b"?")
        path = unquote(path) if "%" in (path := raw_path.decode()) else path
        limit = None
        if not self._flow.write_paused:
            try:
                limit = self._config.admission.admit(head, path)
            except Overloaded as refusal:
                self._send_error(refusal, path, client_id_in(head.headers))
                self._server.total_requests += 1
                return Discarded()
        scope: Scope = {
            "type": "http", "asgi": _ASGI, "http_version": head.version, "method": head.method, "root_path": "",
            "path": path, "raw_path": raw_path, "query_string": query, "headers": head.headers, **self._addresses,
        }  # fmt: skip
        exchange = Exchange(
            scope, self.transport, self._flow, self._server.default_headers, self._answered, self._close,
            limit, keep_alive=head.keep_alive, expects_continue=head.expects_continue,
        )  # fmt: skip
        scope["state"] = {
            **self._state, "arrived_body": exchange.arrived_body, "arrived_ns": exchange.arrived_ns,
        }  # fmt: skip
        self._answering = exchange
        task = self._loop.create_task(exchange.run(self._config.loaded_app))
        task.add_done_callback(self._server.tasks.discard)
        self._server.tasks.add(task)
        return exchange

    def _answered(self) -> None:
        """Called by an exchange that has ended."""
        self._server.total_requests += 1
        self._answering = None
        if self.transport.is_closing():
            return
        self._idle_timer.start()
        self._flow.resume_reading()
        data, self._unparsed = self._unparsed, b""
        if data:
            self.data_received(data)

    # ---- timeouts

    def _head_timed_out(self) -> None:
        if self._requests.in_head:
            seconds = self._config.timeouts.head_s
            self._refuse(RequestTooSlow(f"the request's head did not arrive within {seconds:g} s"))
        else:
            self._close()  # no request begun on this connection, or none since the last response

    def pause_writing(self) -> None:
        self._flow.pause_writing()
        self._send_timer.start()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._send_timer.stop()
        self._flow.resume_writing()

    def _disconnect(self) -> None:
        """Close the connection at once, with what its client has not read. May be called on any thread."""
        self._loop.call_soon_threadsafe(lambda: self.transport.abort())

    # ---- refusals

    def _refuse(self, error: TrinityError) -> None:
        """Send an error response unless a response has begun, and close the connection."""
        if self._answering is None or not self._answering.started:
            self._send_error(error, "", "", (b"connection", b"close"))
        self._end_request()
        self._close()

    def _send_error(self, error: TrinityError, path: str, client_id: str, *headers: tuple[bytes, bytes]) -> None:
        """Send an error response without the application."""
        request_id, body = client_id or self._config.new_id(path), to_json(error_json(error))
        log.debug("refused: %s", error.message, extra={"request": request_id})
        fields = [
            *self._server.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (REQUEST_ID_HEADER.encode(), request_id.encode()),
            *headers,
            *([(b"retry-after", b"%d" % RETRY_AFTER_S)] if error.status == 503 else []),
        ]
        self._config.on_refused(path, error.status)
        self.transport.write(head_of(error.status, fields) + body)

    def _close(self) -> None:
        """Close the connection as soon as its client has read what was sent, or reads too slowly."""
        if not self.transport.is_closing():
            self.transport.close()
            self._send_timer.start()

    def _end_request(self) -> None:
        if self._answering is not None:  # the application may still await a body, and must not respond too
            self._answering.disconnect()


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
    """A one-shot timer. Starting and stopping it is cheap: it looks for the time that counts when it fires."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], None]) -> None:
        self._loop, self._seconds, self._callback = loop, seconds, callback
        self._handle: asyncio.TimerHandle | None = None
        self._due_s: float | None = None

    def start(self) -> None:
        """Start the timer unless it is running."""
        if self._due_s is None:
            self._due_s = self._loop.time() + self._seconds
            if self._handle is None:
                self._handle = self._loop.call_at(self._due_s, self._fire)

    def stop(self) -> None:
        self._due_s = None

    def cancel(self) -> None:
        """Stop the timer for good."""
        self._due_s = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        if self._due_s is None:
            return
        if self._loop.time() < self._due_s:
            self._handle = self._loop.call_at(self._due_s, self._fire)
            return
        self._due_s = None
        self._callback()
