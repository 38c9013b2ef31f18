"""Traces and metrics of requests: stage times, and how requests ended.

A trace contains times, counts and names of workers, and no text of prompts or answers. Memory is bounded by the number
of ended requests kept and of probes per request.
"""

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from runtime.errors import InvalidRequest, TrinityError, UnknownRequest, error_from_code
from runtime.node.config import SloSection
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import FrontendMetrics, Slo, StatusClass
from runtime.retrieval.passages import SearchTimes
from runtime.serving import stages
from runtime.serving.frontend.requests import ClientDisconnected, Piece, Request, RequestOutcome
from runtime.serving.messages import Probe, ProbeOutcome, Retrieval, Tokens
from runtime.serving.stages import observe, stage_seconds

if TYPE_CHECKING:
    from runtime.serving.frontend.spans import RequestSpans

log = logging.getLogger(__name__)

CLIENT_ID = re.compile(r"[!-~]{1,128}")  # valid `x-request-id` of a client: visible ASCII
MAX_PROBES = 256  # kept per request; further ones are only counted
RUNNING = "running"
current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
"""Whose the current request is: "" of a key without restriction, which sees all traces; others see their own."""
_EXPORTERS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's variables that name a collector."""


class StageTime(msgspec.Struct, frozen=True):
    """A stage of a request, in seconds since the frontend received it."""

    name: str
    begin_s: float
    end_s: float


class ProbeTime(msgspec.Struct, frozen=True):
    """A probe: tokens before it, its times (like those of stages), its stall, and its number of new passages."""

    at_token: int
    begin_s: float
    end_s: float
    stalled_s: float
    passages: int
    outcome: ProbeOutcome


class Trace(msgspec.Struct, frozen=True):
    """Trace of a running or ended request. `state` is "running", the finish reason, or an error's code.

    A search without generation (`kind`) ends as "found" or with an error's code; it has `passages`, and neither workers
    nor tokens. `client_id` is the `x-request-id` that the client sent. `restarts` counts the workers it has lost; the
    stages are those of the last attempt. `probes_left_out` counts the probes beyond `MAX_PROBES`.
    """

    id: str
    state: str
    prefill_worker: str
    decode_worker: str
    restarts: int
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float
    first_token_s: float | None
    stages: tuple[StageTime, ...]
    probes: tuple[ProbeTime, ...]
    probes_left_out: int = 0
    kind: Literal["generation", "search"] = "generation"
    passages: int = 0
    client_id: str = ""


@dataclass(slots=True)
class _RunningTrace:
    id: str
    client_id: str
    stamps: dict[str, int]
    request: Request | None = None  # None: a search without generation
    span_ended: Callable[[Trace], None] | None = None
    probes: list[Probe] = field(default_factory=list)
    probes_left_out: int = 0
    passages: int = 0
    state: str = RUNNING


