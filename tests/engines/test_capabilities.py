"""Capability detection: servers are probed, findings are logged, and unusable servers are refused at start."""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from runtime.engines.openai.capabilities import Capabilities, detect_capabilities
from runtime.engines.openai.load_balancer import LoadBalancer
from runtime.engines.openai.server import Server
from runtime.errors import ConfigError, EngineFailed, EngineUnreachable, TrinityError
from runtime.node.engine_config import OpenAiSection
from runtime.serving.frontend.engine import RestartLimits
from tests.clock import Clock
from tests.engines.engine_harness import read_answer, run_checks, running_engine, until
from tests.engines.fake_openai import MODEL, Behaviour, FakeServer, WholeResponse
from tests.frontend.fake_workers import run

SECTION = OpenAiSection(name=MODEL, url="http://fake/v1")


def asked(behaviour: Behaviour, key: str = "", **section: Any) -> Capabilities:
    async def test() -> Capabilities:
        fake = FakeServer(behaviour)
        return await detect_capabilities(Server("http://fake/v1", key, http=fake), structs.replace(SECTION, **section))

    found = run(test())
    assert isinstance(found, Capabilities)
    return found


@pytest.mark.parametrize(
    ("behaviour", "way"),
    [
        (Behaviour(), "tokens"),
        (Behaviour(token_ids=False, goes_on=True), "chat"),
        (Behaviour(token_ids=False, renders=True), "text"),
        (Behaviour(token_ids=False), ""),
        (Behaviour(token_ids=False, strict=True), ""),
        (Behaviour(completions=False, goes_on=True), "chat"),
    ],
)
def test_the_way_to_continue_a_chat_is_probed(behaviour: Behaviour, way: str) -> None:
    found = asked(behaviour)
    assert found.chat_continuation == way
    assert (found.chat, found.completions, found.usage) == (True, behaviour.completions, True)
    assert found.context_tokens == 4096
    assert any("no probes in chats" in sentence for sentence in found.limitations()) == (way == "")


