"""The engine contract, run against every engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import pytest

from runtime.errors import DeadlineExceeded, Overloaded, Unavailable, WorkerLost
from runtime.serving.frontend.engine import Engine
from runtime.serving.frontend.requests import Request, RequestOutcome
from runtime.serving.frontend.router import Router
from runtime.serving.frontend.worker_link import WorkerLink
from runtime.serving.messages import Generation, Message, Retrieval, Retrieved, Role, Sampling, Tokens
from tests.clock import Clock
from tests.engines.engine_harness import EngineHarness, error_of, read_answer, run_checks, running_engine, until
from tests.engines.fake_openai import Behaviour
from tests.frontend.fake_workers import ScriptedWorker, unique_endpoint

TOKENS = 5
ROLES: tuple[Role, ...] = ("prefill", "decode")


class EngineFixture(Protocol):
    """An engine and control over its backend."""

    engine: Engine
    clock: Clock
    ended: list[RequestOutcome]
    deadline_s: float

    def ask(self, *, retrieval: Retrieval | None = None, hangs: bool = False) -> Request:
        """Submit a chat; with `hangs`, the backend stops responding after its first tokens."""

    def held(self) -> int:
        """Return the number of requests for which the backend still holds state."""

    def tick(self) -> None:
        """Run the engine's periodic work."""

    async def lose(self) -> None:
        """Lose the backend."""

    async def come_back(self) -> None:
        """Restore the backend."""


