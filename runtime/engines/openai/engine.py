"""Engine over servers that speak OpenAI's protocol."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal

from runtime.engines.openai.capabilities import detect_capabilities
from runtime.engines.openai.continuation import unsupported
from runtime.engines.openai.handover import HandoverCosts, Handovers
from runtime.engines.openai.load_balancer import LoadBalancer
from runtime.engines.openai.server import Server
from runtime.engines.openai.signals import EngineSignals
from runtime.engines.openai.transfer import Transfer, VllmTransfer, servers_of, transfer_of
from runtime.engines.openai.writer import AnswerWriter, Dependencies
from runtime.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    TrinityError,
    WorkerLost,
)
from runtime.node.api_keys import read_engine_key
from runtime.node.engine_config import OpenAiSection, ServedSection, VllmSection
from runtime.node.metrics.table import WorkerTable
from runtime.node.retrieval_config import ProbesSection, PromptsSection
from runtime.node.worker import Worker
from runtime.serving.frontend.engine import KEPT_TRACES, Engine, RestartLimits
from runtime.serving.frontend.observability import RequestMetrics
from runtime.serving.frontend.requests import ClientDisconnected, Piece, Request, RequestOutcome
from runtime.serving.http.passthrough import single_request_field
from runtime.serving.http.service import Collections
from runtime.serving.model.text import last_question
from runtime.serving.triggers import counts_tokens

log = logging.getLogger(__name__)

_TICK_S = 0.1


class OpenAiEngine(Engine):
    """Engine that has answers written by the servers of a `LoadBalancer`.

    At most `max_in_flight` requests run; `restarts` limits retries after a server failure; `handover_tokens`: see
    `handover.HandoverCosts`; `table`: what the control loop reads is written there.
    """

    passthrough = True

    def __init__(
        self,
        balancer: LoadBalancer,
        section: ServedSection,
        search: Collections,
        *,
        epoch: int,
        max_in_flight: int,
        restarts: RestartLimits = RestartLimits(0),  # noqa: B008
        handover_tokens: int | Literal["auto"] = "auto",
        transfer: Transfer = VllmTransfer(),  # noqa: B008
        prompts: PromptsSection = PromptsSection(),  # noqa: B008
        clock: Callable[[], int] = time.monotonic_ns,
        table: WorkerTable | None = None,
        on_end: Callable[[RequestOutcome], None] | None = None,
        on_refused: Callable[[TrinityError], None] | None = None,
        keep_traces: int = KEPT_TRACES,
    ) -> None:
        super().__init__(epoch=epoch, clock=clock, on_end=on_end, on_refused=on_refused, keep_traces=keep_traces)
        self.balancer = balancer
        self._signals = EngineSignals(balancer, clock, table)
        handovers = Handovers(balancer, transfer, HandoverCosts(handover_tokens), self._signals, clock)
        self._deps = Dependencies(balancer, search, section, prompts, restarts, handovers, self._signals, clock)
        self._max_in_flight = max_in_flight
        self._tasks: dict[Request, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()

    # ---- interface of the routes

    def missing(self) -> list[str]:
        """Return ["engine"] while no server is up."""
        return [] if self.balancer.answering else ["engine"]

    def _begin(self, request: Request, sent: dict[str, Any]) -> None:
        writer = AnswerWriter(request, sent, self._deps, partial(self._emit, request))
        self._tasks[request] = asyncio.create_task(self._run(request, writer))

    def expect_no_worker(self) -> None:
        if isinstance(self._deps.section, VllmSection):  # servers of the node
            self._deps.restarts = RestartLimits(self._deps.restarts.times)

    @property
    def restarts(self) -> int:
        return self._signals.retries

    # ---- the loop

    async def run(self) -> None:
        """Check servers and deadlines until cancelled; requests still in flight then end with WorkerLost."""
        for follower in self.balancer.followers():
            self._start(follower)
        try:
            while True:
                self.tick()
                await asyncio.sleep(_TICK_S)
        finally:
            self.end_all(WorkerLost("the frontend is stopping"))
            ending = [*self._tasks.values(), *self._background]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await self.balancer.close()

    def tick(self) -> None:
        """Fail requests past their deadline; start the due checks of servers; write the signals."""
        self._signals.write()
        for request in self.requests.expired(self._clock()):
            self._fail(
                request, DeadlineExceeded(f"the request's deadline passed after {request.delivered.count} tokens")
            )
        for check in self.balancer.checks_due():
            self._start(check)

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def close(self) -> None:
        """No-op: `run` closes everything when it ends."""

    async def _run(self, request: Request, writer: AnswerWriter) -> None:
        try:
            await writer.run()
        except TrinityError as error:
            self.requests.fail(request, error)
        except asyncio.CancelledError:
            self.requests.fail(request, ClientDisconnected("the request was cancelled"))
            raise
        except Exception:
            log.exception("a request failed", extra={"request": request.id})
            self.requests.fail(request, InternalError("internal error; see the server's log"))
        finally:
            self._tasks.pop(request, None)

    def _accept(self, request: Request, sent: dict[str, Any]) -> None:
        generation = request.generation
        if len(self.requests) >= self._max_in_flight:
            raise Overloaded(
                f"{len(self.requests)} requests are in flight, the limit is {self._max_in_flight}; try again later"
            )
        retrieval = generation.retrieval
        probes = retrieval is not None and retrieval.every_tokens > 0
        if sent.get("kv_transfer_params") and any(backend.server.stage for backend in self.balancer.backends):
            raise InvalidRequest(
                "kv_transfer_params: the node sets it itself with separate prefill and decode servers; leave it out",
                "kv_transfer_params",
            )
        if retrieval is not None and isinstance(generation.prompt, tuple):
            raise InvalidRequest(
                "retrieval needs a text prompt: this engine cannot insert passages before token ids", "prompt"
            )
        if retrieval is not None and generation.messages and not last_question(generation.messages).strip():
            raise InvalidRequest("retrieval: the last message of the user has no text to search for", "messages")
        if probes and retrieval is not None and not counts_tokens(retrieval.trigger):
            raise InvalidRequest(
                f'probe_trigger "{retrieval.trigger}": this engine reports neither tokens nor the model\'s confidence '
                'as it goes; use "every" or "drift"',
                "retrieval.probe_trigger",
            )
        if probes and (field := single_request_field(sent)):
            raise InvalidRequest(
                f"{field} cannot be combined with retrieval.every_tokens: this engine generates an answer with probes "
                "in several requests; omit one of the two (every_tokens = 0: no probes)",
                field,
            )
        waits = self._deps.restarts.times and self._deps.restarts.wait_ns
        if self.balancer.answering or not waits:  # else the request waits for a server
            self.balancer.eligible(lambda capabilities: unsupported(capabilities, sent, probes=probes))

    # ---- output

    def _emit(self, request: Request, piece: Piece) -> None:
        self.traces.record(request, piece)
        self.requests.deliver(piece)

    def _fail(self, request: Request, error: TrinityError) -> None:
        self.requests.fail(request, error)
        task = self._tasks.get(request)
        if task is not None:
            task.cancel()


# ---- construction from the configuration


async def openai_engine(
    worker: Worker, section: OpenAiSection, metrics: RequestMetrics, search: Collections
) -> OpenAiEngine:
    """Create the engine over the servers at the section's URLs. Raises as `engine_over`."""
    servers, advice = servers_of(section, read_engine_key(section)), "start it, or correct model.url"
    return await engine_over(servers, worker, section, metrics, search, transfer_of(section), advice=advice)


