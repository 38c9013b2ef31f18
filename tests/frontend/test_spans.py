"""Requests as OpenTelemetry spans: GenAI semantic conventions, the client's trace context, no prompt texts."""

import gzip
import http.server
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from runtime.serving.frontend.observability import exported_spans

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra [otel] is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra [otel] is not installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from runtime.serving import stages
from runtime.serving.frontend.observability import Traces, trace_context
from runtime.serving.frontend.requests import Request, RequestOutcome
from runtime.serving.frontend.router import Placement
from runtime.serving.frontend.spans import RequestSpans, otlp_provider
from runtime.serving.messages import Generation, Message, Probe, Retrieval, Retrieved, Sampling, Tokens
from tests.clock import Clock

MS = 1_000_000
WALL = 1_800_000_000 * 10**9
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DOCS = Retrieval("docs", 3, 2)


class SpanHarness:
    """Traces that keep their spans in memory."""

    def __init__(self) -> None:
        self.clock, self.exporter = Clock(), InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = RequestSpans(self.provider, "tiny", self.clock, lambda: WALL + self.clock.now)
        self.traces = Traces(4, self.clock)
        self.traces.spans = self.spans

    def request(self, request_id: str = "r-1", retrieval: Retrieval | None = DOCS) -> Request:
        asked = Generation(Sampling(8, 0.5), self.clock.now, 1 << 60, (Message("user", "a secret"),), "", retrieval)
        return Request(request_id, asked, Placement("prefill-0", "decode-1", "ipc://@x"))

    def told(self) -> dict[str, Any]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture(autouse=True)
def _no_context() -> Iterator[None]:
    token = trace_context.set({})
    yield
    trace_context.reset(token)


def answered(harness: SpanHarness) -> dict[str, Any]:
    """The spans of a request that began at `clock.now`, with a retrieval and two probes."""
    begin, request = harness.clock.now, harness.request()
    harness.traces.start(request)
    found = {stages.DEQUEUED: begin + MS, stages.EMBEDDED: begin + 3 * MS, stages.FOUND: begin + 5 * MS}
    harness.traces.record(request, Retrieved("r-1", (), stages=found))
    probes = (
        Probe(2, begin + 10 * MS, begin + 12 * MS, MS, 1, "answered"),
        Probe(4, begin + 14 * MS, begin + 16 * MS, MS, 0, "late"),
    )
    last = {**found, stages.FIRST_TOKEN: begin + 8 * MS, stages.END: begin + 20 * MS}
    piece = Tokens("r-1", "a secret answer", (1, 2), "stop", 3, last, probes=probes)
    request.delivered.add(piece)
    harness.traces.record(request, piece)
    harness.traces.end(RequestOutcome("r-1", "stop", 3, 2, last))
    return harness.told()


def test_a_chat_is_a_span_with_its_stages_and_each_probe_as_children() -> None:
    harness = SpanHarness()
    begin = WALL + harness.clock.now
    spans = answered(harness)
    root = spans["chat tiny"]
    assert root.kind is SpanKind.SERVER
    assert (root.start_time, root.end_time) == (begin, begin + 20 * MS)
    told = dict(root.attributes)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "tiny"
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (8, 0.5)
    assert told["gen_ai.usage.output_tokens"] == 2
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["gen_ai.response.id"] == "r-1"
    children = [span for span in harness.exporter.get_finished_spans() if span is not root]
    assert {child.parent.span_id for child in children} == {root.context.span_id}
    assert [child.name for child in children] == [
        *("queue", "embed", "retrieval docs", "decode"),
        *("retrieval docs", "retrieval docs"),
    ]
    search, first, late = (child for child in children if child.name == "retrieval docs")
    assert (search.start_time, search.end_time) == (begin + 3 * MS, begin + 5 * MS)
    assert search.kind is SpanKind.CLIENT
    assert search.attributes["gen_ai.operation.name"] == "retrieval"
    assert (search.attributes["gen_ai.data_source.id"], search.attributes["gen_ai.retrieval.top_k"]) == ("docs", 3)
    assert (first.attributes["trinity.probe.at_token"], first.start_time) == (2, begin + 10 * MS)
    assert "error.type" not in first.attributes
    assert late.attributes["error.type"] == "late"
    assert "secret" not in "".join(span.to_json() for span in harness.exporter.get_finished_spans())


def test_a_request_continues_its_clients_trace_and_propagates_its_own_span() -> None:
    harness = SpanHarness()
    trace_context.set({"traceparent": PARENT, "tracestate": "vendor=1"})
    harness.traces.start(harness.request())
    sent_on = trace_context.get()
    harness.traces.end(RequestOutcome("r-1", "stop", 3, 2, {}))
    (span,) = harness.exporter.get_finished_spans()
    _, trace_id, parent_id, _ = PARENT.split("-")
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace_id, parent_id)
    assert sent_on == {"traceparent": f"00-{trace_id}-{span.context.span_id:016x}-01", "tracestate": "vendor=1"}


def test_a_failed_request_has_an_error_status() -> None:
    harness = SpanHarness()
    harness.traces.start(harness.request())
    harness.traces.end(RequestOutcome("r-1", "worker_lost", 0, 0, {}))
    root = harness.told()["chat tiny"]
    assert root.attributes["error.type"] == "worker_lost"
    assert not root.status.is_ok
    assert "gen_ai.response.finish_reasons" not in root.attributes


# ---- a collector


class _Collector(http.server.BaseHTTPRequestHandler):
    taken: Sequence[Any]
    status = 200

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        content = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            content = gzip.decompress(content)
        self.server.taken.append((self.path, ExportTraceServiceRequest.FromString(content)))  # type: ignore[attr-defined]
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@contextmanager
def collector(status: int = 200) -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    server.taken, server.status = [], status
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def spans_to(server: Any, monkeypatch: pytest.MonkeyPatch) -> Traces:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    traces = Traces(4, Clock())
    traces.spans = RequestSpans(otlp_provider("my-node"), "tiny")
    return traces


def end_one(traces: Traces) -> None:
    traces.start_search("ret-1", "", DOCS)
    traces.end_search("ret-1", "found", 2)


def test_spans_are_sent_to_the_collector_of_the_standard_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as server:
        traces = spans_to(server, monkeypatch)
        end_one(traces)
        assert isinstance(traces.spans, RequestSpans)
        traces.spans.close()
        ((path, told),) = server.taken
    assert path == "/v1/traces"
    (resource,) = told.resource_spans
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (named["service.name"], named["service.instance.id"]) == ("trinity", "my-node")
    assert named["deployment.environment"] == "test"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["retrieval docs"]


def test_a_collectors_error_is_logged_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with collector(400) as server:
        traces = spans_to(server, monkeypatch)
        end_one(traces)
        assert isinstance(traces.spans, RequestSpans)
        traces.spans.close()
    assert "400" in caplog.text


def test_otel_service_name_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "gateway")
    provider = otlp_provider("my-node")
    assert provider.resource.attributes["service.name"] == "gateway"
    provider.shutdown()


def test_spans_are_exported_if_the_environment_names_a_collector() -> None:
    for unset in ({"OTEL_SERVICE_NAME": "gateway"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}):
        assert exported_spans("my-node", "tiny", unset) is None
    made = exported_spans("my-node", "tiny", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"})
    assert made is not None
    made.close()
