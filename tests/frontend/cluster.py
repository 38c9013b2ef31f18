"""A frontend over fake workers (`fake_workers.py`): link, routes and uvicorn on a loopback port, in its own thread."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import openai
import uvicorn
import uvloop
from starlette.types import ASGIApp

from runtime.node.config import HttpSection
from runtime.node.supervisor.listen import listen_private
from runtime.retrieval.async_retriever import run_steps, wait_until
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors
from runtime.retrieval.passages import FoundPassages, OnRead, Passage
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.retrieval_steps import RetrievalResult, Until
from runtime.retrieval.search.query import Query
from runtime.retrieval.stores.responses import ResponseStore
from runtime.retrieval.stores.service import Stores
from runtime.retrieval.writer_service import WriterService
from runtime.serving.frontend.answer_cache import AnswerCache
from runtime.serving.frontend.requests import RequestOutcome
from runtime.serving.frontend.router import Router
from runtime.serving.frontend.worker_link import WorkerLink
from runtime.serving.http.admission import Admission
from runtime.serving.http.app import create_app
from runtime.serving.http.connections import HttpConfig, Timeouts
from runtime.serving.http.forwarding import Forwarder, answering_or_forwarding
from runtime.serving.http.middleware import id_source
from runtime.serving.http.readiness import Readiness
from runtime.serving.http.request_context import RequestContextMiddleware
from runtime.serving.http.response_memory import ResponseMemory
from runtime.serving.http.server import private_limits
from runtime.serving.http.service import Collections, NoCollections, Service, Settings
from runtime.serving.messages import Role
from runtime.testing.waiting import until
from tests.clock import Clock
from tests.frontend.fake_workers import PASSAGES, WAIT, ScriptedWorker, unique_endpoint


class Reranked:
    """A search whose passages are reranked as those of an `AsyncRetriever`."""

    def __init__(self, source: Any, reranking: Reranking) -> None:
        self._source, self._reranking = source, reranking

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    async def search(self, query: Query, **options: Any) -> FoundPassages:
        def retrieve(asked: Query) -> Generator[Any, Any, RetrievalResult]:
            found = FoundPassages.of((yield self._source.search(asked, **options)))
            return RetrievalResult(0, tuple(found), times=found.times)

        async def outcome(step: Any) -> Any:
            return await (wait_until(step) if isinstance(step, Until) else step)

        ended = await run_steps(self._reranking.retrieve(query, retrieve), outcome)
        return FoundPassages(ended.passages, ranking=ended.ranking, times=ended.times)


class FakeSearch(NoCollections):
    """Collections in which each search finds `found`, or raises `error` if a test sets it. about, opened: of each."""

    def __init__(
        self,
        found: Sequence[Passage] = PASSAGES,
        about: CollectionSummary | None = None,
        opened: CollectionDocuments | None = None,
    ) -> None:
        self.found, self.about, self.opened = found, about, opened
        self.calls: list[Query] = []
        self.error: Exception | None = None
        self.hangs, self.running = False, 0
        self.timeout_s = 0.0
        self.unavailable_collections: dict[str, str] = {}

    def unavailable(self) -> dict[str, str]:
        return self.unavailable_collections

    async def search(  # type: ignore[override]
        self, query: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> list[Passage]:
        on_embedded()
        self.calls.append(query)
        self.timeout_s = timeout_s
        await self._outcome()
        return self.passages(query, on_read)

    def passages(self, query: Query, on_read: OnRead) -> list[Passage]:
        """Return what a query finds."""
        return list(self.found[: query.spec.k])

    def summary(self, collection: str) -> CollectionSummary:
        return self.about or super().summary(collection)

    def documents(self, collection: str) -> CollectionDocuments:
        return self.opened or super().documents(collection)

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind, flow: int) -> tuple[Vectors, int]:
        await self._outcome()
        return embedder.embed(texts, kind), sum(map(embedder.count_tokens, texts))

    async def _outcome(self) -> None:
        self.running += 1
        try:
            while self.hangs:
                await asyncio.sleep(0.005)
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error


async def metrics() -> str:
    """Return one metric."""
    return "# HELP trinity_up one\ntrinity_up 1\n"


class _Server(uvicorn.Server):
    """uvicorn that stops at once when `stop` is set and its connections have ended; its own loops poll ten times a
    second."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.001)
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


