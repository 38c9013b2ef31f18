"""Frontend process: an HTTP server that submits requests to the engine and streams the answers. Its loop is
asyncio's."""

import asyncio
import contextlib
import logging
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from runtime.errors import Unavailable
from runtime.node.api_keys import read_api_keys
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import CacheEvent, FrontendMetrics
from runtime.node.placement.plan import NodePlan
from runtime.node.stores_config import STORES
from runtime.node.supervisor.admin import admin_request
from runtime.node.worker import Worker
from runtime.retrieval.answer_store import AnswerStore
from runtime.retrieval.async_retriever import AsyncRetriever
from runtime.retrieval.build_follower import BuildFollower
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collections.writer import WriterState
from runtime.retrieval.embedding.loading import EmbedderLocation, load_embedder
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.search.async_client import AsyncSearchClient
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.stores.catalogue import Catalogue
from runtime.retrieval.stores.responses import ResponseStore
from runtime.retrieval.stores.service import Stores
from runtime.retrieval.writer_service import WriterService
from runtime.serving.frontend.answer_cache import AnswerCache
from runtime.serving.frontend.engine import Engine
from runtime.serving.frontend.observability import RequestMetrics
from runtime.serving.http.access import access_by_key
from runtime.serving.http.app import create_app
from runtime.serving.http.connections import HttpConfig
from runtime.serving.http.middleware import id_source
from runtime.serving.http.ranking import Ranker
from runtime.serving.http.reranked_search import RerankedSearch
from runtime.serving.http.routes.drain import Readiness
from runtime.serving.http.routes.tokenize import Tokens
from runtime.serving.http.service import NoCollections, SearchSource, Service, Settings, missing_roles
from runtime.serving.model.model_info import ModelInfo, model_directory
from runtime.serving.stages import observe_search

if TYPE_CHECKING:
    from runtime.serving.frontend.spans import RequestSpans
    from runtime.serving.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_EXPORTERS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's variables that name a collector."""
_HEARTBEAT_S = 0.1
_SWITCH_S = 0.0005  # how long a thread keeps the interpreter's lock when the event loop wants it
_READY_POLL_S = 0.01
_REPORT_S = 2.0  # interval of the collections' metrics
_FINAL_ERRORS_S = 1.0  # before the drain timeout, to send errors to the remaining clients
_LATE = 10  # times `slo.search_s`: a text that would wait longer for its embedding is refused
_COMPUTING_THREADS = 8  # of one interpreter: a batch holds its lock for a tenth of its time
_RESERVED_DESCRIPTORS = 256  # besides connections: sockets to workers, shared memory, files


def computing_threads(plan: NodePlan) -> int:
    """Return how many threads embed in the frontend, and how many rerank: as many as there are cores that no model
    worker computes on."""
    on_cpu = [worker for worker in plan.workers if not worker.gpu or worker.only_embeds_on_gpu]
    models = sum(worker.threads for worker in on_cpu if worker.role in ("prefill", "decode"))
    return min(max(len(os.sched_getaffinity(0)) - models, 1), _COMPUTING_THREADS)


class SupervisorLink:
    """Requests of the frontend to its supervisor."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def metrics_text(self) -> str:
        return (await asyncio.to_thread(admin_request, self._endpoint, "metrics")).decode()

    async def drain(self, wanted: bool) -> None:
        """Store the node's drain state. Raises Unavailable."""
        await asyncio.to_thread(admin_request, self._endpoint, "draining on" if wanted else "draining off")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the worker has its own, and `_heartbeat` ends the server."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