class Traces:
    """Traces of all running requests and searches, and of the last `keep` that ended; `clock` returns monotonic ns.

    `client_id` is the client's own id ("": none). If two of a tenant have the same, it is that of the later one.
    """

    def __init__(self, keep: int, clock: Callable[[], int]) -> None:
        self._keep, self._clock = keep, clock
        self._running: dict[str, _RunningTrace] = {}
        self._ended: OrderedDict[str, Trace | _RunningTrace] = OrderedDict()  # of searches: traced when asked for
        self.client_names: dict[tuple[str, str], str] = {}  # tenant and client id → request id, for the traces above
        self._tenants: dict[str, str] = {}  # of those traces that are a tenant's
        self.spans: RequestSpans | None = None

    def start(self, request: Request, client_id: str = "") -> None:
        """Start the trace of an accepted request."""
        stamps = {stages.RECEIVED: request.generation.received_ns}
        self._begin(_RunningTrace(request.id, client_id, stamps, request), request.generation.retrieval)

    def start_search(
        self, search_id: str, client_id: str = "", retrieval: Retrieval | None = None, received_ns: int = 0
    ) -> None:
        """Start the trace of an accepted search, which has waited since it was received (0: it has not)."""
        now = self._clock()
        stamps = {stages.RECEIVED: received_ns, stages.DEQUEUED: now} if received_ns else {stages.RECEIVED: now}
        self._begin(_RunningTrace(search_id, client_id, stamps), retrieval)

    def record(self, request: Request, piece: Piece) -> None:
        """Record the stamps and probes of a piece."""
        running = self._running.get(request.id)
        if running is None:
            return
        running.stamps.update(piece.stages)
        if isinstance(piece, Tokens):
            for probe in piece.probes:
                if len(running.probes) < MAX_PROBES:
                    running.probes.append(probe)
                else:
                    running.probes_left_out += 1

    def stamp(self, search_id: str, moment: str) -> None:
        """Set a stamp (see `runtime.serving.stages`) of a search."""
        self._running[search_id].stamps[moment] = self._clock()

    def stamp_search_end(self, search_id: str, times: SearchTimes) -> None:
        """Set the stamps of a search whose passages are known."""
        stages.stamp_search_end(self._running[search_id].stamps, times, self._clock())

    def end(self, outcome: RequestOutcome) -> None:
        """End the trace of a request."""
        running = self._running.pop(outcome.request_id, None)
        if running is not None:
            running.stamps.setdefault(stages.END, self._clock())
            self._end(running, outcome.code)

    def end_search(self, search_id: str, state: str, passages: int) -> dict[str, int]:
        """End the trace of a search; return its stamps in ns."""
        running = self._running.pop(search_id)
        running.passages = passages
        running.stamps[stages.END] = self._clock()
        self._end(running, state)
        return running.stamps

    def trace(self, request_id: str) -> Trace:
        """Return the trace with this request id or client id, which the current tenant may see.

        Raises InvalidRequest, UnknownRequest.
        """
        if not CLIENT_ID.fullmatch(request_id):
            raise InvalidRequest("a request id has 1 to 128 visible ASCII characters", "request_id")
        tenant = current_tenant.get()
        for name in (request_id, self.client_names.get((tenant, request_id), "")):
            if tenant and self._tenants.get(name) != tenant:
                continue
            if running := self._running.get(name):
                return _trace(running, RUNNING, self._clock())
            if ended := self._ended.get(name):
                return ended if isinstance(ended, Trace) else _trace(ended, ended.state, ended.stamps[stages.END])
        raise UnknownRequest(
            f"no trace of request {request_id!r}: it is unknown, or {self._keep} others have ended since", "request_id"
        )

    def _begin(self, running: _RunningTrace, retrieval: Retrieval | None) -> None:
        self._running[running.id] = running
        if self.spans is not None:
            generation = None if running.request is None else running.request.generation
            running.span_ended = self.spans.start(running.stamps[stages.RECEIVED], generation, retrieval)
        if tenant := current_tenant.get():
            self._tenants[running.id] = tenant
        if running.client_id:
            for seer in {tenant, ""}:
                self.client_names[seer, running.client_id] = running.id

    def _end(self, running: _RunningTrace, state: str) -> None:
        running.state = state
        if running.request is None and running.span_ended is None:
            self._ended[running.id] = running
        else:
            trace = self._ended[running.id] = _trace(running, state, running.stamps[stages.END])
            if running.span_ended is not None:
                running.span_ended(trace)
        while len(self._ended) > self._keep:
            _, evicted = self._ended.popitem(last=False)
            for seer in {self._tenants.pop(evicted.id, ""), ""}:
                if self.client_names.get((seer, evicted.client_id)) == evicted.id:
                    del self.client_names[seer, evicted.client_id]


def _trace(running: _RunningTrace, state: str, now_ns: int) -> Trace:
    request, zero = running.request, running.stamps[stages.RECEIVED]

    def since(moment_ns: int) -> float:
        return (moment_ns - zero) / 1e9

    first = running.stamps.get(stages.FIRST_TOKEN)
    return Trace(
        id=running.id,
        state=state,
        prefill_worker=request.placement.prefill if request else "",
        decode_worker=request.placement.decode if request else "",
        restarts=request.attempts + request.resends if request else 0,
        prompt_tokens=len(request.delivered.prompt) if request else 0,
        completion_tokens=request.delivered.count if request else 0,
        elapsed_s=since(now_ns),
        first_token_s=None if first is None else since(first),
        stages=tuple(
            StageTime(stage.name, since(begin), since(end))
            for stage, begin, end in stages.completed_stages(running.stamps)
        ),
        probes=tuple(
            ProbeTime(
                probe.at_token,
                since(probe.begin_ns),
                since(probe.end_ns),
                probe.stalled_ns / 1e9,
                probe.passages,
                probe.outcome,
            )
            for probe in running.probes
        ),
        probes_left_out=running.probes_left_out,
        kind="generation" if request else "search",
        passages=running.passages,
        client_id=running.client_id,
    )


# ---- W3C trace context of the current request: from its client, propagated to the servers that it is sent to.
# A context variable: each request's task has its own value, inherited by the tasks that it starts.


_HEADER_PATTERNS = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}
NO_TRACE_CONTEXT: Mapping[str, str] = {}

