"""Memory of responses that their clients have not read yet, bounded over all connections.

A response counts from before it is assembled until its client has read it, but for what a connection may always buffer
(`CONNECTION_BYTES`, and as much in the transport). It is handed to the connection in parts, each when the last one was
read, so a client that does not read keeps one response in memory, which is counted, and nothing else.

If a response finds no room, clients that read too slowly are disconnected; if that is not enough, it is refused.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import Overloaded, ResponseTooLarge, TrinityError
from runtime.serving.http.middleware import error_response

MAX_RESPONSE_BYTES = 64 << 20
MAX_UNSENT_BYTES = 256 << 20
CONNECTION_BYTES = 64 << 10
SLOW_BYTES_S = 1 << 20
GRACE_S = 1.0
log = logging.getLogger(__name__)


class ResponseMemory:
    """The memory of all responses, at most `limit_bytes`. Thread-safe. `clock` returns seconds.

    A client is slow if it has read less than `SLOW_BYTES_S` since `GRACE_S` after its response was ready.
    """

    def __init__(self, limit_bytes: int = MAX_UNSENT_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes = limit_bytes
        self.unsent_bytes = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._responses: dict[int, UnsentResponse] = {}  # those that count
        self._numbers = itertools.count()

    def begin(self, disconnect: Callable[[], None]) -> "UnsentResponse":
        """Return the memory of a response, none so far. `disconnect` is called if its client is slow, on any thread."""
        return UnsentResponse(self, next(self._numbers), disconnect)

    def resize(self, response: "UnsentResponse", size: int) -> None:
        """See `UnsentResponse.reserve`."""
        if size > MAX_RESPONSE_BYTES:
            raise ResponseTooLarge(
                f"the response has {size:,} bytes, the limit is {MAX_RESPONSE_BYTES:,}: ask for less in one request"
            )
        size = size if size > CONNECTION_BYTES else 0
        if size == response.held_bytes == 0:
            return
        with self._lock:
            more = size - response.held_bytes
            if more > 0:
                self._make_room(more, response)
            self.unsent_bytes += more
            response.held_bytes = size
            if size:
                self._responses[response.number] = response
            else:
                self._responses.pop(response.number, None)

    def start_sending(self, response: "UnsentResponse") -> None:
        with self._lock:
            response.sent_bytes, response.since_s = 0, self._clock()

    def _make_room(self, wanted: int, for_response: "UnsentResponse") -> None:
        for response in list(self._responses.values()):  # the oldest first
            if self.unsent_bytes + wanted <= self.limit_bytes:
                return
            if response is not for_response and response.is_slow(self._clock()):
                log.warning(
                    "disconnected a client that has read %d of %d bytes in %.1f s: other responses need the memory",
                    response.sent_bytes, response.held_bytes, self._clock() - response.since_s,
                )  # fmt: skip
                del self._responses[response.number]
                self.unsent_bytes -= response.held_bytes
                response.held_bytes = 0
                response.disconnect()
        if self.unsent_bytes + wanted > self.limit_bytes:
            raise Overloaded(
                f"responses of {self.unsent_bytes:,} bytes wait for their clients, and this one needs {wanted:,}; the "
                f"limit is {self.limit_bytes:,}: try again later, or ask for less"
            )


class UnsentResponse:
    """The memory of one response. `started`: whether the application has begun it."""

    def __init__(self, memory: ResponseMemory, number: int, disconnect: Callable[[], None]) -> None:
        """Use `ResponseMemory.begin`."""
        self.number, self.disconnect = number, disconnect
        self.held_bytes, self.started = 0, False
        self.sent_bytes, self.since_s = 0, float("inf")
        self._memory = memory

    def reserve(self, size: int) -> None:
        """Count `size` bytes for this response, in place of those before.

        Raises `ResponseTooLarge`, and `Overloaded` if all responses together would exceed their limit.
        """
        self._memory.resize(self, size)

    def release(self) -> None:
        """Count nothing for this response. Idempotent."""
        self._memory.resize(self, 0)

    def is_slow(self, now_s: float) -> bool:
        """Whether its client reads too slowly to keep the memory."""
        return self.sent_bytes < (now_s - self.since_s - GRACE_S) * SLOW_BYTES_S


class ResponseMemoryMiddleware:
    """ASGI middleware: hands responses to the connection in parts, and counts those that wait in a `ResponseMemory`."""

    def __init__(self, app: ASGIApp, memory: ResponseMemory) -> None:
        self._app, self._memory = app, memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        unsent = state["unsent"] = self._memory.begin(state.get("disconnect", _no_connection))
        start: Message | None = None  # held back until the first part of the body has room
        refused = False

        async def send_in_parts(message: Message) -> None:
            nonlocal start, refused
            if message["type"] == "http.response.start":
                start, unsent.started = message, True
                return
            body, more_body = message.get("body", b""), message.get("more_body", False)
            if refused:
                return
            if start is not None and not (more_body or unsent.held_bytes) and len(body) <= CONNECTION_BYTES:
                begun, start = start, None
                await send(begun)
                await send(message)  # in one part, which never counts
                return
            try:
                unsent.reserve(len(body))
            except TrinityError as error:
                refused = True
                if start is None:  # too late for an error
                    unsent.disconnect()
                else:
                    headers = {"Retry-After": "1"} if error.status == 503 else {}
                    await error_response(error, headers)(scope, receive, send)
                return
            if start is not None:
                await send(start)
                start = None
            self._memory.start_sending(unsent)
            for begin in range(0, max(len(body), 1), CONNECTION_BYTES):  # each waits until the one before was read
                end = begin + CONNECTION_BYTES
                part: Message = {"body": body[begin:end], "more_body": more_body or end < len(body)}
                await send({"type": "http.response.body", **part})
                unsent.sent_bytes = begin
            unsent.release()  # a stream may go on for long

        try:
            await self._app(scope, receive, send_in_parts)
        finally:
            unsent.release()


def _no_connection() -> None:
    """Disconnect nothing: the application runs without a server."""


def unsent_response(http: Request) -> UnsentResponse:
    """Return the memory of the response to a request."""
    found = http.scope["state"]["unsent"]
    assert isinstance(found, UnsentResponse)
    return found
