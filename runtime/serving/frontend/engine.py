"""Interface of the engines that generate answers for the frontend. Implementations: `worker_link`, `runtime.engines`.

A request is submitted with an id and a deadline, its answer arrives as pieces (`Request.next`), and it ends exactly
once. With `retrieval` the engine inserts passages into the prompt before the first token; with `retrieval.every_tokens`
it appends the passages that probes find to the running answer.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from runtime.errors import TrinityError
from runtime.serving.frontend.observability import Traces
from runtime.serving.frontend.requests import ClientDisconnected, Request, RequestOutcome, RequestTable
from runtime.serving.messages import Generation

log = logging.getLogger(__name__)

KEPT_TRACES = 512  # of the requests that ended last: a few hundred KB


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How often a request is restarted after the loss of a worker (0: never), and how long it waits each time.

    The default of three: a request that has lost three workers is likely to be what ends them.
    """

    times: int = 3
    wait_ns: int = 0


class Engine(ABC):
    """Base class of engines; an instance belongs to one event loop.

    `epoch` identifies this process and is not 0. `traces` holds stage times of running requests and of the last
    `keep_traces` that ended. `on_end` is called once for every accepted request, `on_refused` for every refused one.
    `passthrough`: the engine takes OpenAI bodies as sent, with fields unknown to Trinity, and its pieces are `Relayed`.
    """

    passthrough: ClassVar[bool] = False

    def __init__(
        self,
        *,
        epoch: int,
        clock: Callable[[], int],
        on_end: Callable[[RequestOutcome], None] | None,
        on_refused: Callable[[TrinityError], None] | None,
        keep_traces: int = KEPT_TRACES,
    ) -> None:
        self.epoch = epoch
        self.traces = Traces(keep_traces, clock)
        self.requests = RequestTable(self._ended)
        self._clock, self._on_end, self._on_refused = clock, on_end, on_refused

    def now_ns(self) -> int:
        """Return the time of the clock that deadlines refer to."""
        return self._clock()

    def submit(
        self,
        request_id: str,
        generation: Generation,
        *,
        client_id: str = "",
        sent: Mapping[str, Any] | None = None,
    ) -> Request:
        """Start an answer. `request_id` must be new, `client_id` is the client's own id, `sent` its body (for
        passthrough engines). While no worker or server is ready, the request waits within the engine's restart limits.

        Raises Overloaded, Unavailable, or InvalidRequest for what this engine does not support; the request is not
        accepted then.
        """
        request, body = Request(request_id, generation), dict(sent or {})
        try:
            self._accept(request, body)
        except TrinityError as error:
            if self._on_refused is not None:
                self._on_refused(error)
            raise
        self.requests.open(request)
        self.traces.start(request, client_id)
        self._begin(request, body)
        return request

    def cancel(self, request: Request) -> None:
        """End a request whose client has disconnected and free its resources. Does nothing if it has ended."""
        if not request.ended:
            self._fail(request, ClientDisconnected("the client has closed the connection"))

    def end_all(self, error: TrinityError) -> None:
        """End every request in flight with `error`."""
        for request in self.requests.all():
            self._fail(request, error)

    def expect_no_worker(self) -> None:  # noqa: B027  (optional hook)
        """The node stops, and starts no process any more: a request that loses its worker from now on is restarted on
        one that is left, or ends. Servers that the node does not run may return. Idempotent."""

    @abstractmethod
    def missing(self) -> Sequence[str]:
        """Return the names of missing roles or servers; empty when the engine is ready."""

    @property
    @abstractmethod
    def restarts(self) -> int:
        """Number of restarts of requests after the loss of a worker, so far."""

    @property
    def malformed(self) -> int:
        """Number of invalid messages of workers, so far."""
        return 0

    @abstractmethod
    async def run(self) -> None:
        """Serve until cancelled; requests still in flight then end with WorkerLost."""

    @abstractmethod
    def close(self) -> None:
        """Close sockets and connections without waiting."""

    @abstractmethod
    def _accept(self, request: Request, sent: dict[str, Any]) -> None:
        """Accept a request, or raise what `submit` raises."""

    def _begin(self, request: Request, sent: dict[str, Any]) -> None:  # noqa: B027  (optional hook)
        """Start an accepted request that is in the table."""

    @abstractmethod
    def _fail(self, request: Request, error: TrinityError) -> None:
        """End a request with an error and free its resources. Does nothing if it has ended."""

    def _ended(self, outcome: RequestOutcome, request: Request) -> None:
        """Record the end of a request that has left the table."""
        log.info(
            "ended: %s, %d + %d tokens", outcome.code, outcome.prompt_tokens, outcome.completion_tokens,
            extra={"request": request.id},
        )  # fmt: skip
        self.traces.end(outcome)
        if self._on_end is not None:
            self._on_end(outcome)
