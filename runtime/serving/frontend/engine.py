"""What the frontend stands on: an engine that writes answers. `runtime.engines` has them.

A request goes in with an id and a deadline, its answer comes back as pieces (`Request.next`), and it ends exactly once.
With `retrieval` the engine has the passages in the prompt before the first token; with `retrieval.every_tokens` it
appends to the running answer what its probes bring.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.errors import TrinityError
from runtime.serving.frontend.requests import ClientGone, Ended, Request, RequestTable
from runtime.serving.frontend.traces import Traces
from runtime.serving.messages import Generation

log = logging.getLogger(__name__)


class EngineStatistics(Protocol):
    """`restarts` counts how often requests were started again after what ran them was lost, `malformed` the messages of
    the node's own workers that were none."""

    @property
    def in_flight(self) -> int: ...

    @property
    def restarts(self) -> int: ...

    @property
    def malformed(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`forwards`: takes OpenAI's bodies as they are sent, with fields that Trinity does not know; its pieces are
    `Relayed` then."""

    forwards: bool = False


class Engine(ABC):
    """Lives in one event loop. `epoch` is this process's own, not 0; `traces` has where each request's time went, of
    the last `keep_traces` that ended too.

    `on_end` is told of every accepted request's end, once; `on_refused` of those that were not accepted.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        epoch: int,
        clock: Callable[[], int],
        on_end: Callable[[Ended], None] | None,
        on_refused: Callable[[TrinityError], None] | None,
        keep_traces: int,
    ) -> None:
        self.epoch, self.capabilities = epoch, capabilities
        self.traces = Traces(keep_traces, clock)
        self.requests = RequestTable(self._ended)
        self._clock, self._on_end, self._on_refused = clock, on_end, on_refused

    def now_ns(self) -> int:
        """The clock in which deadlines are given."""
        return self._clock()

    def submit(
        self,
        request_id: str,
        generation: Generation,
        *,
        client_id: str = "",
        sent: Mapping[str, Any] | None = None,
    ) -> Request:
        """Begin an answer; ids must be new ones. `client_id` is the client's own name for it, `sent` its body, which
        engines that forward send on. While there is nothing that could write it, it waits as the engine's restarts are
        bounded.

        Raises Overloaded, Unavailable, or InvalidRequest for what this engine cannot do; nothing was accepted then.
        """
        request, body = Request(request_id, generation), dict(sent or {})
        try:
            self._accept(request, body)
        except TrinityError as error:
            if self._on_refused is not None:
                self._on_refused(error)
            raise
        self.requests.open(request)
        self.traces.begun(request, client_id)
        self._begin(request, body)
        return request

    def cancel(self, request: Request) -> None:
        """The consumer is gone: free all that the request holds. Does nothing when it has ended."""
        self._fail(request, ClientGone("the client has closed the connection"))

    def end_all(self, error: TrinityError) -> None:
        """End every request that is in flight with `error`."""
        for request in self.requests.all():
            self._fail(request, error)

    @abstractmethod
    def missing(self) -> Sequence[str]:
        """What is not there to answer with, by name; empty when requests are taken."""

    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """A snapshot of its counters."""

    @abstractmethod
    async def run(self) -> None:
        """Serve until cancelled; requests still in flight then end with WorkerLost."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open; nothing is waited for."""

    @abstractmethod
    def _accept(self, request: Request, sent: dict[str, Any]) -> None:
        """Raises what `submit` does for a request that is not taken."""

    def _begin(self, request: Request, sent: dict[str, Any]) -> None:  # noqa: B027  (not every engine has more to do)
        """It was accepted, and is in flight."""

    @abstractmethod
    def _fail(self, request: Request, error: TrinityError) -> None:
        """End a request with an error, and free what it holds. Does nothing when it has ended."""

    def _ended(self, ended: Ended, request: Request) -> None:
        """It has left the table."""
        log.info(
            "ended: %s, %d + %d tokens", ended.code, ended.prompt_tokens, ended.completion_tokens,
            extra={"request": request.id},
        )  # fmt: skip
        self.traces.ended(ended)
        if self._on_end is not None:
            self._on_end(ended)