class TrinityFixture:
    """The link to the node's own workers, over scripted workers."""

    deadline_s = 5.0  # shorter than the worker timeout

    def __init__(self, max_in_flight: int) -> None:
        self.clock, self.ended = Clock(), list[RequestOutcome]()
        self.link = WorkerLink(
            unique_endpoint(),
            Router(max_in_flight=max_in_flight),
            epoch=7,
            clock=self.clock,
            on_end=self.ended.append,
            keep_traces=8,
        )
        self.engine: Engine = self.link
        self.players: dict[str, ScriptedWorker] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self._asked = 0

    def tick(self) -> None:
        self.link.tick()

    async def come_back(self) -> None:
        for role in ROLES:
            player = ScriptedWorker(self, role, f"{role}-0", epoch=len(self.tasks) + 1)  # type: ignore[arg-type]
            self.players[player.me.worker] = player
            self.tasks.append(asyncio.create_task(player.serve()))
        hellos = {name: player.me for name, player in self.players.items()}
        await until(lambda: {worker.hello.worker: worker.hello for worker in self.link.router.workers()} == hellos)
        await until(lambda: not self.engine.missing())

    async def lose(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for role in ROLES:
            self.link.worker_lost(f"{role}-0", "killed")

    def ask(self, *, retrieval: Retrieval | None = None, hangs: bool = False) -> Request:
        self._asked += 1
        now = self.clock()
        asked = Generation(
            sampling=Sampling(TOKENS),
            received_ns=now,
            deadline_ns=now + int(self.deadline_s * 1e9),
            messages=(Message("user", f"say={TOKENS}" + (" hang=2" if hangs else "")),),
            retrieval=retrieval,
        )
        return self.engine.submit(f"request-{self._asked}", asked)

    def held(self) -> int:
        return sum(len(player.held) for player in self.players.values())


class OpenAiFixture:
    """Servers that speak OpenAI's protocol."""

    deadline_s = 60.0

    def __init__(self, harness: EngineHarness) -> None:
        self._at = harness
        self.engine: Engine = harness.engine
        self.clock, self.ended = harness.clock, harness.ended

    def tick(self) -> None:
        self._at.engine.tick()

    def ask(self, *, retrieval: Retrieval | None = None, hangs: bool = False) -> Request:
        self._at.fake.behaviour.hangs_after = 3 if hangs else None
        return self._at.chat(max_tokens=TOKENS, retrieval=retrieval)

    def held(self) -> int:
        return self._at.fake.open

    async def lose(self) -> None:
        self._at.fake.behaviour.down = True
        for backend in self._at.engine.balancer.backends:
            self._at.engine.balancer.mark_down(backend, WorkerLost("killed"))

    async def come_back(self) -> None:
        self._at.fake.behaviour.down = False
        self._at.fake.behaviour.hangs_after = None
        self.clock.advance(30)
        await run_checks(self._at.engine.balancer)


@asynccontextmanager
async def trinity(max_in_flight: int = 64) -> AsyncIterator[EngineFixture]:
    made = TrinityFixture(max_in_flight)
    running = asyncio.create_task(made.link.run())
    try:
        await made.come_back()
        yield made
    finally:
        for task in (*made.tasks, running):
            task.cancel()
        await asyncio.gather(*made.tasks, running, return_exceptions=True)
        made.link.close()


@asynccontextmanager
async def openai(max_in_flight: int = 64) -> AsyncIterator[EngineFixture]:
    async with running_engine(Behaviour(), max_in_flight=max_in_flight) as harness:
        yield OpenAiFixture(harness)


@asynccontextmanager
async def vllm(max_in_flight: int = 64) -> AsyncIterator[EngineFixture]:
    """As `vllm_engine` makes it: over HTTP at the instances' sockets."""
    with TemporaryDirectory() as directory:
        async with running_engine(Behaviour(), max_in_flight=max_in_flight, sockets=Path(directory)) as harness:
            yield OpenAiFixture(harness)


Make = Callable[..., AbstractAsyncContextManager[EngineFixture]]
every_engine = pytest.mark.parametrize("make", [trinity, openai, vllm], ids=["trinity", "openai", "vllm"])


@every_engine
async def test_an_answer_is_streamed_and_ends_once_with_its_timings(make: Make) -> None:
    async with make() as harness:
        assert not harness.engine.missing()
        told = await read_answer(harness.ask())
        assert len(told.ids) == TOKENS
        assert told.text
        assert {"received", "first_token", "end"} <= set(told.last.stages)
        (ended,) = harness.ended
        assert ended.code in ("stop", "length")
        assert ended.completion_tokens == TOKENS
        assert len(harness.engine.requests) == 0


@every_engine
async def test_passages_precede_the_first_token(make: Make) -> None:
    async with make() as harness:
        first = (await read_answer(harness.ask(retrieval=Retrieval("docs", 2)))).pieces[0]
        assert isinstance(first, Retrieved)
        assert (len(first.passages), first.at_token) == (2, 0)


@every_engine
async def test_a_cancelled_request_ends_once_and_frees_what_it_held(make: Make) -> None:
    async with make() as harness:
        request = harness.ask(hangs=True)
        assert isinstance(await request.next(), Tokens)
        assert harness.held() == 1
        harness.engine.cancel(request)
        harness.engine.cancel(request)
        await until(lambda: harness.held() == 0)
        assert [ended.code for ended in harness.ended] == ["client_closed_request"]
        assert len(harness.engine.requests) == 0


@every_engine
async def test_a_deadline_ends_a_request_with_its_own_error(make: Make) -> None:
    async with make() as harness:
        request = harness.ask(hangs=True)
        await request.next()
        harness.clock.advance(harness.deadline_s + 1)
        harness.tick()
        assert isinstance(await error_of(request), DeadlineExceeded)
        assert [ended.code for ended in harness.ended] == ["deadline_exceeded"]
        await until(lambda: harness.held() == 0)


@every_engine
async def test_the_end_of_a_drain_ends_requests_in_flight(make: Make) -> None:
    async with make() as harness:
        request = harness.ask(hangs=True)
        await request.next()
        harness.engine.end_all(Unavailable("the node has stopped"))
        assert isinstance(await error_of(request), Unavailable)
        await until(lambda: harness.held() == 0)


@every_engine
async def test_requests_in_flight_are_bounded(make: Make) -> None:
    async with make(max_in_flight=2) as harness:
        requests = [harness.ask(hangs=True) for _ in range(2)]
        with pytest.raises(Overloaded, match="the limit is 2"):
            harness.ask()
        harness.engine.cancel(requests[0])
        harness.ask(hangs=True)


@every_engine
async def test_without_a_backend_requests_are_refused_until_it_is_back(make: Make) -> None:
    async with make() as harness:
        await harness.lose()
        assert harness.engine.missing()
        with pytest.raises(Unavailable):
            harness.ask()
        await harness.come_back()
        assert not harness.engine.missing()
        assert len((await read_answer(harness.ask())).ids) == TOKENS


@every_engine
async def test_traces_cover_running_and_finished_requests(make: Make) -> None:
    async with make() as harness:
        request = harness.ask(hangs=True)
        await request.next()
        assert harness.engine.traces.trace(request.id).state == "running"
        harness.engine.cancel(request)
        assert harness.engine.traces.trace(request.id).state == "client_closed_request"
