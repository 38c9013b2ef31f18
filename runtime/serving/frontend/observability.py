"""Traces and metrics of requests: where each one's time went, and how they ended.

A trace has times, counts and names of workers, nothing of what was asked or answered. Its memory is bounded: so many
ended requests, so many probes of each.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from runtime.errors import InvalidRequest, TrinityError, UnknownRequest, error_from_code
from runtime.node.config import SloSection
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import FrontendMetrics, Slo, StatusClass
from runtime.serving import stages
from runtime.serving.frontend.requests import ClientDisconnected, Piece, Request, RequestOutcome
from runtime.serving.messages import Generation, Probe, ProbeOutcome, Retrieval, Tokens
from runtime.serving.stages import observe, stage_seconds

CLIENT_ID = re.compile(r"[!-~]{1,128}")  # what a client may call its request: visible ASCII
MAX_PROBES = 256  # kept of one request; of the others only their number
RUNNING = "running"


class StageTime(msgspec.Struct, frozen=True):
    """A stage of a request, in seconds since the frontend read it."""

    name: str
    begin_s: float
    end_s: float


class ProbeTime(msgspec.Struct, frozen=True):
    """A probe: after how many tokens, when (as stages are), for how long it held the answer, how many new passages."""

    at_token: int
    begin_s: float
    end_s: float
    stalled_s: float
    passages: int
    outcome: ProbeOutcome


class Trace(msgspec.Struct, frozen=True):
    """A request as far as it has come. `state` is "running", the finish reason, or an error's code.

    A search alone (`kind`) ends as "found" or with an error's code; it has `passages`, and neither workers nor tokens.
    `client_id` is the `x-request-id` that the client sent. `restarts` counts the workers it has outlived; then the
    stages are those of its last start. `probes_left_out` are known by their number alone.
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


class SpanRecorder(Protocol):
    """Who tells somebody else of every request, too."""

    def start(
        self, received_ns: int, generation: Generation | None, retrieval: Retrieval | None
    ) -> Callable[[Trace], None]:
        """A request was accepted, or a search alone (no `generation`); what is called with its trace at its end."""


@dataclass(slots=True)
class _RunningTrace:
    id: str
    client_id: str
    stamps: dict[str, int]
    request: Request | None = None  # None: a search alone
    span_ended: Callable[[Trace], None] | None = None
    probes: list[Probe] = field(default_factory=list)
    probes_left_out: int = 0
    passages: int = 0


class Traces:
    """Takes notes of every request and every search alone. `keep` ended ones stay; `clock` gives monotonic ns.

    `client_id` is what the client calls it ("": nothing). Two that it calls the same are told apart by their ids alone:
    under the name is the later one.
    """

    def __init__(self, keep: int, clock: Callable[[], int]) -> None:
        self._keep, self._clock = keep, clock
        self._running: dict[str, _RunningTrace] = {}
        self._ended: OrderedDict[str, Trace] = OrderedDict()
        self.client_names: dict[str, str] = {}  # client's id → ours, of those above
        self.spans: SpanRecorder | None = None

    def start(self, request: Request, client_id: str = "") -> None:
        """A request was accepted."""
        asked = request.generation
        self._begin(
            _RunningTrace(request.id, client_id, {stages.RECEIVED: asked.received_ns}, request), asked.retrieval
        )

    def start_search(self, search_id: str, client_id: str = "", retrieval: Retrieval | None = None) -> None:
        """A search alone was accepted."""
        self._begin(_RunningTrace(search_id, client_id, {stages.RECEIVED: self._clock()}), retrieval)

    def record(self, request: Request, piece: Piece) -> None:
        """A worker has said something of it."""
        notes = self._running.get(request.id)
        if notes is None:
            return
        notes.stamps.update(piece.stages)
        if isinstance(piece, Tokens):
            for probe in piece.probes:
                if len(notes.probes) < MAX_PROBES:
                    notes.probes.append(probe)
                else:
                    notes.probes_left_out += 1

    def stamp(self, search_id: str, moment: str) -> None:
        """A search alone has come to a moment of `runtime.serving.stages`."""
        self._running[search_id].stamps[moment] = self._clock()

    def end(self, ended: RequestOutcome) -> None:
        """It has ended, in whatever way."""
        notes = self._running.pop(ended.request_id, None)
        if notes is not None:
            notes.stamps.setdefault(stages.END, self._clock())
            self._end(notes, ended.code)

    def end_search(self, search_id: str, state: str, passages: int) -> int:
        """A search alone has ended, in whatever way; returns how long it took, in ns."""
        notes = self._running.pop(search_id)
        notes.passages = passages
        notes.stamps[stages.END] = self._clock()
        self._end(notes, state)
        return notes.stamps[stages.END] - notes.stamps[stages.RECEIVED]

    def trace(self, request_id: str) -> Trace:
        """By its id or the client's own. Raises InvalidRequest for what can be neither, UnknownRequest for what is not
        kept."""
        if not CLIENT_ID.fullmatch(request_id):
            raise InvalidRequest("a request id has 1 to 128 visible ASCII characters", "request_id")
        for name in (request_id, self.client_names.get(request_id, "")):
            if notes := self._running.get(name):
                return _trace(notes, RUNNING, self._clock())
            if found := self._ended.get(name):
                return found
        raise UnknownRequest(
            f"no trace of request {request_id!r}: it never was, or {self._keep} others have ended since", "request_id"
        )

    def _begin(self, notes: _RunningTrace, retrieval: Retrieval | None) -> None:
        self._running[notes.id] = notes
        if self.spans is not None:
            asked = None if notes.request is None else notes.request.generation
            notes.span_ended = self.spans.start(notes.stamps[stages.RECEIVED], asked, retrieval)
        if notes.client_id:
            self.client_names[notes.client_id] = notes.id

    def _end(self, notes: _RunningTrace, state: str) -> None:
        found = self._ended[notes.id] = _trace(notes, state, notes.stamps[stages.END])
        if notes.span_ended is not None:
            notes.span_ended(found)
        while len(self._ended) > self._keep:
            _, forgotten = self._ended.popitem(last=False)
            if self.client_names.get(forgotten.client_id) == forgotten.id:
                del self.client_names[forgotten.client_id]


