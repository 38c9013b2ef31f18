"""A gateway node in front of a running server: another node, which is also queried directly."""

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.engines.openai.assembly import fit, with_passages
from runtime.engines.openai.capabilities import detect_capabilities
from runtime.engines.openai.engine import OpenAiEngine
from runtime.engines.openai.load_balancer import LoadBalancer
from runtime.engines.openai.server import Server
from runtime.node.engine_config import OpenAiSection
from runtime.retrieval.passages import Passage
from runtime.serving.frontend.engine import RestartLimits
from runtime.serving.messages import Generation, Message, Retrieval, Sampling
from runtime.testing.node import Node
from runtime.testing.waiting import eventually
from tests.e2e.conftest import GATEWAY
from tests.e2e.load import WAIT_S, prompts, repeated
from tests.e2e.tokens import node_tokens
from tests.engines.engine_harness import FakeSearch, read_answer, sequence

Json = dict[str, Any]
GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def gateway(node: Node, collection: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node without a model, in front of `node`."""
    home = tmp_path_factory.mktemp("gateway")
    config = home / "node.toml"
    config.write_text(GATEWAY.format(url=node.info.url, collection=collection))
    gateway = Node(config)
    yield gateway
    assert gateway.stop() == 0


def chat(node: Node, text: str, **body: Any) -> Json:
    body = GREEDY | {"messages": [{"role": "user", "content": text}], "max_tokens": 12} | body
    status, answer = node.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def test_greedy_tokens_with_passages_equal_the_servers_for_50_prompts_with_them(node: Node, gateway: Node) -> None:
    def both(text: str) -> tuple[Json, Json]:
        through = chat(gateway, text, retrieval={"collection": "docs", "k": 3})
        status, found = gateway.post("/v1/retrieval", {"collection": "docs", "query": text, "k": 3})
        assert status == 200
        passages = [Passage(p["id"], p["title"], p["distance"], p["text"]) for p in found["passages"]]
        fitted = fit(passages, 768)
        assert [p["id"] for p in through["retrieval"]["passages"]] == [passage.id for passage in fitted.used]
        body = with_passages({"messages": [{"role": "user", "content": text}]}, fitted)
        return through, chat(node, text, **body)

    with ThreadPoolExecutor(8) as threads:
        for through, direct in threads.map(both, prompts(50)):
            assert through["choices"][0] == direct["choices"][0]
            counts = [answer["usage"] | {"prompt_tokens_details": None} for answer in (through, direct)]
            assert counts[0] == counts[1]  # the second of them may find the prompt in the cache


def test_greedy_tokens_with_two_probes_equal_the_servers_over_the_same_tokens_for_50_prompts(node: Node) -> None:
    async def test() -> None:
        section = OpenAiSection(name="tiny", url=f"{node.info.url}/v1")
        servers = LoadBalancer([Server(f"{node.info.url}/v1")], partial(detect_capabilities, section=section))
        await servers.check_all()
        engine = OpenAiEngine(
            servers, section, FakeSearch(), epoch=1, max_in_flight=64, restarts=RestartLimits(1, 0)
        )  # fmt: skip
        running = asyncio.create_task(engine.run())
        numbers = itertools.count()

        async def answered(text: str) -> list[tuple[list[int], list[int]]]:
            now = engine.now_ns()
            body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 24}
            request = engine.submit(
                f"r{next(numbers)}",
                Generation(
                    Sampling(24),
                    now,
                    now + 120_000_000_000,
                    (Message("user", text),),
                    retrieval=Retrieval("docs", 1, every_tokens=8),
                ),
                sent=body | {"temperature": 0, "ignore_eos": True},
            )
            told = await read_answer(request)
            assert len(told.ids) == 24
            return sequence(request.delivered.prompt, told)

        found = await asyncio.gather(*(answered(text) for text in prompts(50)))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert all(len(stretches) == 3 for stretches in found)
        stretches = [stretch for one in found for stretch in one]
        with ThreadPoolExecutor(8) as threads:
            fresh = threads.map(lambda one: node_tokens(node.info.url, "tiny", one[0], len(one[1])), stretches)
            assert [wrote for _, wrote in stretches] == list(fresh)

    asyncio.run(test())


def test_killing_the_servers_frontend_loses_no_request_or_token(node: Node, gateway: Node) -> None:
    asked = [{"text": f"Question {number}: what does a with statement do?"} for number in range(6)]

    def tokens(server: Node, body: Json) -> list[int]:
        answer = chat(server, **body, max_tokens=100)
        assert answer["usage"]["completion_tokens"] == 100
        return list(answer["choices"][0]["token_ids"])

    expected = [tokens(node, body) for body in asked]
    with repeated(partial(tokens, gateway), asked) as answers:
        eventually(lambda: node.metric("trinity_requests_in_flight") >= 1, WAIT_S, "the server to have one of them")
        node.kill("frontend-0")
        restarted = "trinity_requests_restarted_total"
        eventually(lambda: gateway.metric(restarted) >= 1, WAIT_S, "a request to be asked again")
    assert all(found == [one] * len(found) for found, one in zip(answers, expected, strict=True))
    node.wait_ready()
