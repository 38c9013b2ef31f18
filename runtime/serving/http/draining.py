"""Whether the node wants new requests: what /health and /ready say, and POST /drain for operators.

A node that drains says so first and goes on to answer what comes: whoever routes requests to it learns of it before the
port closes, and none is refused meanwhile.
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import InvalidRequest
from runtime.serving.http.answers import to_json
from runtime.serving.http.guard import access_of

WATCHED_S = 30.0
_NOT_THE_OPERATORS = ("forwarded", "x-forwarded-for", "via", "origin")  # a balancer's, and a page's in a browser


class NotDirect(InvalidRequest):
    """What concerns one node was asked through a balancer, which may have sent it to any, or by a page in a browser."""

    code = "not_direct"
    status = 403


class Readiness:
    """Whether the node drains. `notice_s`: for how long a node that is watched takes requests after it began to say so.

    It is watched if it has said twice within the last 30 s that it is ready: people look once, balancers again and
    again. One that nobody watches need not wait for anybody to notice. `clock` gives seconds.
    """

    def __init__(self, notice_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._notice_s, self._clock = notice_s, clock
        self._said_ready: deque[float] = deque(maxlen=2)
        self._until: float | None = None  # set while it drains

    @property
    def draining(self) -> bool:
        return self._until is not None

    @property
    def noticed(self) -> bool:
        """Whether it drains, and those who watch have had the time to see it."""
        return self._until is not None and self._clock() >= self._until

    def say_ready(self) -> None:
        """Somebody was told that the node is ready."""
        self._said_ready.append(self._clock())

    def drain(self, wanted: bool) -> None:
        """Begin, or take it back; does nothing where it is so already."""
        if not wanted:
            self._until = None
        elif self._until is None:
            now = self._clock()
            watched = len(self._said_ready) == 2 and now - self._said_ready[0] <= WATCHED_S
            self._until = now + (self._notice_s if watched else 0.0)


class ClosesConnections:
    """ASGI middleware: the answers of a node that drains end their connections, so that none which a balancer keeps for
    later is closed just when a request is sent over it."""

    def __init__(self, app: ASGIApp, readiness: Readiness) -> None:
        self._app, self._readiness = app, readiness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._readiness.draining:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, closing)


class DrainRoute:
    """`POST /drain` begins, `DELETE /drain` takes it back, `GET /drain` shows.

    `tell` has the supervisor keep it, for it is to outlive this process; `in_flight` counts the requests that have not
    ended.
    """

    def __init__(
        self, readiness: Readiness, tell: Callable[[bool], Awaitable[None]], in_flight: Callable[[], int]
    ) -> None:
        self._readiness, self._tell, self._in_flight = readiness, tell, in_flight

    def add_to(self, app: Starlette) -> None:
        app.add_route("/drain", self.answer, methods=["GET", "POST", "DELETE"])

    async def answer(self, http: Request) -> Response:
        """Raises NotDirect, Forbidden."""
        access_of(http).check_operator()
        if found := [name for name in _NOT_THE_OPERATORS if name in http.headers]:
            raise NotDirect(f"the request has the header {found[0]!r}: ask the node itself, not by a proxy or a page")
        if http.method in ("POST", "DELETE"):
            await self._tell(wanted := http.method == "POST")
            self._readiness.drain(wanted)
        shown = {"draining": self._readiness.draining, "in_flight": self._in_flight()}
        return Response(to_json(shown), media_type="application/json")
