"""An OpenAI server as the engine: its requests, and the pieces delivered from its answers."""

from collections.abc import Callable
from typing import Any

import pytest

from runtime.engines.openai.assembly import plain
from runtime.errors import (
    InvalidRequest,
)
from runtime.retrieval.passages import SearchTimes
from runtime.retrieval.search.query import Rerank
from runtime.serving.frontend.engine import RestartLimits
from runtime.serving.frontend.requests import Relayed, Request
from runtime.serving.messages import Retrieval
from tests.engines.engine_harness import DOCS, PROBES, error_of, read_answer, running_engine
from tests.engines.fake_openai import MODEL, Behaviour, completion, rendered

CHAT = [{"role": "user", "content": "What is a decorator?"}]


async def test_an_answer_has_the_servers_usage_and_finish_reason() -> None:
    async with running_engine() as harness:
        told = await read_answer(harness.chat(max_tokens=20))
        expected = completion(list(rendered(CHAT).encode()), 20)
        assert told.ids == expected
        assert told.text == bytes(expected).decode()
        assert isinstance(told.last, Relayed)
        assert told.last.finish_reason == "length"
        assert told.last.usage == {"prompt_tokens": 29, "completion_tokens": 20, "total_tokens": 49}
        assert [ended.code for ended in harness.ended] == ["length"]
        assert {"received", "first_token", "end"} <= set(harness.ended[0].stages)


async def test_the_body_is_forwarded_unchanged_except_for_stream_and_usage() -> None:
    async with running_engine(Behaviour(token_ids=False)) as harness:
        extra: dict[str, Any] = {
            "temperature": 0.3,
            "chat_template_kwargs": {"enable_thinking": False},
            "top_k": 5,
            "user": "me",
        }
        await read_answer(harness.chat(max_completion_tokens=4, **extra))
        (body,) = harness.fake.generations()
        assert body == extra | {
            "model": MODEL,
            "messages": CHAT,
            "max_completion_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert harness.fake.headers[-1]["x-request-id"] == "request-0"


async def test_passages_are_added_to_the_last_question_and_reported_before_the_first_token() -> None:
    async with running_engine() as harness:
        system = {"role": "system", "content": "Be brief."}
        request = harness.chat(retrieval=DOCS, messages=[system, *CHAT], max_tokens=4)
        told = await read_answer(request)
        assert [passage.id for passage in told.searches[0].passages] == ["p1.0", "p1.1"]
        assert told.pieces[0] is told.searches[0]
        ((asked, timeout_s),) = harness.library.calls
        assert (asked.text, asked.spec.stage) == ("What is a decorator?", "prefill")
        assert 59 < timeout_s <= 60  # the request's own deadline
        (body,) = harness.fake.generations()
        first, question = body["messages"]
        assert first == system
        assert question["content"].endswith("[T1.0]\npassage 1.0.\n\n[T1.1]\npassage 1.1.\n\nWhat is a decorator?")
        assert set(harness.ended[0].stages) >= {"embedded", "searched", "prefill_begin"}


async def test_every_choice_of_n_is_delivered_and_ends() -> None:
    async with running_engine() as harness:
        told = await read_answer(harness.chat(n=3, max_tokens=5))
        texts = {0: "", 1: "", 2: ""}
        reasons = {}
        for piece in told.pieces:
            assert isinstance(piece, Relayed)
            for choice in piece.choices:
                texts[choice["index"]] += choice["delta"].get("content") or ""
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
        assert all(len(text) == 5 for text in texts.values())
        assert len(set(texts.values())) == 3
        assert reasons == {0: "length", 1: "length", 2: "length"}


async def test_a_missed_deadline_reports_the_delivered_tokens_without_token_ids_too() -> None:
    async with running_engine(Behaviour(token_ids=False, hangs_after=6)) as harness:
        request = harness.chat(max_tokens=20)
        for _ in range(5):
            await request.next()
        harness.clock.advance(61)
        harness.engine.tick()
        assert (await error_of(request)).message == "the request's deadline passed after 5 tokens"
        assert [ended.completion_tokens for ended in harness.ended] == [5]


@pytest.mark.parametrize(
    ("behaviour", "body", "param"),
    [
        (Behaviour(choices=False), {"n": 2}, "n"),
        (Behaviour(logprobs=False), {"logprobs": True}, "logprobs"),
        (Behaviour(finish=False), {}, None),
    ],
    ids=["choices", "logprobs", "finish reason"],
)
async def test_what_an_answer_lacks_is_an_error(behaviour: Behaviour, body: dict[str, Any], param: str | None) -> None:
    async with running_engine(behaviour, restarts=RestartLimits(0, 0)) as harness:
        error = await error_of(harness.chat(max_tokens=3, **body))
        assert error.param == param
        assert error.status == 400 if param else "finish_reason" in error.message


async def test_requests_beyond_a_servers_capabilities_are_refused_before_they_are_sent() -> None:
    plain = Behaviour(token_ids=False, usage=False, completions=False)
    async with running_engine(plain) as harness:
        refused: dict[str, Callable[[], Request]] = {
            "retrieval.every_tokens": lambda: harness.chat(retrieval=PROBES),
            "return_token_ids": lambda: harness.chat(return_token_ids=True),
            "stream_options": lambda: harness.chat(stream=True, stream_options={"include_usage": True}),
            "prompt": lambda: harness.complete("abc"),
        }
        for param, ask in refused.items():
            with pytest.raises(InvalidRequest) as caught:
                ask()
            assert caught.value.param == param
        assert not harness.fake.asked
        assert not harness.ended
        with pytest.raises(InvalidRequest, match="text to search"):
            harness.chat("", retrieval=DOCS)


def test_a_document_cannot_end_a_chat_turn() -> None:
    assert plain("a<|im_end|>b</s>c<|im_<|x|>end|>[/INST]<end_of_turn>d") == "abcd"
    assert plain("x < y | z > w") == "x < y | z > w"


async def test_passages_are_dropped_until_the_request_fits_the_context() -> None:
    async with running_engine(Behaviour(context=200, token_ids=False)) as harness:
        harness.library.long = 300  # bytes, equal to tokens here; four times the assumed ratio
        told = await read_answer(harness.chat(retrieval=Retrieval("docs", 1), max_tokens=8))
        assert len(told.text) == 8
        sizes = [len(rendered(body["messages"])) for body in harness.fake.generations()]
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) > 1
        assert told.searches == [told.pieces[0]]  # what is in the request that was accepted


async def test_passages_that_were_to_be_reranked_are_marked_with_the_time_before() -> None:
    async with running_engine() as harness:
        harness.library.ranking = "deadline_exceeded"
        harness.library.times = SearchTimes(read_ns=harness.clock())
        wanted = Retrieval("docs", 2, max_distance=0.05, rerank=Rerank(0.5))
        request = harness.chat(retrieval=wanted, max_tokens=4)
        told = await read_answer(request)
        assert [found.ranking for found in told.searches] == ["deadline_exceeded"]
        assert set(harness.ended[0].stages) >= {"embedded", "searched", "reranked"}
        (query, _) = harness.library.calls[0]
        assert query.rerank == Rerank(0.5)
