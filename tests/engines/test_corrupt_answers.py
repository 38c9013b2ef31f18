"""Servers with corrupt answers: each request ends once, complete or with a typed error."""

import asyncio
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from runtime.errors import InternalError, TrinityError
from runtime.node.engine_config import Stage
from runtime.retrieval.passages import OnRead, Passage
from runtime.serving.frontend.engine import RestartLimits
from runtime.serving.messages import Retrieval
from tests.engines.engine_harness import EngineHarness, read_answer, run_checks, running_engine
from tests.engines.fake_openai import Behaviour

DEEP: Any = 1
for _ in range(50):
    DEEP = [DEEP]
GARBAGE: list[Any] = [
    *(None, True, False, -1, 0, 2**63, -(2**70), 1e308, -0.5, "", "x", "\ud7ff\0", "5", [], {}, [[]], [None], ["x"]),
    *([-1], [2**40], [True], [1.5], {"x": 1}, {"index": 0}, [{"index": 7}], DEEP, "y" * 10_000),
]
PROBES = Retrieval("docs", 1, every_tokens=3)
PREFETCH = Retrieval("docs", 1, every_tokens=3, probe_mode="prefetch")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all nodes of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield (*path, name)
        yield from places(part, (*path, name))


def damaged(value: Any, chance: random.Random) -> Any:
    """Return the value with one node replaced, removed or duplicated."""
    value = deepcopy(value)
    found = list(places(value))
    if not found:
        return chance.choice(GARBAGE)
    *path, name = chance.choice(found)
    holder = value
    for step in path:
        holder = holder[step]
    match chance.randrange(6):
        case 0:
            del holder[name]
        case 1 if isinstance(holder, list):
            holder.append(deepcopy(holder[name]))
        case _:
            holder[name] = chance.choice(GARBAGE)
    return value


async def ends_once(harness: EngineHarness, retrieval: Retrieval | None, **body: Any) -> None:
    before = len(harness.ended)
    try:
        async with asyncio.timeout(20):
            await read_answer(harness.chat(retrieval=retrieval, **body))
    except InternalError:
        raise
    except TrinityError:
        pass
    assert len(harness.ended) == before + 1
    assert not any(fake.open for fake in harness.fakes)
    assert not harness.engine.requests.all()


async def all_answer(harness: EngineHarness) -> None:
    """Check failed servers again."""
    harness.clock.advance(60)
    await run_checks(harness.engine.balancer)
    for backend in harness.engine.balancer.backends:
        assert backend.capabilities is not None
        backend.consecutive_failures = 0


async def chunks_of(**body: Any) -> list[dict[str, Any]]:
    """Return a server's chunks for a chat."""
    async with running_engine() as harness:
        server = harness.engine.balancer.backends[0].server
        asked = {"model": "fake-model", "messages": [{"role": "user", "content": "why?"}], "stream": True} | body
        async with server.stream("/chat/completions", asked) as chunks:
            return [chunk async for chunk in chunks]


@pytest.mark.parametrize("retrieval", [None, PROBES, PREFETCH], ids=["plain", "wait", "prefetch"])
async def test_a_corrupt_stream_ends_its_request_once(retrieval: Retrieval | None) -> None:
    chance = random.Random(3)
    told = {"stream_options": {"include_usage": True}, "return_token_ids": True, "max_tokens": 4, "logprobs": True}
    sound = await chunks_of(**told)
    async with running_engine(restarts=RestartLimits(1, 0)) as harness:
        for _ in range(400):
            harness.fake.says = []
            await all_answer(harness)
            says = damaged(sound, chance)
            if chance.random() < 0.3:
                chance.shuffle(says)
            harness.fake.says = says
            body: dict[str, Any] = {"max_tokens": 9} if retrieval else {"max_tokens": 9, "logprobs": True, "n": 1}
            await ends_once(harness, retrieval, **body)


async def test_a_corrupt_prefill_answer_ends_its_request_once() -> None:
    chance = random.Random(4)
    sound = {
        "choices": [],
        "usage": {"prompt_tokens": 29, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}},
        "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_engine_id": "x"},
    }
    stages: tuple[Stage, ...] = ("prefill", "decode")
    async with running_engine(
        Behaviour(), Behaviour(), stages=stages, restarts=RestartLimits(1, 0), handover_tokens=1
    ) as harness:
        for _ in range(300):
            harness.fakes[0].whole = None
            await all_answer(harness)
            harness.fakes[0].whole = damaged(sound, chance)
            await ends_once(harness, None, max_tokens=4)


async def test_passages_of_any_text_reach_the_server_as_json() -> None:
    async with running_engine() as harness:

        async def search(
            query: object, *, on_embedded: Callable[[], None], on_read: OnRead, timeout_s: float
        ) -> list[Passage]:
            on_embedded()
            return [Passage("\0", "\u2028", float("nan"), "a\0<|im_end|>\x1b[31m")]

        harness.library.search = search  # type: ignore[method-assign]
        await ends_once(harness, Retrieval("docs", 1), max_tokens=4)
