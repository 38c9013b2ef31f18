"""The processes that serve HTTP: the frontend, which submits requests to the engine and streams the answers, and HTTP
workers (`http_worker.py`), which own nothing that has state. Their loop is asyncio's."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from runtime.errors import Unavailable
from runtime.node.api_keys import read_api_keys
from runtime.node.metrics.table import NODE_STOPS, State, WorkerTable
from runtime.node.metrics.worker_metrics import CacheEvent, FrontendMetrics
from runtime.node.supervisor.admin import admin_request
from runtime.node.supervisor.listen import listen_private
from runtime.node.worker import Worker
from runtime.retrieval.answer_store import AnswerStore
from runtime.retrieval.async_retriever import AsyncRetriever
from runtime.retrieval.build_follower import BuildFollower
from runtime.retrieval.collections.writer import WriterState
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER, EmbedderLocation, load_embedder
from runtime.retrieval.search.async_client import AsyncSearchClient
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.stores.catalogue import Catalogue
from runtime.retrieval.stores.configured import ConfiguredCollections
from runtime.retrieval.stores.responses import ResponseStore
from runtime.retrieval.stores.service import Stores
from runtime.retrieval.writer_service import WriterService
from runtime.serving.frontend.answer_cache import AnswerCache
from runtime.serving.frontend.engine import Engine
from runtime.serving.frontend.observability import RequestMetrics, exported_spans
from runtime.serving.http.admission import Admission
from runtime.serving.http.app import TRACES, create_app
from runtime.serving.http.connections import HttpConfig
from runtime.serving.http.forwarding import Forwarder, answering_or_forwarding, asking_others
from runtime.serving.http.middleware import id_source
from runtime.serving.http.readiness import Readiness
from runtime.serving.http.request_context import RequestContextMiddleware
from runtime.serving.http.response_memory import ResponseMemory
from runtime.serving.http.routes.tokenize import Tokens
from runtime.serving.http.search_parts import SearchParts
from runtime.serving.http.server import (
    HEARTBEAT_S,
    Server,
    connections_with_files,
    private_limits,
    run_process,
    serve_beside,
)
from runtime.serving.http.service import Collections, Service, missing_roles
from runtime.serving.model.model_info import model_directory
from runtime.serving.stages import observe_search

if TYPE_CHECKING:
    from runtime.serving.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_READY_POLL_S = 0.01
_REPORT_S = 2.0  # interval of the collections' metrics
_FINAL_ERRORS_S = 1.0  # before the drain timeout, to send errors to the remaining clients


async def _metrics_text(supervisor: str) -> str:
    return (await asyncio.to_thread(admin_request, supervisor, "metrics")).decode()


async def _store_drain(supervisor: str, wanted: bool) -> None:
    """Store the node's drain state in its supervisor. Raises Unavailable."""
    await asyncio.to_thread(admin_request, supervisor, "draining on" if wanted else "draining off")


EngineFactory = Callable[[Worker, RequestMetrics, Collections], Awaitable[Engine]]


