"""SGLang's prefill and decode servers: both get the request with a bootstrap room, and neither answers alone.

The fakes follow SGLang's sources: a request without a room is refused, one that names the host of its warm-up requests
has no partner, and a room's two requests wait for each other.
"""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launchers.status import show_placement
from runtime.engines.openai.capabilities import Capabilities, detect_capabilities
from runtime.engines.openai.engine import OpenAiEngine
from runtime.engines.openai.handover import HandoverCosts, Handovers
from runtime.engines.openai.http import Response
from runtime.engines.openai.load_balancer import LoadBalancer
from runtime.engines.openai.server import Server
from runtime.engines.openai.signals import EngineSignals
from runtime.engines.openai.transfer import SglangTransfer, servers_of, transfer_of
from runtime.errors import ConfigError, EngineFailed, EngineUnreachable, InvalidRequest
from runtime.node.config_file import load_config
from runtime.node.engine_config import OpenAiSection, PrefillServers
from runtime.node.placement.machine import Machine
from runtime.node.placement.plan import plan_workers
from runtime.serving.frontend.engine import RestartLimits
from runtime.serving.messages import Retrieval
from tests.clock import Clock
from tests.engines.engine_harness import EngineHarness, FakeSearch, read_answer, running, until
from tests.engines.fake_openai import MODEL, Behaviour, FakeServer, completion, rendered
from tests.engines.fake_vllm import HttpFront

Json = dict[str, Any]
SGLANG = Behaviour(token_ids=False, goes_on=True)


@dataclass
class _Room:
    prefill: asyncio.Event = field(default_factory=asyncio.Event)
    decode: asyncio.Event = field(default_factory=asyncio.Event)


class _AfterPartner(Response):
    """A response whose body begins when the partner has the request too."""

    def __init__(self, response: Response, partner: asyncio.Event) -> None:
        self.status, self._of, self._partner = response.status, response, partner

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        await self._partner.wait()
        async for part in self._of.iter_bytes():
            yield part

    def complete(self) -> None:
        self._of.complete()

    def close(self) -> None:
        self._of.close()


class SglangServer(FakeServer):
    def __init__(self, stage: str, rooms: dict[int, _Room]) -> None:
        super().__init__(replace(SGLANG))
        self.stage, self.rooms = stage, rooms

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Response:
        response = await super().request(method, url, headers, body)
        asked = json.loads(body or b"{}")
        if not url.endswith("/completions") or response.status != 200 or asked.get("bootstrap_host") == "2.2.2.2":
            return response
        if "bootstrap_room" not in asked:
            self.behaviour.refuses = (400, {"message": "Disaggregated request received without bootstrap room id"})
            return await super().request(method, url, headers, body)
        room = self.rooms.setdefault(asked["bootstrap_room"], _Room())
        own, partner = (room.prefill, room.decode) if self.stage == "prefill" else (room.decode, room.prefill)
        own.set()
        return _AfterPartner(response, partner)


@asynccontextmanager
async def pairs(
    prefill: int = 1, decode: int = 1
) -> AsyncIterator[tuple[EngineHarness, list[SglangServer], list[SglangServer]]]:
    """Run an engine over so many SGLang servers of each stage, at ports of this machine."""
    rooms: dict[int, _Room] = {}
    p, d = ([SglangServer(stage, rooms) for _ in range(n)] for stage, n in (("prefill", prefill), ("decode", decode)))
    async with AsyncExitStack() as stack:

        async def listen(servers: Sequence[FakeServer]) -> tuple[str, ...]:
            urls = []
            for one in servers:
                server = await asyncio.start_server(HttpFront(one).connected, "127.0.0.1", 0)
                await stack.enter_async_context(server)
                urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
            return tuple(urls)

        ports = tuple(9000 + number for number in range(prefill))
        section = OpenAiSection(
            name=MODEL,
            url=await listen(d),
            prefill=PrefillServers(url=await listen(p), bootstrap_port=ports),
        )
        clock, library = Clock(), FakeSearch()
        detect, transfer = partial(detect_capabilities, section=section), transfer_of(section)
        balancer = LoadBalancer(servers_of(section, ""), detect, clock, paired=transfer.paired)
        await balancer.check_all()
        for one in (*p, *d):
            one.asked.clear()
        engine = OpenAiEngine(
            balancer, section, library, epoch=1, max_in_flight=8, restarts=RestartLimits(3, 0), clock=clock,
            transfer=transfer,
        )  # fmt: skip
        async with running(engine):
            yield EngineHarness(engine, [*p, *d], library, clock), p, d


async def test_both_servers_get_the_request_at_once_as_from_sglangs_router() -> None:
    async with pairs() as (harness, (prefill,), (decode,)):
        told = await read_answer(harness.chat("What is a decorator?", max_tokens=9, temperature=0.5))
        prompt = rendered([{"role": "user", "content": "What is a decorator?"}])
        assert told.text == bytes(completion(list(prompt.encode()), 9)).decode()
        (asked,), (wrote,) = prefill.generations(), decode.generations()
        room = wrote["bootstrap_room"]
        assert 0 <= room < 2**63
        exchange = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is a decorator?"}],
            "max_tokens": 9,
            "temperature": 0.5,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 9000,
            "bootstrap_room": room,
        }
        assert wrote == exchange | {"stream": True, "stream_options": {"include_usage": True}}
        assert asked == exchange | {"stream": False}
        assert {fake.headers[-1]["x-request-id"] for fake in harness.fakes} == {"request-0"}