trace_context: ContextVar[Mapping[str, str]] = ContextVar("trace_context", default=NO_TRACE_CONTEXT)
"""The headers to propagate; empty if the client sent none or malformed ones."""


def trace_context_of(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the trace context among a request's headers; `tracestate` requires `traceparent`."""
    if not _HEADER_PATTERNS["traceparent"].fullmatch(headers.get("traceparent", "")):
        return NO_TRACE_CONTEXT
    return {name: headers[name] for name, form in _HEADER_PATTERNS.items() if form.fullmatch(headers.get(name, ""))}


# ---- metrics of the frontend: outcomes of requests, and SLOs
#
# A request that failed or was refused violates its SLOs. Requests whose client disconnected and invalid requests do not
# count.


_COMPLETED = ("stop", "length")
_GENERATION_SLOS: tuple[Slo, ...] = ("ttft", "tpot", "all")
_STATUS_CLASSES: dict[int, StatusClass] = {2: "2xx", 4: "4xx", 5: "5xx"}
_HEALTH_PATHS = ("/health", "/ready")
_SEARCH_PATH = re.compile(r"/v1/vector_stores/[^/]+/search")


class RequestMetrics:
    """Writes request metrics and SLO counters into the frontend's table."""

    def __init__(self, table: WorkerTable, slo: SloSection) -> None:
        self._table = table
        self._slo = slo

    def record_end(self, outcome: RequestOutcome) -> None:
        """Count the end of an accepted generation."""
        if outcome.code in _COMPLETED:
            self._table.add(FrontendMetrics.REQUESTS["finished"])
            self._check_slos(outcome)
        elif outcome.code == ClientDisconnected.code:
            self._table.add(FrontendMetrics.REQUESTS["cancelled"])
        else:
            self._record_failure("failed", error_from_code(outcome.code, ""))

    def record_relayed(self, outcome: RequestOutcome) -> None:
        """`record_end` for an engine without worker tables: record its stage times and prompt tokens, too."""
        self.record_end(outcome)
        observe(self._table, outcome.stages, outcome.completion_tokens)
        self._table.add(FrontendMetrics.PROMPT_TOKENS, outcome.prompt_tokens)

    def record_refusal(self, error: TrinityError) -> None:
        """Count a generation that was not accepted."""
        self._record_failure("refused", error)

    def record_response(self, path: str, status: int, seconds: float) -> None:
        """Count an HTTP response. Health checks do not count: they fail on purpose while the node drains."""
        if path in _HEALTH_PATHS:
            return
        if status // 100 in _STATUS_CLASSES:
            self._table.add(FrontendMetrics.HTTP_RESPONSES[_STATUS_CLASSES[status // 100]])
        if path != "/v1/retrieval" and not _SEARCH_PATH.fullmatch(path):
            return
        if status == 200:
            self._table.observe(FrontendMetrics.SEARCH_TIME, seconds)
            self._count_slo("search", seconds <= self._slo.search_s)
        elif status >= 500:
            self._count_slo("search", False)

    def _check_slos(self, outcome: RequestOutcome) -> None:
        seconds = stage_seconds(outcome.stages, outcome.completion_tokens)
        met = [seconds["ttft"] <= self._slo.ttft_s]
        self._count_slo("ttft", met[0])
        if "tpot" in seconds:  # not for an answer of one token
            met.append(seconds["tpot"] <= self._slo.tpot_s)
            self._count_slo("tpot", met[1])
        self._count_slo("all", all(met))

    def _record_failure(self, outcome: Literal["failed", "refused"], error: TrinityError) -> None:
        if error.status < 500:
            self._table.add(FrontendMetrics.REQUESTS["invalid"])
            return
        self._table.add(FrontendMetrics.REQUESTS[outcome])
        for slo in _GENERATION_SLOS:
            self._count_slo(slo, False)

    def _count_slo(self, slo: Slo, met: bool) -> None:
        self._table.add(FrontendMetrics.SLO_REQUESTS[slo])
        if not met:
            self._table.add(FrontendMetrics.SLO_VIOLATIONS[slo])


def exported_spans(node: str, model: str, environment: Mapping[str, str]) -> "RequestSpans | None":
    """Return the exporter of spans if the environment names a collector; None also without the packages for it: the
    variable may be meant for other programs."""
    if not any(environment.get(name) for name in _EXPORTERS):  # to OpenTelemetry, empty means unset
        return None
    try:
        from runtime.serving.frontend.spans import RequestSpans, otlp_provider  # an optional extra
    except ImportError as error:
        log.warning("no spans are exported: %s; install the extra [otel]", error)
        return None
    return RequestSpans(otlp_provider(node), model)
