"""Traces as OpenTelemetry spans, by the GenAI conventions (semantic-conventions-genai 0.1), sent on by OTLP over HTTP.

A request is a span from the moment that it is read: a child of what its client sent as `traceparent`, and the parent of
what the server that writes the answer makes of it. Its stages and probes become children when it has ended, from the
times that `trinity trace` shows. Nothing of what was asked or answered is told. The SDK's thread sends spans in
batches from a bounded queue; what the collector does not take is dropped and logged.
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
    """RequestSpans to the collector that the standard OTEL_* variables name, http://localhost:4318 without any."""
    told = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    own = {} if told else {SERVICE_NAME: _PROVIDER}
    provider = TracerProvider(resource=Resource.create({SERVICE_INSTANCE_ID: node, **own}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class RequestSpans:
    """Makes spans of one node's requests. `clock` and `wall` give monotonic ns and ns of Unix time."""

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
        """A request, or a search alone (without `generation`), was accepted; servers that are asked for it are told
        the span. To be called with its whole trace when it has ended."""
        zero = self._wall() - self._clock() + received_ns
        found = {} if retrieval is None else _retrieval_attributes(retrieval)
        if generation is None:
            name, attributes = f"retrieval {found.get('gen_ai.data_source.id', '')}".rstrip(), found
        else:
            operation = "chat" if generation.messages else "text_completion"
            name, attributes = f"{operation} {self._model}", _generation_attributes(operation, self._model, generation)
        parent = self._propagator.extract(dict(trace_context.get()))
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=zero)
        sent_on: dict[str, str] = {}
        self._propagator.inject(sent_on, set_span_in_context(span))
        trace_context.set(sent_on)

        def ended(trace: Trace) -> None:
            if span.is_recording():
                self._children(span, zero, trace, found)
                span.set_attributes(_outcome_attributes(trace))
                _set_error(span, trace.state)
            span.end(zero + _ns(trace.elapsed_s))

        return ended

    def _children(self, span: Span, zero: int, trace: Trace, found: Attributes) -> None:
        context = set_span_in_context(span)
        asks = f"retrieval {found.get('gen_ai.data_source.id', '')}".rstrip()
        for stage in trace.stages:
            asked = stage.name == "retrieval" and trace.kind == "generation"
            child = self._tracer.start_span(
                asks if asked else stage.name, context, SpanKind.CLIENT if asked else SpanKind.INTERNAL,
                found if asked else {}, start_time=zero + _ns(stage.begin_s),
            )  # fmt: skip
            child.end(zero + _ns(stage.end_s))
        for probe in trace.probes:
            told: Attributes = {
                "trinity.probe.at_token": probe.at_token,
                "trinity.probe.stalled_s": probe.stalled_s,
                "trinity.probe.passages": probe.passages,
            }
            start = zero + _ns(probe.begin_s)
            child = self._tracer.start_span(asks, context, SpanKind.CLIENT, {**found, **told}, start_time=start)
            _set_error(child, "stop" if probe.outcome in ("answered", "near") else probe.outcome)
            child.end(zero + _ns(probe.end_s))

    def close(self) -> None:
        """Send what waits; a collector that does not answer is given up after two seconds."""
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
    """What is known of a request when it has ended."""
    if trace.kind == "search":
        return {"trinity.request.id": trace.id, "trinity.passages": trace.passages}
    told: Attributes = {
        "gen_ai.response.id": trace.id,
        "gen_ai.usage.output_tokens": trace.completion_tokens,
        "trinity.prefill_worker": trace.prefill_worker,
        "trinity.decode_worker": trace.decode_worker,
        "trinity.restarts": trace.restarts,
    }
    if trace.prompt_tokens:  # a server that writes the answer need not tell
        told["gen_ai.usage.input_tokens"] = trace.prompt_tokens
    return told | ({"gen_ai.response.finish_reasons": [trace.state]} if trace.state in _SUCCESS else {})


def _set_error(span: Span, state: str) -> None:
    if state not in _SUCCESS:
        span.set_attribute("error.type", state)
        span.set_status(StatusCode.ERROR)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
