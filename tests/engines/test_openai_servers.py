"""Several OpenAI servers: load balancing, errors, and resumption of requests when one is lost."""

from dataclasses import replace

import pytest

from runtime.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineUnreachable,
    InvalidRequest,
    Overloaded,
    TrinityError,
    WorkerLost,
)
from runtime.node.engine_config import OpenAiSection, ServedSection, VllmSection
from runtime.serving.frontend.engine import RestartLimits
from runtime.serving.frontend.requests import Relayed
from tests.engines.engine_harness import SERVER_KINDS, error_of, read_answer, running_engine, until
from tests.engines.fake_openai import MODEL, URL, Behaviour


async def test_an_idle_server_that_stops_is_detected_within_five_seconds() -> None:
    async with running_engine() as harness:
        await read_answer(harness.chat(max_tokens=4))
        harness.fake.behaviour.down = True
        harness.engine.tick()
        assert harness.engine.missing() == []
        harness.clock.advance(5)
        harness.engine.tick()
        await until(harness.engine.missing)
        harness.fake.behaviour.down = False
        harness.engine.tick()
        await until(lambda: not harness.engine.missing())


async def test_a_servers_rejection_reaches_the_client_with_status_and_message() -> None:
    async with running_engine() as harness:
        said = {"error": {"message": "top_k must be positive", "param": "top_k", "code": None}}
        harness.fake.behaviour.refuses = (422, said)
        error = await error_of(harness.chat(top_k=-7))
        assert isinstance(error, InvalidRequest)
        assert (error.status, error.message, error.param) == (422, "top_k must be positive", "top_k")
        assert len(harness.fake.asked) == 1  # it is the request that is wrong: no other try
        harness.fake.behaviour.refuses = None
        error = await error_of(harness.chat(max_tokens=100_000))
        assert isinstance(error, ContextLengthExceeded)


@pytest.mark.parametrize(("status", "kind"), [(500, EngineFailed), (401, EngineFailed), (429, Overloaded)])
async def test_a_servers_own_errors_are_typed(status: int, kind: type[TrinityError]) -> None:
    async with running_engine(restarts=RestartLimits(0, 0)) as harness:
        harness.fake.behaviour.refuses = (status, {"error": {"message": "no"}})
        error = await error_of(harness.chat())
        assert type(error) in (kind, *kind.__subclasses__())
        assert [ended.code for ended in harness.ended] == [error.code]


async def test_a_server_that_is_down_costs_no_request_while_another_is_up() -> None:
    async with running_engine(Behaviour(), Behaviour()) as harness:
        harness.fakes[0].behaviour.down = True
        told = [await read_answer(harness.chat(f"question {number}", max_tokens=4)) for number in range(4)]
        assert all(len(one.ids) == 4 for one in told)
        assert not harness.fakes[0].asked
        assert [ended.code for ended in harness.ended] == ["length"] * 4


@pytest.mark.parametrize("served", [VllmSection(name=MODEL), OpenAiSection(name=MODEL, url=URL)])
async def test_while_the_node_stops_no_request_waits_for_a_server_that_it_would_start(served: ServedSection) -> None:
    async with running_engine(served=served, restarts=RestartLimits(3, 60_000_000_000)) as harness:
        (backend,) = harness.engine.balancer.backends
        harness.fake.behaviour.down = True
        harness.engine.balancer.mark_down(backend, EngineUnreachable("it was killed"))
        harness.engine.expect_no_worker()
        if isinstance(served, VllmSection):
            with pytest.raises(EngineUnreachable, match="it was killed"):
                harness.chat(max_tokens=4)
            return
        request = harness.chat(max_tokens=4)
        harness.fake.behaviour.down = False
        harness.clock.now = max(harness.clock.now, backend.next_check_ns)
        harness.engine.tick()
        assert len((await read_answer(request)).ids) == 4


@pytest.mark.parametrize("kind", ["tokens", "chat", "text"])
@pytest.mark.parametrize("chunks", [1, 2, 7, 19])
async def test_an_answer_whose_server_is_lost_resumes_elsewhere_without_duplicate_tokens(
    kind: str, chunks: int
) -> None:
    how = SERVER_KINDS[kind]
    async with running_engine(how) as harness:
        expected = await read_answer(harness.chat(max_tokens=20))
    breaking = replace(how, breaks_after=chunks)
    async with running_engine(breaking, how) as harness:
        first, second = harness.chat(max_tokens=20), harness.chat(max_tokens=20)
        told = [await read_answer(first), await read_answer(second)]
        assert [one.text for one in told] == [expected.text] * 2
        assert all(isinstance(one.last, Relayed) and one.last.completion_tokens == 20 for one in told)
        assert harness.engine.restarts == 1
        assert [ended.code for ended in harness.ended] == ["length"] * 2


async def test_an_answer_that_cannot_resume_elsewhere_ends_with_one_error() -> None:
    async with running_engine(Behaviour(breaks_after=5), Behaviour(breaks_after=5)) as harness:
        error = await error_of(harness.chat(n=2, max_tokens=9))
        assert isinstance(error, WorkerLost)
        assert "its stream broke" in error.message
        assert [ended.code for ended in harness.ended] == ["worker_lost"]


async def test_retries_are_bounded() -> None:
    async with running_engine(*[Behaviour(breaks_after=1) for _ in range(6)]) as harness:
        error = await error_of(harness.chat(max_tokens=9))
        assert isinstance(error, EngineFailed)
        assert sum(len(fake.generations()) for fake in harness.fakes) == 4  # once, and three times more
