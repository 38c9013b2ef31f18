"""Drain state of the node, reported by /health and /ready, and the operator's route /drain that changes it.

A draining node first reports that it drains and still answers requests, so that load balancers notice before the port
closes and no request is refused in between.
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.serving.http.access import access_of
from runtime.serving.http.responses import json_response

WATCHED_S = 30.0
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "via", "origin")  # of load balancers, and of pages in a browser


class NotDirect(InvalidRequest):
    """A request for one node came through a load balancer, which may choose any node, or from a page in a browser."""

    code = "not_direct"
    status = 403


class Readiness:
    """Drain state. A node that is watched accepts requests for `notice_s` after it has begun to drain.

    It is watched if it has reported ready twice within the last 30 s: load balancers poll, people look once. An
    unwatched node need not wait to be noticed. `clock` returns seconds.
    """

    def __init__(self, notice_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._notice_s, self._clock = notice_s, clock
        self._reported_ready: deque[float] = deque(maxlen=2)
        self._notice_until = 0.0
        self.draining = False

    @property
    def notice_elapsed(self) -> bool:
        """Whether the node drains and its watchers have had time to notice."""
        return self.draining and self._clock() >= self._notice_until

    def record_ready(self) -> None:
        """Record that a health check returned ready."""
        self._reported_ready.append(self._clock())

    def drain(self, wanted: bool) -> None:
        """Start or cancel draining. Idempotent."""
        if wanted and not self.draining:
            now = self._clock()
            watched = len(self._reported_ready) == 2 and now - self._reported_ready[0] <= WATCHED_S
            self._notice_until = now + (self._notice_s if watched else 0.0)
        self.draining = wanted


class DrainRoute:
    """`POST /drain` starts draining, `DELETE /drain` cancels it, `GET /drain` returns the state.

    `persist` stores the state in the supervisor, as it outlives this process; `in_flight` counts running requests.
    """

    def __init__(
        self, readiness: Readiness, persist: Callable[[bool], Awaitable[None]], in_flight: Callable[[], int]
    ) -> None:
        self._readiness, self._persist, self._in_flight = readiness, persist, in_flight

    def add_to(self, app: Starlette) -> None:
        app.add_route("/drain", self.drain, methods=["GET", "POST", "DELETE"])

    async def drain(self, http: Request) -> Response:
        """Raises NotDirect, Forbidden."""
        access_of(http).require_operator()
        if proxied := [name for name in _PROXY_HEADERS if name in http.headers]:
            raise NotDirect(f"the request has the header {proxied[0]!r}: send it to the node itself, without a proxy")
        if http.method in ("POST", "DELETE"):
            wanted = http.method == "POST"
            await self._persist(wanted)
            self._readiness.drain(wanted)
        return json_response({"draining": self._readiness.draining, "in_flight": self._in_flight()})