async def engine_over(
    servers: Sequence[Server],
    worker: Worker,
    section: ServedSection,
    metrics: RequestMetrics,
    search: Collections,
    transfer: Transfer = VllmTransfer(),  # noqa: B008
    **options: Any,
) -> OpenAiEngine:
    """Create the engine after a first check of all servers. `options`: of `LoadBalancer`.

    Raises ConfigError for a server that can never serve the configuration; one that is down now may come up later.
    """
    http = worker.plan.config.http
    check_default_trigger(worker.plan.config.probes)
    detect, weight = partial(detect_capabilities, section=section), http.overlap_weight
    balancer = LoadBalancer(servers, detect, overlap_weight=weight, paired=transfer.paired, **options)
    await balancer.check_all()
    return OpenAiEngine(
        balancer,
        section,
        search,
        epoch=worker.epoch,
        max_in_flight=http.max_in_flight,
        restarts=RestartLimits(wait_ns=int(worker.plan.config.restart_wait_s * 1e9)),
        prompts=worker.plan.config.prompts,
        table=worker.table,
        transfer=transfer,
        on_end=metrics.record_relayed,
        on_refused=metrics.record_refusal,
    )


def check_default_trigger(probes: ProbesSection) -> None:
    """Raise `ConfigError` if the node's default trigger cannot be used with this engine, or cannot be loaded."""
    try:
        usable = counts_tokens(probes.trigger)
    except InvalidRequest as error:
        raise ConfigError(f"probes.trigger: {error.message}") from error
    if not usable:
        raise ConfigError(
            f"probes.trigger = {probes.trigger!r} reads tokens or the model's confidence as it goes, which this engine "
            'does not report; use "every" or "drift"'
        )
