"""An `OpenAiEngine` over fake servers and a fake search, in one event loop."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs

from runtime.engines.openai.capabilities import detect_capabilities
from runtime.engines.openai.engine import OpenAiEngine
from runtime.engines.openai.http import Http
from runtime.engines.openai.load_balancer import LoadBalancer
from runtime.engines.openai.server import Server
from runtime.errors import (
    TrinityError,
)
from runtime.node.engine_config import OpenAiSection, ServedSection, Stage
from runtime.node.metrics.table import WorkerTable
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.passages import NO_TIMES, FoundPassages, OnRead, Passage
from runtime.retrieval.search.query import Query
from runtime.serving.frontend.engine import RestartLimits
from runtime.serving.frontend.requests import Request, RequestOutcome
from runtime.serving.http.service import NoCollections
from runtime.serving.messages import Generation, Message, Retrieval, Retrieved, Sampling, Tokens
from tests.clock import Clock
from tests.engines.fake_openai import MODEL, URL, Behaviour, FakeServer
from tests.engines.fake_vllm import HttpFront

Json = dict[str, Any]


class FakeSearch(NoCollections):
    """A search that returns new passages on every call unless a test configures it otherwise."""

    def __init__(self) -> None:
        self.calls: list[tuple[Query, float]] = []
        self.error: TrinityError | None = None
        self.hangs = self.same = False
        self.long = 0  # bytes of padding per passage
        self.texts: Sequence[str] = ()  # of the passages, in place of numbers
        self.ranking, self.times = "", NO_TIMES
        self._count = itertools.count(1)

    async def search(  # type: ignore[override]
        self, query: Query, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
    ) -> list[Passage]:
        on_embedded()
        self.calls.append((query, timeout_s))
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        number = 1 if self.same else next(self._count)
        names = [f"{number}.{k}" for k in range(query.spec.k)]
        texts = self.texts or [f"passage {one}." + "x" * self.long for one in names]
        found = [Passage(f"p{one}", f"T{one}", 0.1, text) for one, text in zip(names, texts, strict=False)]
        return FoundPassages(found, ranking=self.ranking, times=self.times)

    def summary(self, collection: str) -> CollectionSummary:
        return CollectionSummary(True, metric="cosine")


@dataclass
class EngineHarness:
    """The engine, its fake servers and the outcomes of its requests."""

    engine: OpenAiEngine
    fakes: list[FakeServer]
    library: FakeSearch
    clock: Clock
    ended: list[RequestOutcome] = field(default_factory=list)
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def fake(self) -> FakeServer:
        return self.fakes[0]

    def chat(self, text: str = "What is a decorator?", retrieval: Retrieval | None = None, **body: Any) -> Request:
        """Submit a chat."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}]} | body
        turns = (Message(turn["role"], str(turn["content"])) for turn in body["messages"])
        return self.submit(body, messages=tuple(turns), retrieval=retrieval)

    def complete(self, prompt: str | list[int], retrieval: Retrieval | None = None, **body: Any) -> Request:
        """Submit a completion."""
        body = {"model": MODEL, "prompt": prompt} | body
        tokens = prompt if isinstance(prompt, str) else tuple(prompt)
        return self.submit(body, prompt=tokens, retrieval=retrieval)

    def submit(self, body: Json, **options: Any) -> Request:
        stop = body.get("stop") or []
        now = self.clock()
        sampling = Sampling(body.get("max_tokens", 16), stop=tuple([stop] if isinstance(stop, str) else stop))
        generation = Generation(sampling, now, now + 60_000_000_000, **options)
        return self.engine.submit(f"request-{next(self._ids)}", generation, sent=body)


