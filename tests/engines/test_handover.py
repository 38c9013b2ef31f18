"""Prefill and decode on separate servers: order of requests, placement, and cost of failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest

from runtime.engines.openai.handover import HandoverCosts
from runtime.engines.openai.load_balancer import LoadBalancer
from runtime.errors import InvalidRequest
from runtime.node.engine_config import Stage
from runtime.serving.messages import Retrieval
from tests.engines.engine_harness import EngineHarness, read_answer, run_checks, running_engine, sequence, until
from tests.engines.fake_openai import Behaviour, FakeServer, completion, metrics, rendered

PREFILL, DECODE = Behaviour(kv_role="kv_producer"), Behaviour(kv_role="kv_consumer")
LONG = "What is a decorator, and what a closure? " * 20


@asynccontextmanager
async def split(
    prefill: int = 1, decode: int = 1, handover_tokens: int | Literal["auto"] = "auto", **more: Any
) -> AsyncIterator[tuple[EngineHarness, list[FakeServer], list[FakeServer]]]:
    """Run an engine over the given number of servers of each stage."""
    stages: list[Stage] = ["prefill"] * prefill + ["decode"] * decode  # type: ignore[assignment]
    behaviours = [PREFILL] * prefill + [DECODE] * decode
    async with running_engine(*behaviours, stages=stages, handover_tokens=handover_tokens, **more) as harness:
        yield harness, harness.fakes[:prefill], harness.fakes[prefill:]


def expected(text: str, count: int) -> str:
    return bytes(completion(list(rendered([{"role": "user", "content": text}]).encode()), count)).decode()


async def test_prefill_computes_a_prompt_and_decode_generates_from_its_kv() -> None:
    async with split() as (harness, (prefill,), (decode,)):
        told = await read_answer(harness.chat(LONG, max_tokens=9, min_tokens=3, stream_options={"include_usage": True}))
        assert told.text == expected(LONG, 9)
        assert (prefill.computed, decode.pulled) == (1, 1)
        (asked,), (wrote,) = prefill.generations(), decode.generations()
        assert asked["messages"] == wrote["messages"]
        assert (asked["max_tokens"], asked["stream"], wrote["min_tokens"]) == (1, False, 3)
        assert {fake.headers[-1]["x-request-id"] for fake in harness.fakes} == {"request-0"}


@pytest.mark.parametrize("trouble", [{"down": True}, {"refuses": (500, {"error": "out of memory"})}])
async def test_without_prefill_decode_computes_the_prompt_and_no_request_is_lost(trouble: dict[str, Any]) -> None:
    async with split(prefill=2) as (harness, prefills, (decode,)):
        for prefill in prefills:
            prefill.behaviour = replace(prefill.behaviour, **trouble)
        told = await read_answer(harness.chat(LONG, max_tokens=9))
        assert told.text == expected(LONG, 9)
        assert decode.pulled == 0
        assert harness.engine.restarts == 0


async def test_a_prompt_whose_prefill_server_dies_is_retried_on_another() -> None:
    async with split(prefill=2) as (harness, prefills, (decode,)):
        prefills[0].behaviour = replace(prefills[0].behaviour, down=True)
        for number in range(2):
            text = f"{number}: {LONG}"
            assert (await read_answer(harness.chat(text, max_tokens=5))).text == expected(text, 5)
        assert (prefills[1].computed, decode.pulled) == (2, 2)


async def test_an_answer_whose_decode_server_dies_resumes_on_another_with_the_kv_of_all_delivered_tokens() -> None:
    async with split(decode=2) as (harness, (prefill,), decodes):
        decodes[0].behaviour = replace(decodes[0].behaviour, breaks_after=6)
        told = await read_answer(harness.chat(LONG, max_tokens=12))
        assert told.text == expected(LONG, 12)
        assert prefill.computed == 2
        again = prefill.generations()[1]["prompt"]
        assert bytes(again).decode() == rendered([{"role": "user", "content": LONG}]) + told.text[: len(again)][:5]
        assert decodes[1].pulled == 1


async def test_without_a_decode_server_prefill_generates_the_answers() -> None:
    async with split() as (harness, (prefill,), (decode,)):
        decode.behaviour = replace(decode.behaviour, down=True)
        told = await read_answer(harness.chat(LONG, max_tokens=7))
        assert told.text == expected(LONG, 7)
        assert prefill.generations()[-1]["stream"]


async def test_short_prompts_go_directly_to_decode() -> None:
    async with split(handover_tokens=100) as (harness, (prefill,), (decode,)):
        assert (await read_answer(harness.chat("Why?", max_tokens=5))).text == expected("Why?", 5)
        assert prefill.generations() == []
        assert (await read_answer(harness.chat(LONG, max_tokens=5))).text == expected(LONG, 5)
        assert (prefill.computed, decode.pulled) == (1, 1)


async def test_a_second_turn_mostly_cached_at_decode_is_not_handed_over() -> None:
    async with split(handover_tokens=64) as (harness, (prefill,), (decode,)):
        first = [{"role": "user", "content": LONG}]
        answer = (await read_answer(harness.chat(LONG, max_tokens=5))).text
        turns = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
        await read_answer(harness.chat(messages=turns, max_tokens=5))
        assert prefill.computed == 1
        assert len(decode.generations()) == 2


async def test_probes_continue_at_decode_with_its_cached_tokens() -> None:
    async with split(handover_tokens=64) as (harness, (prefill,), (decode,)):
        told = await read_answer(harness.chat(LONG, Retrieval("docs", 1, every_tokens=8), max_tokens=24))
        prompt = next(piece.prompt_token_ids for piece in told.pieces if getattr(piece, "prompt_token_ids", ()))  # type: ignore[union-attr]
        stretches = sequence(prompt, told)
        assert len(stretches) == 3
        assert all(wrote == completion(list(before), len(wrote)) for before, wrote in stretches)
        assert prefill.computed == 1
        assert len(decode.generations()) == 3


async def test_prefill_reports_invalid_requests_too() -> None:
    async with split() as (harness, (prefill,), (decode,)):
        prefill.behaviour = replace(
            prefill.behaviour, refuses=(400, {"error": {"message": "no such field", "param": "top_q"}})
        )
        with pytest.raises(InvalidRequest, match="no such field"):
            await read_answer(harness.chat(LONG, max_tokens=5, top_q=1))
        assert decode.generations() == []


async def test_a_client_cannot_set_kv_transfer_params() -> None:
    async with split() as (harness, (prefill,), (decode,)):
        with pytest.raises(InvalidRequest, match="the node sets it itself"):
            harness.chat(LONG, kv_transfer_params={"do_remote_prefill": True, "remote_host": "elsewhere"})
        assert prefill.generations() == decode.generations() == []


async def test_a_client_disconnect_ends_the_work_at_prefill() -> None:
    async with split() as (harness, (prefill,), (decode,)):
        hold = asyncio.Event()
        send = prefill.request

        async def slow(*given: Any) -> Any:
            await hold.wait()
            return await send(*given)

        prefill.request = slow  # type: ignore[method-assign, assignment]
        request = harness.chat(LONG, max_tokens=5)
        backend = harness.engine.balancer.backends[0]
        await until(lambda: backend.assigned == 1)
        harness.engine.cancel(request)
        await until(lambda: backend.assigned == 0)
        assert decode.generations() == []


def test_the_limit_is_the_tokens_decode_computes_during_a_hand_over() -> None:
    costs = HandoverCosts()
    for _ in range(7):
        costs.record_prefill(1000, 50_000_000)
        costs.record_handover(20_000_000)
    assert costs.tokens == 0  # too few measurements
    costs.record_prefill(500, 40_000_000)  # queued
    costs.record_handover(90_000_000)
    assert costs.tokens == 400  # 20 ms at 50 us a token
    costs.record_prefill(0, 1)  # fully cached at prefill: no measurement of the time per token
    assert costs.tokens == 400
    assert HandoverCosts(77).tokens == 77


# ---- which server


async def told(servers: LoadBalancer, running: list[int]) -> None:
    """Report the number of running requests of each server."""
    await run_checks(servers)
    await until(lambda: [backend.reported and backend.reported.running for backend in servers.backends] == running)


async def test_prompts_go_to_the_server_with_their_prefix() -> None:
    async with running_engine(Behaviour(), Behaviour()) as harness:
        first, second = harness.fakes
        for number in range(3):
            for topic in ("decorators ", "closures "):
                await read_answer(harness.chat(topic * 60 + str(number), max_tokens=2))
        asked = [{body["messages"][0]["content"].split()[0] for body in fake.generations()} for fake in harness.fakes]
        assert sorted(map(len, asked)) == [1, 1]
        assert len(first.generations()) == len(second.generations()) == 3


async def test_queues_from_other_clients_and_nearly_full_kv_send_requests_elsewhere() -> None:
    busy, free = Behaviour(metrics=metrics(running=2, waiting=3)), Behaviour(metrics=metrics())
    async with running_engine(busy, free) as harness:
        await told(harness.engine.balancer, [2, 0])
        for number in range(3):
            await read_answer(harness.complete(f"{number}", max_tokens=2))
        assert [len(fake.generations()) for fake in harness.fakes] == [0, 3]
        harness.fakes[0].behaviour = replace(busy, metrics=metrics())
        harness.fakes[1].behaviour = replace(free, metrics=metrics(kv=0.97))
        harness.clock.advance(2.0)
        await told(harness.engine.balancer, [0, 0])
        for number in range(3):
            await read_answer(harness.complete(f"{number}", max_tokens=2))
        assert [len(fake.generations()) for fake in harness.fakes] == [3, 3]


async def test_a_draining_server_finishes_its_requests_and_gets_no_new_ones() -> None:
    async with running_engine(Behaviour(), Behaviour()) as harness:
        first = harness.chat("one", max_tokens=30)
        await until(lambda: harness.fakes[0].open == 1)
        harness.fakes[0].behaviour.leaves = True
        for number in range(3):
            await read_answer(harness.chat(f"{number}", max_tokens=2))
        assert (await read_answer(first)).text == expected("one", 30)
        assert [len(fake.generations()) for fake in harness.fakes] == [1, 3]
        assert harness.engine.restarts == 0
        harness.fakes[0].behaviour.leaves = False  # another process is there
        harness.clock.advance(60.0)
        await run_checks(harness.engine.balancer)
        assert len(harness.engine.balancer.up) == 2