def _trace(notes: _RunningTrace, state: str, now_ns: int) -> Trace:
    request, zero = notes.request, notes.stamps[stages.RECEIVED]

    def since(moment_ns: int) -> float:
        return (moment_ns - zero) / 1e9

    first = notes.stamps.get(stages.FIRST_TOKEN)
    return Trace(
        id=notes.id,
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
            for stage, begin, end in stages.completed_stages(notes.stamps)
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
            for probe in notes.probes
        ),
        probes_left_out=notes.probes_left_out,
        kind="generation" if request else "search",
        passages=notes.passages,
        client_id=notes.client_id,
    )


# ---- the W3C trace context of the request that runs: what the client sent, handed on to servers that answer for us
# It is a context variable: a request's task has its own, and so have the tasks that it starts.


_HEADER_PATTERNS = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}
_NO_CONTEXT: Mapping[str, str] = {}

trace_context: ContextVar[Mapping[str, str]] = ContextVar("trace_context", default=_NO_CONTEXT)
"""The headers to send on; empty where the client sent none, or some that are not of their form."""


def trace_context_of(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Those of a request's headers; `tracestate` means nothing without `traceparent`."""
    if not _HEADER_PATTERNS["traceparent"].fullmatch(headers.get("traceparent", "")):
        return _NO_CONTEXT
    return {name: headers[name] for name, form in _HEADER_PATTERNS.items() if form.fullmatch(headers.get(name, ""))}


# ---- the frontend's own metrics: how requests ended, and whether the node kept what it promises (its SLOs)
#
# An SLO counts over the requests that were sent: one that failed or was refused broke it. Not counted are those whose
# client went away, and those that asked for what cannot be.


_COMPLETED = ("stop", "length")
_GENERATION_SLOS: tuple[Slo, ...] = ("ttft", "tpot", "all")  # to a generation
_STATUS_CLASSES: dict[int, StatusClass] = {2: "2xx", 4: "4xx", 5: "5xx"}
_HEALTH_PATHS = ("/health", "/ready")
_SEARCH_PATH = re.compile(r"/v1/retrieval|/v1/vector_stores/[^/]+/search")


class RequestMetrics:
    """Writes them into the frontend's table."""

    def __init__(self, table: WorkerTable, slo: SloSection) -> None:
        self._table = table
        self._slo = slo

    def record_end(self, ended: RequestOutcome) -> None:
        """A generation that was accepted has ended."""
        if ended.code in _COMPLETED:
            self._table.add(FrontendMetrics.REQUESTS["finished"])
            self._check_slos(ended)
        elif ended.code == ClientDisconnected.code:
            self._table.add(FrontendMetrics.REQUESTS["cancelled"])
        else:
            self._record_failure("failed", error_from_code(ended.code, ""))

    def record_relayed(self, ended: RequestOutcome) -> None:
        """As `record_end`, of an engine that keeps no table of its own: its times go into this one."""
        self.record_end(ended)
        observe(self._table, ended.stages, ended.completion_tokens)
        self._table.add(FrontendMetrics.PROMPT_TOKENS, ended.prompt_tokens)
        self._table.add(FrontendMetrics.GENERATION_TOKENS, ended.completion_tokens)

    def record_refusal(self, error: TrinityError) -> None:
        """A generation was not accepted."""
        self._record_failure("refused", error)

    def record_response(self, path: str, status: int, seconds: float) -> None:
        """An HTTP answer is out. Looks at the node's health are no traffic, and fail as they should while it drains."""
        if path in _HEALTH_PATHS:
            return
        if status // 100 in _STATUS_CLASSES:
            self._table.add(FrontendMetrics.HTTP_RESPONSES[_STATUS_CLASSES[status // 100]])
        if not _SEARCH_PATH.fullmatch(path):
            return
        if status == 200:
            self._table.observe(FrontendMetrics.SEARCH_TIME, seconds)
            self._count_slo("search", seconds <= self._slo.search_s)
        elif status >= 500:
            self._count_slo("search", False)

    def _check_slos(self, ended: RequestOutcome) -> None:
        spans = stage_seconds(ended.stages, ended.completion_tokens)
        kept = [spans["ttft"] <= self._slo.ttft_s]
        self._count_slo("ttft", kept[0])
        if "tpot" in spans:  # an answer of one token has no later ones
            kept.append(spans["tpot"] <= self._slo.tpot_s)
            self._count_slo("tpot", kept[1])
        self._count_slo("all", all(kept))

    def _record_failure(self, outcome: Literal["failed", "refused"], error: TrinityError) -> None:
        if error.status < 500:
            self._table.add(FrontendMetrics.REQUESTS["invalid"])
            return
        self._table.add(FrontendMetrics.REQUESTS[outcome])
        for slo in _GENERATION_SLOS:
            self._count_slo(slo, False)

    def _count_slo(self, slo: Slo, kept: bool) -> None:
        self._table.add(FrontendMetrics.SLO_REQUESTS[slo])
        if not kept:
            self._table.add(FrontendMetrics.SLO_VIOLATIONS[slo])