@asynccontextmanager
async def running_engine(
    *behaviours: Behaviour,
    restarts: RestartLimits = RestartLimits(3, 0),  # noqa: B008
    max_in_flight: int = 64,
    reach: bool = True,
    sockets: Path | None = None,
    stages: Sequence[Stage] = (),
    handover_tokens: int | Literal["auto"] = "auto",
    overlap_weight: float = 1.0,
    table: WorkerTable | None = None,
    served: ServedSection | None = None,
    **section: Any,
) -> AsyncIterator[EngineHarness]:
    """Run an engine over one fake server per behaviour; with `sockets`, over HTTP at Unix sockets in that directory.

    `stages`: the stage of each server. `served`: the configuration, by default of servers that run already.
    """
    wanted = behaviours or (Behaviour(),)
    fakes = [FakeServer(replace(behaviour, breaks_after=None, hangs_after=None, refuses=None)) for behaviour in wanted]
    urls = tuple(f"{URL.replace('fake', f'fake{number}')}" for number in range(len(fakes)))
    settings = served or structs.replace(OpenAiSection(name=MODEL, url=urls), **section)
    clock, library, ended = Clock(), FakeSearch(), list[RequestOutcome]()
    listening: list[asyncio.Server] = []
    networks: list[Http] = []
    for fake in fakes:
        if sockets is None:
            networks.append(fake)
            continue
        path = str(sockets / f"{len(listening)}.sock")
        listening.append(await asyncio.start_unix_server(HttpFront(fake).connected, path))
        networks.append(Http(path))
    everything: list[Stage] = [""] * len(urls)
    servers = LoadBalancer(
        [
            Server(url, http=http, stage=stage)
            for url, http, stage in zip(urls, networks, stages or everything, strict=True)
        ],
        partial(detect_capabilities, section=settings),
        clock,
        overlap_weight=overlap_weight,
    )
    if reach:
        await servers.check_all()
    for fake, behaviour in zip(fakes, wanted, strict=True):
        fake.asked.clear()
        fake.behaviour = replace(behaviour)  # faults begin after the capability check
    engine = OpenAiEngine(
        servers, settings, library, epoch=7, max_in_flight=max_in_flight, restarts=restarts, clock=clock,
        on_end=ended.append, keep_traces=8, handover_tokens=handover_tokens, table=table,
    )  # fmt: skip
    try:
        async with running(engine):
            yield EngineHarness(engine, fakes, library, clock, ended)
    finally:
        for server in listening:
            server.close()
        if listening:
            await until(lambda: all(fake.open == 0 for fake in fakes))


@asynccontextmanager
async def running(engine: OpenAiEngine) -> AsyncIterator[None]:
    """Run an engine's loop."""
    loop = asyncio.create_task(engine.run())
    await asyncio.sleep(0)  # let it start, so that cancelling reaches its cleanup
    try:
        yield
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


@dataclass
class Answer:
    """All pieces of an answer."""

    pieces: list[Retrieved | Tokens]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Tokens))

    @property
    def ids(self) -> list[int]:
        return [token for piece in self.pieces if isinstance(piece, Tokens) for token in piece.token_ids]

    @property
    def searches(self) -> list[Retrieved]:
        return [piece for piece in self.pieces if isinstance(piece, Retrieved)]

    @property
    def last(self) -> Tokens:
        last = self.pieces[-1]
        assert isinstance(last, Tokens)
        return last


async def read_answer(request: Request) -> Answer:
    """Return all pieces of a request; raise the error that ended it."""
    pieces: list[Retrieved | Tokens] = []
    while True:
        piece = await request.next()
        pieces.append(piece)
        if isinstance(piece, Tokens) and piece.finish_reason is not None:
            return Answer(pieces)


async def run_checks(balancer: LoadBalancer) -> None:
    """Run the checks of servers that are due, after those that the engine has begun."""
    await until(lambda: not any(backend.checking for backend in balancer.backends))
    await asyncio.gather(*balancer.checks_due())


async def until(condition: Callable[[], object]) -> None:
    """Run the loop until the condition holds (bounded by the test's timeout)."""
    while not condition():
        await asyncio.sleep(0)


def sequence(prompt: Sequence[int], told: Answer) -> list[tuple[list[int], list[int]]]:
    """Return (context, generated tokens) for every stretch of an answer between insertions."""
    stretches: list[tuple[list[int], list[int]]] = []
    before, written = list(prompt), list[int]()
    for piece in told.pieces:
        if isinstance(piece, Tokens):
            written += piece.token_ids
        elif piece.inserted:
            stretches.append((before, written))
            before, written = [*before, *written, *piece.inserted], []
    return [*stretches, (before, written)]


DOCS = Retrieval("docs", 2)


PROBES = Retrieval("docs", 1, every_tokens=8)


SERVER_KINDS = {
    "tokens": Behaviour(),
    "chat": Behaviour(token_ids=False, goes_on=True),
    "text": Behaviour(token_ids=False, renders=True),
}


async def error_of(request: Request) -> TrinityError:
    with pytest.raises(TrinityError) as caught:
        await read_answer(request)
    return caught.value
