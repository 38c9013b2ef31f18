"""HTTP worker: a process that accepts connections on the node's port beside the frontend. Its loop is asyncio's.

It answers searches and embeddings itself, as a client of the pools with the collections open for reading, and passes
everything else to the frontend, which owns what has state.
"""

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import TrinityError, Unavailable
from runtime.node.api_keys import read_api_keys
from runtime.node.metrics.table import State
from runtime.node.metrics.worker_metrics import FrontendMetrics
from runtime.node.supervisor.listen import listen_private
from runtime.node.worker import Worker
from runtime.retrieval.build_follower import BuildFollower
from runtime.serving.frontend.engine import Engine
from runtime.serving.frontend.observability import RequestMetrics, exported_spans
from runtime.serving.frontend.requests import Request
from runtime.serving.http.admission import Admission
from runtime.serving.http.app import create_app
from runtime.serving.http.connections import HttpConfig
from runtime.serving.http.forwarding import Forwarder
from runtime.serving.http.middleware import error_response, id_source
from runtime.serving.http.request_context import RequestContextMiddleware
from runtime.serving.http.response_memory import ResponseMemory
from runtime.serving.http.routes.drain import Readiness
from runtime.serving.http.search_parts import SearchParts
from runtime.serving.http.server import (
    HEARTBEAT_S,
    Server,
    private_limits,
    raise_descriptor_limit,
    run_process,
    serve_beside,
)
from runtime.serving.http.service import Service
from runtime.serving.stages import observe_search

OWN_PATHS = ("/v1/retrieval", "/v1/embeddings", "/v1/rerank")
"""Paths whose POST requests change nothing: any process with the collections open can answer them."""


class NoEngine(Engine):
    """The engine of a process that generates nothing: it has traces."""

    def missing(self) -> list[str]:
        return []

    @property
    def restarts(self) -> int:
        return 0

    async def run(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is open."""

    def _accept(self, request: Request, sent: dict[str, object]) -> None:
        raise Unavailable("this process generates nothing")

    def _fail(self, request: Request, error: TrinityError) -> None:
        """None was accepted."""


def answering_or_forwarding(
    app: ASGIApp,
    forward: ASGIApp,
    refuse: Callable[[ASGIApp], ASGIApp],
    on_forwarded: Callable[[], None],
) -> ASGIApp:
    """Return the application of an HTTP worker: `app` answers `OWN_PATHS`, `forward` lets the frontend answer the rest.

    refuse: adds what every response has to that to an error of `forward`.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] in OWN_PATHS:
            await app(scope, receive, send)
            return
        on_forwarded()
        try:
            await forward(scope, receive, send)
        except TrinityError as error:
            await refuse(error_response(error))(scope, receive, send)

    return answer


async def _serve(worker: Worker) -> None:
    plan, config = worker.plan, worker.plan.config
    metrics = RequestMetrics(worker.table, config.slo)
    parts = SearchParts.open(worker)
    search = parts.search
    assert search is not None, "planned for a node with collections"
    settings = parts.settings(plan, read_api_keys(config))
    engine = NoEngine(epoch=worker.epoch, clock=time.monotonic_ns, on_end=None, on_refused=None)
    spans = engine.traces.spans = exported_spans(config.node.name, settings.model, os.environ)
    numbered, readiness = id_source(worker.epoch), Readiness()

    def new_id(path: str) -> str:
        return f"{numbered(path)}-{worker.name}"  # unique within the node

    async def no_metrics() -> str:
        raise Unavailable("the frontend has the node's metrics")

    service = Service(
        engine, parts.collections, no_metrics, catalogue=parts.collections, reranking=parts.reranking,
        readiness=readiness, on_response=metrics.record_response, on_searched=partial(observe_search, worker.table),
    )  # fmt: skip
    own = create_app(service, settings, new_id)
    refusals = ResponseMemory()
    forward = Forwarder(plan.http_socket("frontend-0"), "the frontend")
    app = answering_or_forwarding(
        own,
        forward,
        lambda refusal: RequestContextMiddleware(
            refusal, new_id, lambda: readiness.draining, metrics.record_response, refusals
        ),
        partial(worker.table.add, FrontendMetrics.FORWARDED),
    )
    raise_descriptor_limit(2 * config.http.max_connections)

    def on_closed() -> None:
        worker.table.state = State.CLOSED

    def on_refused(path: str, status: int) -> None:
        metrics.record_response(path, status, 0.0)

    limits = {path: own.limits[path] for path in OWN_PATHS}
    admission = Admission(limits, lambda: readiness.draining)
    public = HttpConfig(app, config.http, new_id, config.node.drain_s, on_refused, admission)
    private = HttpConfig(own, private_limits(config.http), new_id, config.node.drain_s)
    servers = [
        Server(public, worker.listening_socket(), on_closed),
        Server(private, listen_private(plan.http_socket(worker.name))),
    ]
    follower = BuildFollower(parts.registry, search.client.identities, worker.table, search.report)

    async def beat() -> None:
        while True:
            worker.table.beat()
            follower.step(time.monotonic_ns())
            readiness.drain(worker.stopping or worker.table.knob("draining") == 1)
            for server in servers:
                server.should_exit = worker.stopping
            await asyncio.sleep(HEARTBEAT_S)

    async def serve() -> None:
        await asyncio.gather(*(server.accept() for server in servers))

    worker.ready()
    try:
        await serve_beside(serve(), [beat(), search.run()])
    finally:
        forward.close()
        if parts.reranking is not None:
            parts.reranking.close()
        if spans is not None:
            spans.close()


def run(worker: Worker) -> None:
    """Serve until stopped, then finish the requests in flight."""
    run_process(_serve(worker))