class _Public(Mapping[str, int]):
    """Collections by name, without the node's own."""

    def __init__(self, collections: Mapping[str, int]) -> None:
        self._collections = collections
        self._names = tuple(name for name in collections if name != STORES)  # the mapping's keys never change

    def __getitem__(self, name: str) -> int:
        if name == STORES:
            raise KeyError(name)
        return self._collections[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


EngineFactory = Callable[[Worker, RequestMetrics, SearchSource], Awaitable[Engine]]


async def _serve(worker: Worker, make_engine: EngineFactory) -> None:
    plan = worker.plan
    config = plan.config
    metrics = RequestMetrics(worker.table, config.slo)
    registry = CollectionRegistry(plan, in_background=True, device=worker.placement.embedder)
    reranking = Reranking.of_plan(plan, Reranking.load(plan), worker.table, computing_threads(plan))
    worker.startup.mark("embedder")
    search = None
    if config.searchable:
        search = AsyncRetriever(
            registry,
            SearchClient.of_plan(plan, worker.name),
            threads=computing_threads(plan),
            max_wait_s=_LATE * plan.config.slo.search_s,
        )
    collections = search or NoCollections()
    source = collections if reranking is None else RerankedSearch(collections, reranking)
    engine = await make_engine(worker, metrics, source)
    own, served = config.own_model, config.model
    model = ModelInfo.read(own.name).name if own else served.name if served else ""
    spans = exported_spans(config.node.name, model, os.environ)
    engine.traces.spans = spans
    keys = read_api_keys(config)
    settings = Settings(
        model=model,
        context_tokens=served.context_tokens if served else 0,
        collections=_Public(registry.dims),
        host=config.http.host,
        api_keys=tuple(one.key for one in keys),
        access=access_by_key(keys),
        open_paths=config.http.open_paths,
        cors_origins=config.http.cors_origins,
        max_k=plan.max_k,
        probes=config.probes,
        ranker=Ranker("" if reranking is None else reranking.name, config.rerank.timeout_s),
        default_max_tokens=min(256, own.context_tokens // 4) if own else 256,
        request_timeout_s=config.http.request_timeout_s,
    )
    supervisor = SupervisorLink(plan.endpoint("control"))
    readiness = Readiness(min(config.http.drain_notice_s, config.node.drain_s / 2))
    new_id = id_source(worker.epoch)
    tokens = Tokens(partial(_tokenizer, own.name)) if own else None
    writes = None
    if search is not None:
        places = {collection.name: Path(collection.path) for collection in config.searchable}
        writes = WriterService(
            places,
            search.embed,
            registry.embedder,
            partial(worker.table.observe, FrontendMetrics.WRITE_TIME),
        )
    stores = None
    path = Path(config.stores.path) if config.stores.path else None
    catalogue = Catalogue(path and path / "catalogue.sqlite")
    if writes is not None and path is not None:
        stores = Stores(config.stores, catalogue, writes, partial(registry.embedder, STORES))
    answers = None
    if config.stores_answers:
        client = search.client if search else AsyncSearchClient(SearchClient.of_plan(plan, worker.name))
        answers = _open_answer_cache(worker, client)
    service = Service(
        engine, source, supervisor.metrics_text, answers, tokens, collections, reranking, writes, stores,
        ResponseStore(catalogue), readiness, supervisor.drain, metrics.record_response,
        partial(observe_search, worker.table),
    )  # fmt: skip
    app = create_app(service, settings, new_id)
    _raise_descriptor_limit(config.http.max_connections)

    def on_refused(status: int) -> None:
        metrics.record_response("", status, 0.0)

    http = HttpConfig(app, config.http, new_id, config.node.drain_s, on_refused)
    server = _Server(http)

    async def serve() -> None:
        if answers is not None:
            await answers.maintain()
        if worker.epoch > 1:
            await _wait_for_workers(worker, lambda: missing_roles(service, settings))
        worker.ready()
        await server.serve(sockets=[worker.listening_socket()])

    serving = asyncio.create_task(serve())
    loops = [
        asyncio.create_task(engine.run()),
        asyncio.create_task(_heartbeat(worker, engine, server, readiness, search, answers)),
    ]
    if writes is not None:
        loops.append(asyncio.create_task(_report_collections(worker.table, writes)))
    if stores is not None:
        loops.append(asyncio.create_task(stores.run()))
    if search is not None:
        loops.append(asyncio.create_task(search.run()))
    elif answers is not None:
        loops.append(asyncio.create_task(client.run()))
    if answers is not None:
        loops.append(asyncio.create_task(answers.run()))
    try:
        # No loop ends by itself: if one does, it has failed, and the process must end.
        done, _ = await asyncio.wait([serving, *loops], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        engine.close()
        catalogue.close()
        if reranking is not None:
            reranking.close()
        if writes is not None:
            writes.close()
        if answers is not None:
            answers.close()
        if spans is not None:
            spans.close()


async def _wait_for_workers(worker: Worker, missing: Callable[[], list[str]]) -> None:
    """Accept no connection in a restarted frontend until it knows a worker of each role.

    Meanwhile connections wait in the listening socket's backlog, where they have been since the last frontend ended.
    After `restart_wait_s` they are accepted regardless, and requests for a missing role are refused.
    """
    config = worker.plan.config
    until = time.monotonic() + min(config.http.restart_wait_s, config.node.start_s / 2)
    still_missing = await wait_until_ready(missing, lambda: worker.stopping or time.monotonic() >= until)
    if still_missing:
        log.warning("accepting connections without a worker of each role; missing: %s", ", ".join(still_missing))


async def wait_until_ready(missing: Callable[[], list[str]], give_up: Callable[[], bool]) -> list[str]:
    """Wait until nothing is missing or `give_up` returns true; return what is still missing."""
    while (still_missing := missing()) and not give_up():
        await asyncio.sleep(_READY_POLL_S)
    return still_missing


def _raise_descriptor_limit(connections: int) -> None:
    """Raise the limit of open files to what so many connections need, up to the process's hard limit."""
    wanted = connections + _RESERVED_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            log.warning("http.max_connections = %d, but only %d files may be open", connections, soft)


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


def _tokenizer(model: str) -> "Tokenizer":
    from runtime.serving.model.tokenizer import Tokenizer  # loaded on first use

    return Tokenizer.load(model_directory(model))


def _open_answer_cache(worker: Worker, client: AsyncSearchClient) -> AnswerCache:
    """Return the answer cache. Raises ModelError for an unknown embedder."""
    limits = worker.plan.config.answer_cache
    embedder = load_embedder(limits.embedder, location=EmbedderLocation(device=worker.placement.embedder))

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
    server: _Server,
    readiness: Readiness,
    search: AsyncRetriever | None,
    answers: AnswerCache | None,
) -> None:
    """Write the heartbeat and metrics, follow new builds, and end the server when the worker stops."""
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
        readiness.drain(node_stops or worker.table.knob("draining") == 1)
        if worker.stopping:
            if answers is not None:  # so that a successor may write
                answers.close()
            server.should_exit = server.should_exit or readiness.notice_elapsed or not node_stops
            stopping_at = stopping_at or time.monotonic()
            if time.monotonic() > stopping_at + drain_s:  # the supervisor kills it soon: end the rest with an error
                engine.end_all(Unavailable("the node stopped before the answer was complete"))
        statistics = engine.statistics()
        worker.table.set(FrontendMetrics.IN_FLIGHT, statistics.in_flight)
        worker.table.total(FrontendMetrics.RESTARTED, statistics.restarts)
        worker.table.total(FrontendMetrics.MALFORMED, statistics.malformed)
        await asyncio.sleep(_HEARTBEAT_S)


def run(worker: Worker, make_engine: EngineFactory) -> None:
    """Serve until stopped, then finish the requests in flight, within the supervisor's drain timeout."""
    sys.setswitchinterval(_SWITCH_S)
    uvloop.run(_serve(worker, make_engine))
