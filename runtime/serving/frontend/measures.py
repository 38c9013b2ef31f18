"""The frontend's own metrics: how requests ended, and whether the node kept what it promises (its SLOs).

An SLO counts over the requests that were sent: one that failed or was refused broke it. Not counted are those whose
client went away, and those that asked for what cannot be.
"""

import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import TrinityError, error_of
from runtime.node.config import SloSection
from runtime.node.metrics.columns import FrontendMetrics, Slo, StatusClass
from runtime.node.metrics.table import WorkerTable
from runtime.retrieval.live.writing import LiveWrites
from runtime.serving.frontend.requests import ClientGone, Ended
from runtime.serving.stages import observe, spans_seconds

_WHOLE = ("stop", "length")
_STATUS: dict[int, StatusClass] = {2: "2xx", 4: "4xx", 5: "5xx"}
_SEARCH_PATH = re.compile(r"/v1/retrieval|/v1/vector_stores/[^/]+/search")


class Measures:
    """Writes them into the frontend's table."""

    def __init__(self, table: WorkerTable, slo: SloSection) -> None:
        self._table = table
        self._slo = slo

    def ended(self, ended: Ended) -> None:
        """A generation that was accepted has ended."""
        if ended.code in _WHOLE:
            self._table.add(FrontendMetrics.REQUESTS["finished"])
            self._judge_answer(ended)
        elif ended.code == ClientGone.code:
            self._table.add(FrontendMetrics.REQUESTS["cancelled"])
        else:
            self._table.add(FrontendMetrics.REQUESTS["failed"])
            if error_of(ended.code, "").status >= 500:
                self._broke_all()

    def relayed(self, ended: Ended) -> None:
        """As `ended`, of an engine that keeps no table of its own: its times go into this one."""
        self.ended(ended)
        observe(self._table, ended.stages, ended.completion_tokens)
        self._table.add(FrontendMetrics.PROMPT_TOKENS, ended.prompt_tokens)
        self._table.add(FrontendMetrics.GENERATION_TOKENS, ended.completion_tokens)

    def refused(self, error: TrinityError) -> None:
        """A generation was not accepted."""
        self._table.add(FrontendMetrics.REQUESTS["refused"])
        if error.status >= 500:
            self._broke_all()

    def responded(self, path: str, status: int, seconds: float) -> None:
        """An HTTP answer is out."""
        if status // 100 in _STATUS:
            self._table.add(FrontendMetrics.HTTP_RESPONSES[_STATUS[status // 100]])
        if not _SEARCH_PATH.fullmatch(path):
            return
        if status == 200:
            self._table.observe(FrontendMetrics.SEARCH_TIME, seconds)
            self._judge("search", seconds <= self._slo.search_s)
        elif status >= 500:
            self._judge("search", False)

    def _judge_answer(self, ended: Ended) -> None:
        spans = spans_seconds(ended.stages, ended.completion_tokens)
        kept = [spans["ttft"] <= self._slo.ttft_s]
        self._judge("ttft", kept[0])
        if "tpot" in spans:  # an answer of one token has no later ones
            kept.append(spans["tpot"] <= self._slo.tpot_s)
            self._judge("tpot", kept[1])
        self._judge("all", all(kept))

    def _broke_all(self) -> None:
        self._judge("ttft", False)
        self._judge("tpot", False)
        self._judge("all", False)

    def _judge(self, slo: Slo, kept: bool) -> None:
        self._table.add(FrontendMetrics.SLO_REQUESTS[slo])
        if not kept:
            self._table.add(FrontendMetrics.SLO_VIOLATIONS[slo])


def tell_writes(table: WorkerTable, writes: LiveWrites) -> None:
    """How the live collections are that are written to: of all together."""
    states = list(writes.states().values())
    table.set(FrontendMetrics.LIVE_DOCUMENTS, sum(state.documents for state in states))
    table.set(FrontendMetrics.LIVE_SEGMENTS, sum(state.segments for state in states))
    table.set(FrontendMetrics.LIVE_GROWING, sum(state.growing for state in states))
    table.set(FrontendMetrics.LIVE_TOMBSTONES, sum(state.tombstones for state in states))
    table.set(FrontendMetrics.LIVE_LOG_BYTES, sum(state.log_bytes for state in states))
    table.set(FrontendMetrics.LIVE_BUILDING, sum(state.building for state in states))
    table.total(FrontendMetrics.LIVE_SEALED, sum(state.sealed for state in states))
    table.total(FrontendMetrics.LIVE_MERGED, sum(state.merged for state in states))


class MeasuredApp:
    """An ASGI application whose every HTTP answer is measured, from its request's head to its own last byte."""

    def __init__(self, app: ASGIApp, measures: Measures, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._measures = measures
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = self._clock(), 500

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            self._measures.responded(scope["path"], status, self._clock() - begin)