class Nonsense(FakeServer):
    """A server with a valid list of models whose streams contain `content` instead of a chunk."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._content = content

    def _post(self, path: str, body: Any) -> WholeResponse:
        return WholeResponse(200, b"data: " + self._content + b"\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"choices": 5}',
        b'{"choices": [5]}',
        b'{"choices": {"a": 1}}',
        b'{"error": ' + b"[" * 100_000,
        b'"\xff"',
        b"{not json",
    ],
    ids=lambda content: content[:24].decode("latin-1"),
)
async def test_a_server_with_invalid_answers_only_fails_itself(content: bytes) -> None:
    with pytest.raises(EngineFailed):
        await detect_capabilities(Server("http://fake/v1", http=Nonsense(content)), SECTION)


def test_a_server_that_ignores_stream_options_is_detected_and_logged() -> None:
    found = asked(Behaviour(usage=False))
    assert not found.usage
    assert any("stream_options" in sentence for sentence in found.limitations())


@pytest.mark.parametrize(
    ("behaviour", "section", "says"),
    [
        (
            Behaviour(),
            {"name": "other"},
            "model.name = 'other': http://fake/v1 has no such model; it has: 'fake-model'",
        ),
        (Behaviour(key="secret"), {}, "model.api_key_file: http://fake/v1 answers 401: wrong key"),
    ],
)
def test_an_unusable_server_is_refused_in_one_line_with_a_remedy(
    behaviour: Behaviour, section: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(behaviour, **section)
    assert caught.value.message.startswith(says)
    assert "\n" not in caught.value.message


async def test_a_url_without_models_is_refused_with_the_hint_to_add_v1() -> None:
    with pytest.raises(ConfigError, match="up to its /v1"):
        await detect_capabilities(Server("http://fake", http=FakeServer()), structs.replace(SECTION, url="http://fake"))


def test_the_key_is_sent_and_never_logged() -> None:
    assert asked(Behaviour(key="secret"), key="secret").chat
    with pytest.raises(ConfigError) as caught:
        asked(Behaviour(key="other"), key="secret")
    assert "secret" not in caught.value.message


def test_an_unreachable_or_failing_server_is_retried() -> None:
    with pytest.raises(EngineUnreachable):
        asked(Behaviour(down=True))
    with pytest.raises(EngineFailed):
        asked(Behaviour(refuses=(500, {})))


def test_start_fails_with_an_unusable_server_and_continues_without_one_that_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fakes: list[FakeServer] = []

    async def start(*behaviours: Behaviour) -> LoadBalancer:
        fakes[:] = [FakeServer(behaviour) for behaviour in behaviours]
        servers = LoadBalancer(
            [Server(f"http://fake{number}/v1", http=fake) for number, fake in enumerate(fakes)],
            partial(detect_capabilities, section=SECTION),
            advice="start it",
        )
        await servers.check_all()
        return servers

    with caplog.at_level(logging.WARNING):
        servers = run(start(Behaviour(), Behaviour(down=True)))
    assert [backend.name for backend in servers.up] == ["http://fake0/v1"]
    assert (
        "http://fake1/v1 does not answer: connection refused: it is not used until it answers; start it" in caplog.text
    )
    with pytest.raises(ConfigError):
        run(start(Behaviour(), Behaviour(model="another")))
    assert all(fake.closed for fake in fakes)


async def test_a_server_that_returns_with_another_model_is_not_used() -> None:
    async with running_engine(Behaviour(), Behaviour()) as harness:
        harness.fakes[0].behaviour = replace(harness.fakes[0].behaviour, model="another")
        first, second = harness.engine.balancer.backends
        harness.engine.balancer.mark_down(first, EngineUnreachable("it was restarted"))
        harness.clock.advance(60)
        await run_checks(harness.engine.balancer)
        assert harness.engine.balancer.up == [second]
        assert "no such model" in first.last_error


async def test_a_server_that_hangs_in_checks_gets_a_longer_timeout_each_time() -> None:
    async with running_engine(Behaviour(), restarts=RestartLimits(1, 60_000_000_000)) as harness:
        (backend,) = harness.engine.balancer.backends
        harness.fake.behaviour.hangs_after = 0
        harness.engine.balancer.mark_down(backend, EngineUnreachable("it was killed"))
        asked = harness.chat(max_tokens=4)
        backend.check_timeout_s = 0.01
        for limit_s in (0.01, 0.02):
            harness.clock.now = max(harness.clock.now, backend.next_check_ns)
            harness.engine.tick()
            await until(lambda: backend.check_timeout_s > limit_s)  # noqa: B023
            assert backend.last_error == f"{backend.name} does not answer within {limit_s} s"
            await until(lambda: not backend.checking)
            assert harness.fake.open == 0
        harness.fake.behaviour.hangs_after = None
        harness.clock.now = max(harness.clock.now, backend.next_check_ns)
        harness.engine.tick()
        assert len((await read_answer(asked)).text) == 4


async def test_back_off_doubles_until_a_server_answers() -> None:
    clock, fake = Clock(), FakeServer(Behaviour(down=True))
    servers = LoadBalancer([Server("http://fake/v1", http=fake)], partial(detect_capabilities, section=SECTION), clock)
    await servers.check_all()
    (backend,) = servers.backends
    delays = []
    for _ in range(8):
        delays.append(backend.next_check_ns - clock())
        if delays[-1]:
            await run_checks(servers)  # too early: it is not asked
        clock.now = backend.next_check_ns
        await run_checks(servers)
    assert delays[0] == 0  # who fails once may be there again
    assert all(0.05e9 * 2**n <= delay <= 0.1e9 * 2**n for n, delay in enumerate(delays[1:6]))
    assert max(delays) <= 10e9
    fake.behaviour.down = False
    clock.now = backend.next_check_ns
    waiting = asyncio.create_task(servers.changed.wait())
    await asyncio.sleep(0)
    await run_checks(servers)
    assert await waiting
    assert servers.up == [backend]


async def test_a_server_is_down_after_three_consecutive_errors() -> None:
    async with running_engine(Behaviour()) as harness:
        (backend,) = harness.engine.balancer.backends
        failed: TrinityError = EngineFailed("500")
        for error in (failed, failed, None, failed, failed):
            harness.engine.balancer.record_outcome(backend, error)
            assert harness.engine.balancer.up
        harness.engine.balancer.record_outcome(backend, failed)
        assert not harness.engine.balancer.up