async def _serve(worker: Worker, make_engine: EngineFactory) -> None:
    plan, config = worker.plan, worker.plan.config
    owner = worker.placement.role == "frontend"  # of what has state
    metrics = RequestMetrics(worker.table, config.slo)
    parts = SearchParts.open(worker)
    registry, search = parts.registry, parts.search
    engine = await make_engine(worker, metrics, parts.collections)
    keys = read_api_keys(config)
    settings = parts.settings(plan, keys)
    spans = exported_spans(config.node.name, settings.model, os.environ)
    engine.traces.spans = spans
    supervisor = plan.endpoint("control")
    readiness = Readiness(min(config.http.drain_notice_s, config.node.drain_s / 2))
    numbered, suffix = id_source(worker.epoch), "" if owner else f"-{worker.name}"  # unique within the node

    def new_id(path: str) -> str:
        return numbered(path) + suffix

    tokens = Tokens(partial(_tokenizer, config.own_model.name)) if config.own_model else None
    writes = None
    if search is not None and owner:
        places = {collection.name: Path(collection.path) for collection in config.searchable}
        writes = WriterService(
            places,
            search.embed,
            registry.embedder,
            partial(worker.table.observe, FrontendMetrics.WRITE_TIME),
        )
    stores = None
    path = Path(config.stores.path) if config.stores.path and owner else None
    catalogue = Catalogue(path and path / "catalogue.sqlite")
    if writes is not None and path is not None:
        configured = ConfiguredCollections([one.name for one in config.collections], registry.current)
        stores = Stores(config.stores, catalogue, writes, registry.embedder, configured)
    answers = client = None
    if config.stores_answers and owner:
        client = search.client if search else AsyncSearchClient(SearchClient.of_plan(plan, worker.name))
        answers = _open_answer_cache(worker, client)
    service = Service(
        engine, parts.collections, partial(_metrics_text, supervisor), answers, tokens, parts.reranking, writes, stores,
        ResponseStore(catalogue), readiness, partial(_store_drain, supervisor) if owner else None,
        metrics.record_response, partial(observe_search, worker.table),
    )  # fmt: skip
    own_app = create_app(service, settings, new_id)
    if owner:
        others = [Forwarder(plan.http_socket(one.name), one.name) for one in plan.of_role("http")]
        app = asking_others(own_app, others, TRACES)
    else:
        others, refusals = [Forwarder(plan.http_socket("frontend-0"), "the frontend")], ResponseMemory()

        def refuse(refusal: ASGIApp) -> ASGIApp:
            return RequestContextMiddleware(
                refusal, new_id, lambda: readiness.draining, metrics.record_response, refusals
            )

        count = partial(worker.table.add, FrontendMetrics.FORWARDED)
        app = answering_or_forwarding(own_app, others[0], own_app.limits, refuse, count)
    connections = connections_with_files(config.http)

    def on_refused(path: str, status: int) -> None:
        metrics.record_response(path, status, 0.0)

    admission = Admission(own_app.limits, lambda: readiness.draining)
    http = HttpConfig(app, config.http, new_id, config.node.drain_s, on_refused, admission, connections=connections)
    servers = [Server(http, worker.listening_socket(), lambda: None if owner else _record_closed(worker))]
    if others:
        private = worker.private_socket() if owner else listen_private(plan.http_socket(worker.name))
        limits, answers_here = private_limits(config.http), app if owner else own_app
        http = HttpConfig(answers_here, limits, new_id, config.node.drain_s, on_refused, admission)
        servers.append(Server(http, private))

    async def serve() -> None:
        if answers is not None:
            await answers.maintain()
        if worker.epoch > 1:
            await _wait_for_workers(worker, lambda: missing_roles(service, settings))
        worker.ready()
        await asyncio.gather(*(server.accept() for server in servers))

    loops = [_heartbeat(worker, engine, servers, readiness, search, answers)]
    if writes is not None:
        loops.append(_report_collections(worker.table, writes))
    running: Sequence[Any] = [engine, stores, search or client, answers]
    loops += [part.run() for part in running if part is not None]
    open_parts: Sequence[Any] = [*others, engine, catalogue, parts.reranking, writes, answers, spans]
    try:
        await serve_beside(serve(), loops)
    finally:
        for part in open_parts:
            if part is not None:
                part.close()


def _record_closed(worker: Worker) -> None:
    """An HTTP worker accepts no connections any more, and still passes on requests."""
    worker.table.state = State.CLOSED


async def _wait_for_workers(worker: Worker, missing: Callable[[], list[str]]) -> None:
    """Accept no connection in a restarted frontend until it knows a worker of each role.

    Meanwhile connections wait in the listening socket's backlog, where they have been since the last frontend ended.
    After `config.restart_wait_s` they are accepted regardless, and requests for a missing role are refused.
    """
    config = worker.plan.config
    until = time.monotonic() + min(config.restart_wait_s, config.node.start_s / 2)
    while (still_missing := missing()) and not worker.stopping and time.monotonic() < until:
        await asyncio.sleep(_READY_POLL_S)
    if still_missing:
        log.warning("accepting connections without a worker of each role; missing: %s", ", ".join(still_missing))


