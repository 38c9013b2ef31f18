"""Probes while an OpenAI server generates: the answer is interrupted and continues after the new passages."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from runtime.errors import (
    InvalidRequest,
    Overloaded,
)
from runtime.serving.frontend.requests import Relayed
from runtime.serving.messages import Retrieval
from tests.engines.engine_harness import DOCS, PROBES, SERVER_KINDS, read_answer, running_engine, sequence, until
from tests.engines.fake_openai import Behaviour, completion, rendered


@pytest.mark.parametrize("kind", ["tokens", "chat", "text"])
async def test_a_probe_interrupts_the_answer_and_continues_after_the_new_passages(kind: str) -> None:
    async with running_engine(SERVER_KINDS[kind]) as harness:
        told = await read_answer(harness.chat(retrieval=PROBES, max_tokens=24))
        assert [search.at_token for search in told.searches] == [0, 8, 16]
        assert [asked.spec.stage for asked, _ in harness.library.calls[1:]] == ["decode", "decode"]
        assert told.text[:8] in harness.library.calls[1][0].text
        first, second, third = harness.fake.generations()
        assert [body["max_tokens"] for body in (first, second, third)] == [8, 8, 8]
        block = "\n\n[T2.0]\npassage 2.0.\n\n"
        if kind == "chat":
            assert second["messages"][:-1] == first["messages"]
            assert second["messages"][-1] == {"role": "assistant", "content": told.text[:8] + block}
            assert second["continue_final_message"] is True
            before = rendered(second["messages"], goes_on=True)
        else:
            before = rendered(first["messages"]) + told.text[:8] + block
            sent = second["prompt"]
            assert (bytes(sent).decode() if kind == "tokens" else sent) == before
        assert told.text[8:16] == bytes(completion(list(before.encode()), 8)).decode()
        assert isinstance(told.last, Relayed)
        assert told.last.usage is not None
        assert told.last.usage["completion_tokens"] == told.last.completion_tokens == 24
        assert len([probe for piece in told.pieces for probe in getattr(piece, "probes", ())]) == 2


async def test_a_probe_without_new_passages_does_not_change_the_answer() -> None:
    async with running_engine() as harness:
        alone = await read_answer(harness.chat(max_tokens=24))
        harness.library.error = Overloaded("the pool is full")
        request = harness.chat(max_tokens=24)
        assert (await read_answer(request)).ids == alone.ids
        harness.library.error = None
        first = harness.chat(retrieval=PROBES, max_tokens=24)
        await until(lambda: harness.library.calls)
        harness.library.error = Overloaded("the pool is full")
        told = await read_answer(first)
        (before, wrote), *more = sequence(list(rendered(harness.fake.generations()[-3]["messages"]).encode()), told)
        assert not more
        assert wrote == completion(before, 24)
        probes = [probe for piece in told.pieces for probe in getattr(piece, "probes", ())]
        assert [probe.outcome for probe in probes] == ["failed", "failed"]


async def test_in_prefetch_mode_the_answer_continues_until_the_passages_arrive() -> None:
    async with running_engine() as harness:
        retrieval = Retrieval("docs", 1, every_tokens=8, probe_mode="prefetch")
        told = await read_answer(harness.chat(retrieval=retrieval, max_tokens=64))
        places = [search.at_token for search in told.searches]
        assert places[0] == 0
        assert len(places) > 2
        assert all(place > 8 for place in places[1:])  # it went on meanwhile
        prompt = list(rendered(harness.fake.generations()[0]["messages"]).encode())
        assert all(wrote == completion(before, len(wrote)) for before, wrote in sequence(prompt, told))
        assert len(told.ids) == 64
        assert harness.fake.open == 0


async def test_no_request_continues_from_within_a_character() -> None:
    async with running_engine(
        Behaviour(letters="äöüéèß")
    ) as harness:  # two bytes each, drawn at random: halves of all kinds
        told = await read_answer(harness.chat(retrieval=PROBES, max_tokens=40))
        assert len(harness.fake.generations()) >= 4
        prompt = list(rendered(harness.fake.generations()[0]["messages"]).encode())
        for before, wrote in sequence(prompt, told)[:-1]:
            assert bytes([*before[-1:], *wrote]), wrote
        for search in told.searches[1:]:
            assert search.at_token <= len(told.ids)


@pytest.mark.parametrize("kind", ["tokens", "chat", "text"])
async def test_a_stop_string_across_a_probe_ends_the_answer(kind: str) -> None:
    async with running_engine(SERVER_KINDS[kind]) as harness:
        harness.library.error = None
        plain = (await read_answer(harness.chat(retrieval=PROBES, max_tokens=24))).text
    async with running_engine(SERVER_KINDS[kind]) as harness:
        stop = plain[6:10]
        told = await read_answer(harness.chat(retrieval=PROBES, max_tokens=24, stop=[stop]))
        assert told.text == plain[: plain.index(stop)]
        assert told.last.finish_reason == "stop"
        assert all("stop" not in body for body in harness.fake.generations())
        assert harness.fake.open == 0


REFUSED_WITH_PROBES = [
    {"n": 2},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "json_object"}},
    {"logprobs": True},
    {"presence_penalty": 0.5},
    {"continue_final_message": True},
]


@pytest.mark.parametrize("extra", REFUSED_WITH_PROBES, ids=lambda extra: next(iter(extra)))
async def test_options_incompatible_with_probes_are_refused_by_name(extra: dict[str, Any]) -> None:
    async with running_engine() as harness:
        with pytest.raises(InvalidRequest) as caught:
            harness.chat(retrieval=PROBES, **extra)
        assert caught.value.param == next(iter(extra))
        assert not harness.fake.asked
        await read_answer(harness.chat(retrieval=DOCS, **extra))  # but retrieval alone can


async def test_probes_by_uncertainty_are_refused_by_name() -> None:
    async with running_engine() as harness:
        with pytest.raises(InvalidRequest, match='use "every" or "drift"') as caught:
            harness.chat(retrieval=structs.replace(PROBES, trigger="unsure", threshold=1.0))
        assert caught.value.param == "retrieval.probe_trigger"
        await read_answer(
            harness.chat(retrieval=structs.replace(DOCS, trigger="unsure", threshold=1.0))
        )  # it has no probes


@pytest.mark.parametrize("kind", ["tokens", "chat"])
async def test_a_probe_that_would_fill_the_context_is_dropped(kind: str) -> None:
    async with running_engine(replace(SERVER_KINDS[kind], context=110)) as harness:
        harness.library.long = 300
        told = await read_answer(harness.chat(retrieval=PROBES, max_tokens=24))
        assert len(told.text) == 24
        assert isinstance(told.last, Relayed)
        assert told.last.completion_tokens == 24


async def test_with_token_ids_a_probe_inserts_at_most_its_token_limit() -> None:
    async with running_engine() as harness:
        harness.library.long = 900
        retrieval = Retrieval("docs", 1, every_tokens=8, probe_tokens=100)
        told = await read_answer(harness.chat(retrieval=retrieval, max_tokens=24))
        inserted = [len(search.inserted) for search in told.searches[1:]]
        assert len(inserted) == 2
        assert all(60 <= count <= 100 for count in inserted)


async def test_a_probe_costs_one_search_one_tokenize_and_one_request() -> None:
    async with running_engine() as harness:
        await read_answer(harness.chat(retrieval=Retrieval("docs", 2, every_tokens=8), max_tokens=12))
        assert len(harness.library.calls) == 2
        assert [path for path, _ in harness.fake.asked] == ["/v1/chat/completions", "/tokenize", "/v1/completions"]