async def test_every_request_of_an_answer_with_probes_has_a_room_of_its_own() -> None:
    async with pairs() as (harness, (prefill,), (decode,)):
        told = await read_answer(harness.chat(retrieval=Retrieval("docs", 1, every_tokens=8), max_tokens=20))
        assert len(told.text) == 20
        rooms = [body["bootstrap_room"] for body in decode.generations()]
        assert len(set(rooms)) == len(rooms) == 3
        assert [body["bootstrap_room"] for body in prefill.generations()] == rooms


async def test_a_prefill_server_that_fails_ends_the_decode_request_and_another_pair_answers() -> None:
    async with pairs(prefill=2) as (harness, prefills, (decode,)):
        prefills[0].behaviour.refuses = (503, {"error": "full"})
        for topic in "abcd":
            assert len((await read_answer(harness.chat(topic * 99, max_tokens=4))).text) == 4
        assert harness.engine.restarts > 0
        prefills[1].behaviour.refuses = (500, {"error": "out of memory"})
        with pytest.raises(EngineFailed, match=r"full|out of memory"):
            await read_answer(harness.chat("x" * 99, max_tokens=4))
        await until(lambda: decode.open == 0)
        assert [backend.server.stage for backend in harness.engine.balancer.answering] == ["decode"]  # not at fault


async def test_an_error_of_the_request_itself_is_not_retried() -> None:
    async with pairs() as (harness, (prefill,), _):
        prefill.behaviour.refuses = (400, {"message": "temperature must be at least 0"})
        with pytest.raises(InvalidRequest, match="temperature"):
            await read_answer(harness.chat("x", max_tokens=4, temperature=-1))
        assert len(prefill.generations()) == 1


async def test_without_a_prefill_server_nothing_is_up() -> None:
    async with pairs() as (harness, (prefill,), _):
        assert harness.engine.missing() == []
        for backend in harness.engine.balancer.backends:
            if backend.server.stage == "prefill":
                harness.engine.balancer.mark_down(backend, EngineUnreachable("it is gone"))
        prefill.behaviour.down = True
        assert harness.engine.missing() == ["engine"]
        with pytest.raises(EngineUnreachable, match="it is gone"):
            harness.chat("x", max_tokens=4)


CONFIG = """
[model]
engine = "openai"
name = "Qwen/Qwen3-8B"
url = "http://127.0.0.1:1/v1"

[model.prefill]
url = ["http://127.0.0.1:2/v1", "http://127.0.0.1:3/v1"]
bootstrap_port = [8998, 8999]
"""


def test_the_configuration_says_which_engine_it_is_and_a_dry_run_repeats_it(tmp_path: Path) -> None:
    file, text = tmp_path / "node.toml", io.StringIO()
    file.write_text(CONFIG)
    machine = Machine((), (0, 1), 1 << 30)
    show_placement(plan_workers(load_config(file)), machine, {}, Console(file=text))
    assert "server http://127.0.0.1:1/v1: decode\n" in text.getvalue()
    assert "server http://127.0.0.1:3/v1: prefill, KV by SGLang's bootstrap at port 8999\n" in text.getvalue()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[8998, 8999]", "[8998]", "bootstrap_port has 1 entries and model.prefill.url 2"),
        (":2/v1", ":1/v1", "model.url and model.prefill.url share a server"),
        ("http://127.0.0.1:3/v1", "127.0.0.1:3", "model.prefill.url = '127.0.0.1:3'"),
    ],
)
def test_a_wrong_section_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(CONFIG.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        plan_workers(load_config(file))


async def test_a_prefill_that_fails_as_decode_ends_fails_nothing_else() -> None:
    begin, failing = asyncio.Event(), asyncio.Event()

    class Failing(Server):
        async def post(
            self, path: str, body: Mapping[str, Any], *, versioned: bool = True, request_id: str = ""
        ) -> Json:
            await begin.wait()
            failing.set()
            raise EngineFailed("out of memory")

    async def detect(server: Server) -> Capabilities:
        return Capabilities()

    unhandled: list[Json] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    clock, url = Clock(), "http://p/v1"
    balancer = LoadBalancer([Server("http://d/v1", stage="decode"), Failing(url, stage="prefill")], detect, clock)
    await balancer.check_all()
    signals = EngineSignals(balancer, clock)
    handovers = Handovers(balancer, SglangTransfer({url: 8998}), HandoverCosts(), signals, clock)
    async with handovers.hand_over(balancer.backends[0], {"prompt": "x"}, "/completions", (), 0.0, "r"):
        begin.set()
        await failing.wait()
    await asyncio.sleep(0)
    assert not unhandled
    assert balancer.backends[1].assigned == 0
