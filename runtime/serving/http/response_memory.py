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

from runtime.errors import Overloaded, ResponseTooLarge

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

    def start_sending(self) -> None:
        """The response is ready: from now on its client may be slow."""
        self._memory.start_sending(self)

    def is_slow(self, now_s: float) -> bool:
        """Whether its client reads too slowly to keep the memory."""
        return self.sent_bytes < (now_s - self.since_s - GRACE_S) * SLOW_BYTES_S


def unsent_response(http: Request) -> UnsentResponse:
    """Return the memory of the response to a request."""
    unsent = http.scope["state"]["unsent"]
    assert isinstance(unsent, UnsentResponse)
    return unsent
