"""What the frontend stands on: an engine that writes answers. `runtime.engines` has them.

A request goes in with an id and a deadline, its answer comes back as pieces (`Request.next`), and it ends exactly once.
With `retrieval` the engine has the passages in the prompt before the first token; with `retrieval.every_tokens` it
appends to the running answer what its probes bring. `Starts` has requests outlive the node's own workers.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from runtime.errors import Overloaded, TrinityError, Unavailable, WorkerLost
from runtime.serving.frontend.observability import Traces
from runtime.serving.frontend.requests import ClientDisconnected, Request, RequestOutcome, RequestTable
from runtime.serving.frontend.router import Router, known_prefix, prefix_blocks
from runtime.serving.messages import Generation, Prefill

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """`restarts` counts how often requests were started again after what ran them was lost, `malformed` the messages of
    the node's own workers that were none."""

    in_flight: int
    restarts: int
    malformed: int = 0


class Engine(ABC):
    """Lives in one event loop. `epoch` is this process's own, not 0; `traces` has where each request's time went, of
    the last `keep_traces` that ended too.

    `passthrough`: it takes OpenAI's bodies as they are sent, with fields that Trinity does not know; its pieces are
    `Relayed` then. `on_end` is told of every accepted request's end, once; `on_refused` of those that were not
    accepted.
    """

    passthrough: ClassVar[bool] = False

    def __init__(
        self,
        *,
        epoch: int,
        clock: Callable[[], int],
        on_end: Callable[[RequestOutcome], None] | None,
        on_refused: Callable[[TrinityError], None] | None,
        keep_traces: int,
    ) -> None:
        self.epoch = epoch
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
        self.traces.start(request, client_id)
        self._begin(request, body)
        return request

    def cancel(self, request: Request) -> None:
        """The consumer is gone: free all that the request holds. Does nothing when it has ended."""
        if not request.ended:
            self._fail(request, ClientDisconnected("the client has closed the connection"))

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

    def _ended(self, ended: RequestOutcome, request: Request) -> None:
        """It has left the table."""
        log.info(
            "ended: %s, %d + %d tokens", ended.code, ended.prompt_tokens, ended.completion_tokens,
            extra={"request": request.id},
        )  # fmt: skip
        self.traces.end(ended)
        if self._on_end is not None:
            self._on_end(ended)


# ---- starting requests, and starting them again when a worker of theirs has died
#
# A new request waits as others do while a role has no worker that is ready: all of them may have died at once.
#
# A request that has given its consumer nothing yet starts as if for the first time. One that has goes on elsewhere from
# the tokens that were told: they run through a prefill worker as a prompt does (whose cached blocks often know most of
# them), and a decode worker draws the next one. While no worker is ready a request waits for one, for a bounded time.


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How often a request is started again, and how long it waits for workers each time. 0 times: never."""

    times: int = 0
    wait_ns: int = 0


class Starts:
    """Places requests on workers. `send` tells a worker (False: it is not there), `lost` is told of such a worker,
    `end` of a request that cannot be started again."""

    def __init__(
        self,
        router: Router,
        requests: RequestTable,
        limits: RestartLimits,
        *,
        epoch: int,
        clock: Callable[[], int],
        send: Callable[[str, Prefill], bool],
        lost: Callable[[str, str], None],
        end: Callable[[Request, TrinityError], None],
    ) -> None:
        self._router, self._requests, self._limits = router, requests, limits
        self._epoch, self._clock, self._send, self._lost, self._end = epoch, clock, send, lost, end
        self._waiting: dict[Request, tuple[int, TrinityError]] = {}  # until when, and why
        self.restarts = 0

    def start(self, request: Request, avoid: str = "") -> None:
        """Choose workers and send the request off; not to the worker `avoid` if there is another.

        Raises Overloaded, Unavailable or ContextLengthExceeded, and then nothing was sent.
        """
        asked, resume = request.generation, request.resume()
        prompt = resume.tokens if resume else asked.prompt
        tokens = asked.sampling.max_tokens - (len(resume.generated) if resume else 0)
        tokens += len(prompt) if isinstance(prompt, tuple) else 1
        prefix, blocks = (prefix_blocks(prompt, salt=asked.salt), 0) if resume else known_prefix(asked)
        while True:
            placement = self._router.place(prefix, tokens, avoid=avoid, blocks=blocks)
            if self._send(placement.prefill, request.message(self._epoch, placement, resume)):
                request.placement, request.placed = placement, True
                return
            self._router.finished(placement, prefilled=False)
            self._lost(placement.prefill, "its connection is gone")  # so the next round has one worker less to try

    def wait(self, request: Request, error: Unavailable) -> None:
        """A new request for which `start` had no workers starts when there are some, or ends with the error.

        Raises the error where no request waits, and Overloaded where too many do.
        """
        if not self._limits.times or not self._limits.wait_ns:
            raise error
        if len(self._requests) >= self._router.max_in_flight:
            raise Overloaded(f"{error.message}; {len(self._requests)} requests are in flight or wait, the limit")
        self._waiting[request] = (min(request.deadline_ns, self._clock() + self._limits.wait_ns), error)

    def leave(self, request: Request) -> None:
        """The request is not on its workers any more, nor does it wait for others."""
        self._waiting.pop(request, None)
        if request.placed:
            request.placed = False
            self._router.finished(request.placement, prefilled=request.prefilled)

    def again(self, request: Request, error: WorkerLost, avoid: str = "") -> None:
        """A worker of the request was lost: start it again, or end it with the error."""
        self.leave(request)
        if request.attempts >= self._limits.times:
            if self._limits.times:
                error = WorkerLost(f"{error.message}; the limit of {self._limits.times} new starts is reached")
            self._end(request, error)
            return
        self._requests.start_attempt(request)
        self._waiting[request] = (min(request.deadline_ns, self._clock() + self._limits.wait_ns), error)
        self._try(request, avoid)

    def retry(self) -> None:
        """Start what waits for workers, or end what has waited too long."""
        for request in list(self._waiting):
            if request in self._waiting:
                self._try(request)

    def _try(self, request: Request, avoid: str = "") -> None:
        until_ns, error = self._waiting[request]
        try:
            self.start(request, avoid)
        except (Unavailable, Overloaded) as reason:
            if self._clock() >= until_ns:
                lost = WorkerLost(f"{error.message}, and no other has taken it: {reason.message}")
                self._end(request, lost if request.attempts else reason)
        except TrinityError as reason:
            self._end(request, reason)
        else:
            del self._waiting[request]
            if not request.attempts:
                return
            self.restarts += 1
            log.info("request %s starts again after %d tokens", request.id, request.delivered.count)
