"""Traces as OpenTelemetry spans, by the GenAI conventions (semantic-conventions-genai 0.1), exported by OTLP over HTTP.

A request is a span from the moment it is received: a child of the client's `traceparent`, and the parent of the spans
of the server that generates the answer. When the request has ended, its stages and probes become child spans, with the
times that `trinity trace` shows. Spans contain no text of prompts or answers. The SDK's thread exports spans in batches
from a bounded queue; spans that the collector does not accept are dropped and logged.
"""

import os
import threading
import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from runtime.serving.frontend.observability import Trace, trace_context
from runtime.serving.messages import Generation, Retrieval

_PROVIDER = "trinity"
_SHUTDOWN_TIMEOUT_S = 2.0
_SUCCESS = ("stop", "length", "found")
Attributes = dict[str, str | int | float | list[str]]


def otlp_provider(node: str) -> TracerProvider:
    """Return a provider that exports to the collector named by the OTEL_* variables, by default
    http://localhost:4318."""
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    service = {} if named else {SERVICE_NAME: _PROVIDER}
    provider = TracerProvider(resource=Resource.create({SERVICE_INSTANCE_ID: node, **service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class RequestSpans:
    """Creates the spans of one node's requests. `clock` and `wall` return monotonic ns and Unix time in ns."""

    def __init__(
        self,
        provider: TracerProvider,
        model: str,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._provider, self._model, self._clock, self._wall = provider, model, clock, wall
        self._tracer = provider.get_tracer("trinity")
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self, received_ns: int, generation: Generation | None, retrieval: Retrieval | None
    ) -> Callable[[Trace], None]:
        """Start the span of a request, or of a search (without `generation`), and propagate it to the servers called.

        Return a callback for the trace at its end.
        """
        zero = self._wall() - self._clock() + received_ns
        retrieved = {} if retrieval is None else _retrieval_attributes(retrieval)
        if generation is None:
            name, attributes = f"retrieval {retrieved.get('gen_ai.data_source.id', '')}".rstrip(), retrieved
        else:
            operation = "chat" if generation.messages else "text_completion"
            name, attributes = f"{operation} {self._model}", _generation_attributes(operation, self._model, generation)
        parent = self._propagator.extract(dict(trace_context.get()))
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=zero)
        headers: dict[str, str] = {}
        self._propagator.inject(headers, set_span_in_context(span))
        trace_context.set(headers)

        def ended(trace: Trace) -> None:
            if span.is_recording():
                self._children(span, zero, trace, retrieved)
                span.set_attributes(_outcome_attributes(trace))
                _set_error(span, trace.state)
            span.end(zero + _ns(trace.elapsed_s))

        return ended

    def _children(self, span: Span, zero: int, trace: Trace, retrieved: Attributes) -> None:
        context = set_span_in_context(span)
        retrieval_name = f"retrieval {retrieved.get('gen_ai.data_source.id', '')}".rstrip()
        for stage in trace.stages:
            is_retrieval = stage.name == "retrieval" and trace.kind == "generation"
            child = self._tracer.start_span(
                retrieval_name if is_retrieval else stage.name, context,
                SpanKind.CLIENT if is_retrieval else SpanKind.INTERNAL, retrieved if is_retrieval else {},
                start_time=zero + _ns(stage.begin_s),
            )  # fmt: skip
            child.end(zero + _ns(stage.end_s))
        for probe in trace.probes:
            attributes: Attributes = {
                **retrieved,
                "trinity.probe.at_token": probe.at_token,
                "trinity.probe.stalled_s": probe.stalled_s,
                "trinity.probe.passages": probe.passages,
            }
            start = zero + _ns(probe.begin_s)
            child = self._tracer.start_span(retrieval_name, context, SpanKind.CLIENT, attributes, start_time=start)
            _set_error(child, "stop" if probe.outcome in ("answered", "near") else probe.outcome)
            child.end(zero + _ns(probe.end_s))

    def close(self) -> None:
        """Export the queued spans; stop after two seconds if the collector does not respond."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-spans", daemon=True)
        closing.start()
        closing.join(_SHUTDOWN_TIMEOUT_S)


def _retrieval_attributes(retrieval: Retrieval) -> Attributes:
    return {
        "gen_ai.operation.name": "retrieval",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.data_source.id": retrieval.collection,
        "gen_ai.retrieval.top_k": retrieval.k,
    }


def _generation_attributes(operation: str, model: str, generation: Generation) -> Attributes:
    sampling = generation.sampling
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }


def _outcome_attributes(trace: Trace) -> Attributes:
    """Return the attributes of an ended request."""
    if trace.kind == "search":
        return {"trinity.request.id": trace.id, "trinity.passages": trace.passages}
    attributes: Attributes = {
        "gen_ai.response.id": trace.id,
        "gen_ai.usage.output_tokens": trace.completion_tokens,
        "trinity.prefill_worker": trace.prefill_worker,
        "trinity.decode_worker": trace.decode_worker,
        "trinity.restarts": trace.restarts,
    }
    if trace.prompt_tokens:  # a relaying engine may not know it
        attributes["gen_ai.usage.input_tokens"] = trace.prompt_tokens
    return attributes | ({"gen_ai.response.finish_reasons": [trace.state]} if trace.state in _SUCCESS else {})


def _set_error(span: Span, state: str) -> None:
    if state not in _SUCCESS:
        span.set_attribute("error.type", state)
        span.set_status(StatusCode.ERROR)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
