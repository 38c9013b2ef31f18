"""SLO metrics of the frontend: over all requests, not only the successful ones."""

import asyncio
from collections.abc import Iterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from runtime.errors import Overloaded
from runtime.node.config import SloSection
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import FrontendMetrics, Slo
from runtime.retrieval.passages import SearchTimes
from runtime.serving import stages
from runtime.serving.frontend.observability import RequestMetrics
from runtime.serving.frontend.requests import RequestOutcome
from runtime.serving.http.request_context import RequestContextMiddleware
from runtime.serving.http.response_memory import ResponseMemory

SLO = SloSection(ttft_s=1.0, tpot_s=0.1, search_s=0.05)
SECOND = 1_000_000_000


@pytest.fixture
def table() -> Iterator[WorkerTable]:
    made = WorkerTable.create("frontend", "frontend-0", SloSection())
    yield made
    made.close()


def judged(table: WorkerTable, slo: Slo) -> tuple[float, float]:
    """Requests, violations."""
    return table.value(FrontendMetrics.SLO_REQUESTS[slo]), table.value(FrontendMetrics.SLO_VIOLATIONS[slo])


def answered(ttft_s: float, tpot_s: float = 0.0, tokens: int = 11, code: str = "stop") -> RequestOutcome:
    first = int(ttft_s * SECOND)
    stamps = {stages.RECEIVED: 0, stages.FIRST_TOKEN: first, stages.END: first + int(tpot_s * SECOND) * (tokens - 1)}
    return RequestOutcome("r", code, 1, tokens, stamps)


def test_an_answer_within_or_at_its_limits_violates_no_slo(table: WorkerTable) -> None:
    metrics = RequestMetrics(table, SLO)
    metrics.record_end(answered(0.5, 0.05))
    metrics.record_end(answered(1.0, 0.1))
    assert judged(table, "ttft") == judged(table, "tpot") == judged(table, "all") == (2, 0)
    assert table.value(FrontendMetrics.REQUESTS["finished"]) == 2


def test_a_late_first_token_or_slow_decode_violates_its_own_slo_and_the_combined_one(table: WorkerTable) -> None:
    metrics = RequestMetrics(table, SLO)
    metrics.record_end(answered(1.1, 0.05))
    metrics.record_end(answered(0.5, 0.2))
    assert judged(table, "ttft") == (2, 1)
    assert judged(table, "tpot") == (2, 1)
    assert judged(table, "all") == (2, 2)


def test_failed_and_refused_requests_violate_every_slo(table: WorkerTable) -> None:
    metrics = RequestMetrics(table, SLO)
    metrics.record_end(RequestOutcome("r", "worker_lost", 0, 3, {}))
    metrics.record_refusal(Overloaded("full"))
    assert judged(table, "ttft") == judged(table, "tpot") == judged(table, "all") == (2, 2)
    assert table.value(FrontendMetrics.REQUESTS["failed"]) == table.value(FrontendMetrics.REQUESTS["refused"]) == 1


@pytest.mark.parametrize(
    ("status", "seconds", "expected"),
    [(200, 0.05, (1, 0)), (200, 0.06, (1, 1)), (503, 0.0, (1, 1)), (400, 9.0, (0, 0))],
)
def test_searches_are_judged_by_their_total_latency(
    table: WorkerTable, status: int, seconds: float, expected: tuple[float, float]
) -> None:
    RequestMetrics(table, SLO).record_response("/v1/retrieval", status, seconds)
    assert judged(table, "search") == expected
    assert sum(table.read(FrontendMetrics.SEARCH_TIME)[:-1]) == (status == 200)


@pytest.mark.parametrize("crashes", [False, True])
def test_every_http_answer_is_counted_by_its_status_even_when_the_application_crashes(
    table: WorkerTable, crashes: bool
) -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if crashes:
            raise RuntimeError
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body"})

    async def send(message: Message) -> None: ...

    async def receive() -> Message:
        raise AssertionError

    moments = iter([1.0, 3.0])
    responded = RequestMetrics(table, SLO).record_response
    app = RequestContextMiddleware(
        application, str, lambda: False, responded, ResponseMemory(), clock=lambda: next(moments)
    )
    scope = {"type": "http", "path": "/x", "headers": []}
    if crashes:
        with pytest.raises(RuntimeError):
            asyncio.run(app(scope, receive, send))
    else:
        asyncio.run(app(scope, receive, send))
    assert table.value(FrontendMetrics.HTTP_RESPONSES["5xx" if crashes else "4xx"]) == 1


def test_a_search_records_its_stages_up_to_its_response(table: WorkerTable) -> None:
    stamps = {stages.RECEIVED: 0, stages.DEQUEUED: 10, stages.EMBEDDED: 30}
    stages.stamp_search_end(stamps, SearchTimes(batched_ns=20, found_ns=50), 60)
    stages.observe_search(table, stamps | {stages.RESPONDED: 70, stages.END: 80})
    by_vector = {stages.RECEIVED: 0, stages.EMBEDDED: 1, stages.FOUND: 5, stages.SEARCHED: 6}
    stages.observe_search(table, by_vector)  # whose response was too large
    seen = {stage.name: sum(table.read(stage.time)[:-1]) for stage in stages.STAGES if stage.time in table}
    assert {name: count for name, count in seen.items() if count} == {
        "queue": 1, "batch": 1, "embed": 1, "retrieval": 2, "passages": 2, "respond": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arrived_ns", "seconds"),
    [(0, 0.0), (700_000_000, 0.3), (1_200_000_000, 0.0)],  # unknown; before the application ran; after the response
)
def test_a_request_counts_from_its_arrival_and_the_time_that_a_client_takes_to_read_does_not(
    arrived_ns: int, seconds: float
) -> None:
    now_s = 1.0

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"long"})

    async def read(message: Message) -> None:
        nonlocal now_s
        now_s += 0.25 if message["type"] == "http.response.start" else 50.0

    async def receive() -> Message:
        raise AssertionError

    seen: list[tuple[str, int, float]] = []
    app = RequestContextMiddleware(
        application,
        str,
        lambda: False,
        lambda *response: seen.append(response),
        ResponseMemory(),
        clock=lambda: now_s,
    )
    scope = {"type": "http", "path": "/x", "headers": [], "state": {"arrived_ns": lambda: arrived_ns}}
    asyncio.run(app(scope, receive, read))
    ((path, status, took_s),) = seen
    assert (path, status) == ("/x", 200)
    assert took_s == pytest.approx(seconds)