class Cluster:
    """A frontend on a loopback port with `prefills` and `decodes` scripted workers, in a thread; a context manager."""

    def __init__(
        self,
        *,
        prefills: int = 1,
        decodes: int = 1,
        max_in_flight: int = 64,
        settings: Settings | None = None,
        answers: AnswerCache | None = None,
        search: Collections | None = None,
        writes: WriterService | None = None,
        stores: Stores | None = None,
        responses: ResponseStore | None = None,
        reranking: Reranking | None = None,
        limits: HttpSection = HttpSection(),  # noqa: B008
        timeouts: Timeouts = Timeouts(),  # noqa: B008
        readiness: Readiness | None = None,
        send_buffer: int = 0,
        private: Path | None = None,
    ) -> None:
        """private: of the frontend's private socket; clients then talk to an HTTP worker, in the same thread, which
        passes everything on, as it may search nothing itself."""
        self._answers = answers
        self._writes, self._stores = writes, stores
        self._responses, self._reranking = responses, reranking
        self.limits, self.timeouts = limits, timeouts
        self.readiness = readiness or Readiness()
        self.drain_requests: list[bool] = []  # what the supervisor would receive
        self.settings = settings or Settings(model="tiny", collections={"docs": 4})
        self.clock = Clock()
        self.search: Any = search or FakeSearch()
        self.players: dict[str, ScriptedWorker] = {}
        self.ended: list[RequestOutcome] = []
        self._counts: dict[Role, int] = {"prefill": prefills, "decode": decodes}
        self._max_in_flight = max_in_flight
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self._failure: BaseException | None = None
        self.link: WorkerLink
        self._private = None if private is None else str(private)
        self._socket = socket.create_server(("127.0.0.1", 0))
        if send_buffer:  # of the kernel, for each connection
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="cluster")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(WAIT)
        if self._failure is not None:
            raise self._failure
        self.wait(lambda: not any(role in self.link.missing() for role, count in self._counts.items() if count))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        if self._failure is not None and error is None:
            raise self._failure

    # ---- for tests

    def http(self, **options: Any) -> httpx.Client:
        """A client that loads no certificates, which takes 27 ms: there is no TLS. The others do not either."""
        headers = {"content-type": "application/json"}
        return httpx.Client(base_url=self.url, timeout=WAIT, trust_env=False, headers=headers, verify=False, **options)

    def client(self, key: str = "none") -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False, timeout=WAIT)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT, http_client=http)

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=False, timeout=WAIT)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT, http_client=http)

    def connect(self) -> socket.socket:
        """Return a connection to the port."""
        return socket.create_connection(self._socket.getsockname(), WAIT)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, in the frontend's thread."""
        until(lambda: self.on_loop(condition), within_s=WAIT)

    def on_loop(self, act: Callable[[], Any]) -> Any:
        """Call a function in the frontend's thread."""

        async def acting() -> Any:
            return act()

        return asyncio.run_coroutine_threadsafe(acting(), self._loop).result(WAIT)

    @property
    def connections(self) -> int:
        """Number of open HTTP connections."""
        return self._http.peers.total()

    def held(self) -> list[str]:
        """Return the requests that any worker, the link or the router still holds."""
        held = [f"{player.me.worker}:{request}" for player in self.players.values() for request in player.held]
        return held + ["link"] * len(self.link.requests) + ["router"] * self.link.router.in_flight

    # ---- the thread

    def _run(self) -> None:
        try:
            uvloop.run(self._main())  # the loop of the frontend's process
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        router = Router(max_in_flight=self._max_in_flight)
        self.link = WorkerLink(
            unique_endpoint(), router, epoch=77, clock=self.clock, on_end=self.ended.append, keep_traces=8
        )
        new_id = id_source(77)
        search: Any = Reranked(self.search, self._reranking) if self._reranking else self.search
        service = Service(
            self.link, search, metrics, self._answers, writes=self._writes, stores=self._stores,
            reranking=self._reranking, responses=self._responses, readiness=self.readiness,
            drain=self._drain,
        )  # fmt: skip
        app: ASGIApp = (own := create_app(service, self.settings, new_id))
        admission = Admission(own.limits, lambda: self.readiness.draining)
        accepting, closing = [], [self.link.close]
        if self._private is not None:
            limits = private_limits(self.limits)
            frontend = HttpConfig(app, limits, new_id, drain_s=1, admission=admission, timeouts=self.timeouts)
            accepting.append(_Server(frontend, self._stop).serve(sockets=[listen_private(self._private)]))
            forward = Forwarder(self._private, "the frontend")
            closing.append(forward.close)
            app, admission = self._http_worker(forward, new_id), Admission({})
        self._http = HttpConfig(app, self.limits, new_id, drain_s=1, admission=admission, timeouts=self.timeouts)
        server = _Server(self._http, self._stop)
        self.protocols = server.server_state.connections
        accepting.append(server.serve(sockets=[self._socket]))
        for role, name in self._worker_names():
            self.players[name] = ScriptedWorker(self, role, name)
            self._tasks[name] = asyncio.create_task(self.players[name].serve())
        link = asyncio.create_task(self.link.run())
        storing = [] if self._stores is None else [asyncio.create_task(self._stores.run())]
        self._ready.set()
        await asyncio.gather(*accepting)
        others = [link, *storing, *self._tasks.values()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for close in closing:
            close()

    def _http_worker(self, forward: Forwarder, new_id: Callable[[str], str]) -> ASGIApp:
        def with_id(refusal: ASGIApp) -> ASGIApp:
            return RequestContextMiddleware(refusal, new_id, lambda: False, lambda *response: None, ResponseMemory())

        return answering_or_forwarding(forward, forward, (), with_id, lambda: None)

    async def _drain(self, wanted: bool) -> None:
        self.drain_requests.append(wanted)

    def _worker_names(self) -> Iterator[tuple[Role, str]]:
        for role, count in self._counts.items():
            for number in range(count):
                yield role, f"{role}-{number}"