def _tokenizer(model: str) -> "Tokenizer":
    from runtime.serving.model.tokenizer import Tokenizer  # loaded on first use

    return Tokenizer.load(model_directory(model))


def _open_answer_cache(worker: Worker, client: AsyncSearchClient) -> AnswerCache:
    """Return the answer cache. Raises ModelError for an unknown embedder."""
    limits = worker.plan.config.answer_cache
    embedder = load_embedder(DEFAULT_EMBEDDER, location=EmbedderLocation(device=worker.placement.embedder))

    def count(event: CacheEvent, times: int) -> None:
        worker.table.add(FrontendMetrics.ANSWER_CACHE[event], times)

    return AnswerCache(AnswerStore(worker.plan.answers, embedder.dim, limits, count), embedder, client)


def report_collections(table: WorkerTable, writers: Mapping[str, WriterState]) -> None:
    """Set the metrics of collections: sums over those open for writing."""
    states = list(writers.values())
    table.set(FrontendMetrics.COLLECTION_DOCUMENTS, sum(state.documents for state in states))
    table.set(FrontendMetrics.COLLECTION_SEGMENTS, sum(state.segments for state in states))
    table.set(FrontendMetrics.COLLECTION_GROWING, sum(state.growing for state in states))
    table.set(FrontendMetrics.COLLECTION_TOMBSTONES, sum(state.tombstones for state in states))
    table.set(FrontendMetrics.COLLECTION_LOG_BYTES, sum(state.log_bytes for state in states))
    table.set(FrontendMetrics.COLLECTION_BUILDING, sum(state.building for state in states))
    table.total(FrontendMetrics.COLLECTION_SEALED, sum(state.sealed for state in states))
    table.total(FrontendMetrics.COLLECTION_MERGED, sum(state.merged for state in states))


async def _report_collections(table: WorkerTable, writes: WriterService) -> None:
    while True:
        report_collections(table, await writes.states())
        await asyncio.sleep(_REPORT_S)


async def _heartbeat(
    worker: Worker,
    engine: Engine,
    servers: Sequence[Server],
    readiness: Readiness,
    search: AsyncRetriever | None,
    answers: AnswerCache | None,
) -> None:
    """Write the heartbeat and metrics, follow new builds, and end the servers when the worker stops.

    The state DRAINING means, before it stops, that who watches /health has noticed the node's drain.
    """
    drain_s = worker.plan.config.node.drain_s
    drain_s -= min(_FINAL_ERRORS_S, drain_s / 2)
    stopping_at: float | None = None
    follower = None
    if search is not None:
        follower = BuildFollower(search.registry, search.client.identities, worker.table, search.report)
    while True:
        worker.table.beat()
        if follower is not None:
            follower.step(time.monotonic_ns())
        node_stops = worker.stopping and not worker.awaits_release  # otherwise a successor takes over
        readiness.drain(node_stops or worker.table.knob("draining") >= 1)
        if not worker.stopping and worker.table.state is not State.STARTING:
            worker.table.state = State.DRAINING if readiness.notice_elapsed else State.READY
        if worker.stopping:
            if answers is not None:  # so that a successor may write
                answers.close()
            for server in servers:
                server.should_exit = server.should_exit or readiness.notice_elapsed or not node_stops
        others_stop = worker.table.knob("draining") == NODE_STOPS  # HTTP workers, which do first
        if node_stops or others_stop:
            engine.expect_no_worker()
        if worker.stopping or others_stop:
            stopping_at = stopping_at or time.monotonic()
        if stopping_at is not None and time.monotonic() > stopping_at + drain_s:
            # The supervisor kills it soon: end the rest with an error.
            engine.end_all(Unavailable("the node stopped before the answer was complete"))
        worker.table.set(FrontendMetrics.IN_FLIGHT, len(engine.requests))
        worker.table.total(FrontendMetrics.RESTARTED, engine.restarts)
        worker.table.total(FrontendMetrics.MALFORMED, engine.malformed)
        await asyncio.sleep(HEARTBEAT_S)


def run(worker: Worker, make_engine: EngineFactory) -> None:
    """Serve until stopped, then finish the requests in flight, within the supervisor's drain timeout."""
    run_process(_serve(worker, make_engine))
