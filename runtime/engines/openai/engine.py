"""The engine behind the frontend when the model runs on servers that speak OpenAI's protocol."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from runtime.engines.openai.abilities import ask
from runtime.engines.openai.handover import Costs, Handovers
from runtime.engines.openai.sequel import why_not
from runtime.engines.openai.server import Server
from runtime.engines.openai.servers import Servers
from runtime.engines.openai.writer import AnswerWriter, Means
from runtime.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, TrinityError, WorkerLost
from runtime.node.engine_config import OpenAiSection, ServedSection, VllmSection
from runtime.node.placement.plan import read_engine_key
from runtime.node.worker import Worker
from runtime.serving.frontend.engine import Engine, EngineStatistics, RestartLimits
from runtime.serving.frontend.observability import RequestMetrics
from runtime.serving.frontend.requests import ClientDisconnected, Piece, Request, RequestOutcome
from runtime.serving.http.passthrough import single_request_field
from runtime.serving.http.service import SearchSource
from runtime.serving.model.text import last_question

log = logging.getLogger(__name__)

_TICK_S = 0.1


class OpenAiEngine(Engine):
    """`max_in_flight` bounds the requests; a server that is lost is outlived within `restarts`. `handover_tokens`: see
    `handover.Costs`."""

    passthrough = True

    def __init__(
        self,
        servers: Servers,
        section: ServedSection,
        search: SearchSource,
        *,
        epoch: int,
        max_in_flight: int,
        restarts: RestartLimits = RestartLimits(),  # noqa: B008
        handover_tokens: int | Literal["auto"] = "auto",
        clock: Callable[[], int] = time.monotonic_ns,
        on_end: Callable[[RequestOutcome], None] | None = None,
        on_refused: Callable[[TrinityError], None] | None = None,
        keep_traces: int = 0,
    ) -> None:
        super().__init__(epoch=epoch, clock=clock, on_end=on_end, on_refused=on_refused, keep_traces=keep_traces)
        self.servers = servers
        handovers = Handovers(servers, Costs(handover_tokens), clock)
        self._means = Means(servers, search, section, restarts, handovers, clock)
        self._max_in_flight = max_in_flight
        self._tasks: dict[Request, asyncio.Task[None]] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._restarts = 0

    # ---- for the routes

    def missing(self) -> list[str]:
        """["engine"] while no server answers."""
        return [] if self.servers.up else ["engine"]

    def _begin(self, request: Request, sent: dict[str, Any]) -> None:
        writer = AnswerWriter(request, sent, self._means, partial(self._tell, request))
        self._tasks[request] = asyncio.create_task(self._run(request, writer))

    def statistics(self) -> EngineStatistics:
        """A snapshot of the engine's counters."""
        restarts = self._restarts + sum(one.resends for one in self.requests.all())
        return EngineStatistics(in_flight=len(self.requests), restarts=restarts)

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
        for request in self.requests.expired(self._clock()):
            told = request.delivered.count
            self._fail(request, DeadlineExceeded(f"the request's deadline passed after {told} tokens"))
        for look in (*self.servers.due(), *self.servers.loads_due(), *self.servers.quiet()):
            task = asyncio.create_task(look)
            self._looks.add(task)
            task.add_done_callback(self._looks.discard)

    def close(self) -> None:
        """Nothing is open once `run` has ended."""

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
            self.requests.fail(request, InternalError("internal error; the server's log has more"))
        finally:
            self._tasks.pop(request, None)

    def _accept(self, request: Request, sent: dict[str, Any]) -> None:
        asked = request.generation
        if len(self.requests) >= self._max_in_flight:
            raise Overloaded(
                f"{len(self.requests)} requests are in flight, the limit is {self._max_in_flight}; try again later"
            )
        retrieval = asked.retrieval
        probes = retrieval is not None and retrieval.every_tokens > 0
        if sent.get("kv_transfer_params") and any(member.server.stage for member in self.servers.members):
            raise InvalidRequest(
                "kv_transfer_params: where KV comes from is the node's own to say here; leave it out",
                "kv_transfer_params",
            )
        if retrieval is not None and isinstance(asked.prompt, tuple):
            raise InvalidRequest(
                "retrieval needs a prompt that is text: this engine cannot put passages before token ids", "prompt"
            )
        if retrieval is not None and asked.messages and not last_question(asked.messages).strip():
            raise InvalidRequest("retrieval: the last message of the user has no text to search for", "messages")
        if probes and retrieval is not None and retrieval.trigger == "unsure":
            raise InvalidRequest(
                'probe_trigger "unsure": this engine does not tell how sure its model is; "every" and "drift" work',
                "retrieval.probe_trigger",
            )
        if probes and (field := single_request_field(sent)):
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
        self.traces.record(request, piece)
        self.requests.deliver(piece)

    def _fail(self, request: Request, error: TrinityError) -> None:
        self.requests.fail(request, error)
        task = self._tasks.get(request)
        if task is not None:
            task.cancel()

    def _ended(self, ended: RequestOutcome, request: Request) -> None:
        self._restarts += request.resends
        super()._ended(ended, request)


# ---- the engine of a node in front of servers, made from its configuration


async def openai_engine(
    worker: Worker, section: OpenAiSection, metrics: RequestMetrics, search: SearchSource
) -> OpenAiEngine:
    """Over the servers at the section's URLs. Raises as `engine_over`."""
    key = read_engine_key(section)
    servers = Servers(
        [Server(url, key, section.connect_s) for url in section.urls],
        partial(ask, section=section),
        advice="start it, or mend model.url",
        overlap_weight=worker.plan.config.http.overlap_weight,
    )
    return await engine_over(servers, worker, section, metrics, search)


async def engine_over(
    servers: Servers, worker: Worker, section: ServedSection, metrics: RequestMetrics, search: SearchSource
) -> OpenAiEngine:
    """All servers are asked first. Raises ConfigError for one that can never serve what is configured; one that does
    not answer now is waited for meanwhile.
    """
    http = worker.plan.config.http
    await servers.reach()
    return OpenAiEngine(
        servers,
        section,
        search,
        epoch=worker.epoch,
        max_in_flight=http.max_in_flight,
        restarts=RestartLimits(http.restarts, int(http.restart_wait_s * 1e9)),
        handover_tokens=section.handover_tokens if isinstance(section, VllmSection) else "auto",
        on_end=metrics.record_relayed,
        on_refused=metrics.record_refusal,
        keep_traces=http.traces,
    )
