"""The engine behind the frontend when the model runs on servers that speak OpenAI's protocol."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from runtime.engines.openai.generation import Generation, Means, why_not
from runtime.engines.openai.servers import Servers
from runtime.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, TrinityError, WorkerLost
from runtime.node.config import ServedSection
from runtime.serving.frontend.engine import Capabilities
from runtime.serving.frontend.forwarded import needs_one_request
from runtime.serving.frontend.requests import ClientGone, Ended, Piece, Request, RequestTable
from runtime.serving.frontend.router import Placement
from runtime.serving.frontend.searches import SearchSource
from runtime.serving.frontend.starts import RestartLimits
from runtime.serving.frontend.traces import Traces
from runtime.serving.messages import Message, Prefill, Retrieval, Sampling
from runtime.serving.model.prompt import last_question

log = logging.getLogger(__name__)

_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Statistics:
    """`restarts` counts how often requests were sent again after a server was lost."""

    in_flight: int
    restarts: int
    malformed: int = 0


class OpenAiEngine:
    """An `Engine`. `on_end` is told of every accepted request's end, once, `on_refused` of those not accepted.

    `max_in_flight` bounds the requests; a server that is lost is outlived within `restarts`.
    """

    def __init__(
        self,
        servers: Servers,
        section: ServedSection,
        search: SearchSource,
        *,
        epoch: int,
        max_in_flight: int,
        restarts: RestartLimits = RestartLimits(),  # noqa: B008
        clock: Callable[[], int] = time.monotonic_ns,
        on_end: Callable[[Ended], None] | None = None,
        on_refused: Callable[[TrinityError], None] | None = None,
        keep_traces: int = 0,
    ) -> None:
        self.epoch = epoch
        self.capabilities = Capabilities(forwards=True)
        self.traces = Traces(keep_traces, clock)
        self.servers = servers
        self._requests = RequestTable(self._ended)
        self._means = Means(servers, search, section, restarts, clock)
        self._max_in_flight = max_in_flight
        self._clock, self._on_end, self._on_refused = clock, on_end, on_refused
        self._tasks: dict[Request, asyncio.Task[None]] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._restarts = 0

    # ---- for the routes

    def now_ns(self) -> int:
        """The engine's clock, in which deadlines are given."""
        return self._clock()

    def missing(self) -> list[str]:
        """["engine"] while no server answers."""
        return [] if self.servers.up else ["engine"]

    def submit(
        self,
        request_id: str,
        *,
        sampling: Sampling,
        received_ns: int,
        deadline_ns: int,
        prompt: str | tuple[int, ...] = "",
        messages: Sequence[Message] = (),
        retrieval: Retrieval | None = None,
        client_id: str = "",
        sent: Mapping[str, Any] | None = None,
    ) -> Request:
        """Begin to have a request answered; `sent` is its body. While no server answers it waits for one, as `restarts`
        bounds it.

        Raises Overloaded, EngineUnreachable, or InvalidRequest for what no server can do; nothing was accepted then.
        """
        message = Prefill(
            request_id=request_id,
            frontend_epoch=self.epoch,
            sampling=sampling,
            decode_worker="",
            decode_endpoint="",
            received_ns=received_ns,
            deadline_ns=deadline_ns,
            messages=tuple(messages),
            prompt=prompt,
            retrieval=retrieval,
        )
        body = dict(sent or {})
        try:
            self._check(message, body)
        except TrinityError as error:
            if self._on_refused is not None:
                self._on_refused(error)
            raise
        request = Request(message, Placement("", "", ""))
        self._requests.open(request)
        self.traces.begun(request, client_id)
        generation = Generation(request, body, self._means, partial(self._tell, request))
        self._tasks[request] = asyncio.create_task(self._run(request, generation))
        return request

    def cancel(self, request: Request) -> None:
        """The consumer is gone: close the connection on which the answer comes. Does nothing when it has ended."""
        self._fail(request, ClientGone("the client has closed the connection"))

    def end_all(self, error: TrinityError) -> None:
        """End every request that is in flight with `error`."""
        for request in self._requests.all():
            self._fail(request, error)

    def statistics(self) -> Statistics:
        """A snapshot of the engine's counters."""
        return Statistics(len(self._requests), self._restarts + sum(one.sent_again for one in self._requests.all()))

    # ---- the loop

    async def run(self) -> None:
        """Look after servers and deadlines until cancelled; requests still in flight then end with WorkerLost."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(_TICK_S)
        finally:
            self.end_all(WorkerLost("the frontend is stopping"))
            ending = [*self._tasks.values(), *self._looks]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await self.servers.close()

    def tick(self) -> None:
        """End what is late; have servers that are down asked again."""
        for request in self._requests.late(self._clock()):
            told = len(request.told.tokens)
            self._fail(request, DeadlineExceeded(f"the request's deadline passed after {told} tokens"))
        for look in self.servers.due():
            task = asyncio.create_task(look)
            self._looks.add(task)
            task.add_done_callback(self._looks.discard)

    def close(self) -> None:
        """Nothing is open once `run` has ended."""

    async def _run(self, request: Request, generation: Generation) -> None:
        try:
            await generation.run()
        except TrinityError as error:
            self._requests.fail(request, error)
        except asyncio.CancelledError:
            self._requests.fail(request, ClientGone("the request was cancelled"))
            raise
        except Exception:
            log.exception("a request failed", extra={"request": request.id})
            self._requests.fail(request, InternalError("internal error; the server's log has more"))
        finally:
            self._tasks.pop(request, None)

    def _check(self, message: Prefill, sent: dict[str, Any]) -> None:
        if len(self._requests) >= self._max_in_flight:
            raise Overloaded(
                f"{len(self._requests)} requests are in flight, the limit is {self._max_in_flight}; try again later"
            )
        retrieval = message.retrieval
        probes = retrieval is not None and retrieval.every_tokens > 0
        if retrieval is not None and isinstance(message.prompt, tuple):
            raise InvalidRequest(
                "retrieval needs a prompt that is text: this engine cannot put passages before token ids", "prompt"
            )
        if retrieval is not None and message.messages and not last_question(message.messages).strip():
            raise InvalidRequest("retrieval: the last message of the user has no text to search for", "messages")
        if probes and (field := needs_one_request(sent)):
            raise InvalidRequest(
                f"{field} cannot be combined with retrieval.every_tokens: this engine writes an answer with probes in "
                "several requests; leave one of the two out",
                field,
            )
        waits = self._means.restarts.times and self._means.restarts.wait_ns
        if self.servers.up or not waits:  # else it waits for a server, as one whose server is lost does
            self.servers.fitting(lambda abilities: why_not(abilities, sent, probes=probes))

    # ---- what is told

    def _tell(self, request: Request, piece: Piece) -> None:
        self.traces.told(request, piece)
        self._requests.deliver(piece)

    def _fail(self, request: Request, error: TrinityError) -> None:
        self._requests.fail(request, error)
        task = self._tasks.get(request)
        if task is not None:
            task.cancel()

    def _ended(self, ended: Ended, request: Request) -> None:
        self._restarts += request.sent_again
        log.info(
            "ended: %s, %d + %d tokens", ended.code, ended.prompt_tokens, ended.completion_tokens,
            extra={"request": request.id},
        )  # fmt: skip
        self.traces.ended(ended)
        if self._on_end is not None:
            self._on_end(ended)
