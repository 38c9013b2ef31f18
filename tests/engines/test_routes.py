"""HTTP routes with an OpenAI server as the engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.node.config import HttpSection
from runtime.serving.frontend.answer_cache import AnswerCache
from runtime.serving.frontend.requests import Relayed
from runtime.serving.http.app import create_app
from runtime.serving.http.responses import ChatResponse
from runtime.serving.http.service import Service, Settings
from runtime.testing.waiting import until
from tests.engines.engine_harness import EngineHarness, run_checks, running_engine
from tests.engines.fake_openai import MODEL, Behaviour
from tests.frontend import answer_cache_harness
from tests.frontend.cluster import metrics

Json = dict[str, Any]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is a decorator?"}], "max_tokens": 6}
DOCS = {"collection": "docs", "k": 2}


@asynccontextmanager
async def client(
    *behaviours: Behaviour, answers: AnswerCache | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, EngineHarness]]:
    async with running_engine(*behaviours) as harness:
        settings = Settings(
            model=MODEL, collections={"docs": 4}, context_tokens=4096, http=HttpSection(model_aliases=("gpt-4o",))
        )
        service = Service(harness.engine, harness.library, metrics, answers)
        app = create_app(service, settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as made:
            yield made, harness


def events(answer: httpx.Response) -> list[Json]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_whole_answer_equals_its_stream() -> None:
    async with client() as (http, _):
        read_answer = (await http.post("/v1/chat/completions", json=CHAT | {"retrieval": DOCS})).json()
        message = read_answer["choices"][0]["message"]
        assert message["role"] == "assistant"
        assert len(message["content"]) == 6
        assert read_answer["choices"][0]["finish_reason"] == "length"
        assert read_answer["usage"]["completion_tokens"] == 6
        assert len(read_answer["retrieval"]["passages"]) == 2
        assert {"embed", "retrieval", "prefill", "ttft", "e2e"} <= set(read_answer["timings"])
        assert read_answer["id"].startswith("chatcmpl-")
        streamed = await http.post(
            "/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        )
        first, *chunks, usage = events(streamed)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {chunk["id"] for chunk in chunks} == {first["id"]}
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert "timings" in chunks[-1]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 6


async def test_continuous_usage_accumulates_over_the_requests_of_an_answer() -> None:
    async with client() as (http, _):
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        for retrieval in (None, DOCS | {"every_tokens": 3}):
            body = CHAT | options | ({"retrieval": retrieval} if retrieval else {})
            counted = [event["usage"] for event in events(await http.post("/v1/chat/completions", json=body))]
            told = [usage["completion_tokens"] for usage in counted if usage]
            assert told == sorted(told)
            assert {1, 3, 5, 6} <= set(told)
            assert len({usage["prompt_tokens"] for usage in counted if usage}) == 1
            assert all(
                usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in counted[1:]
            )


def test_tool_call_deltas_are_merged_by_index() -> None:
    response = ChatResponse("r", MODEL, 0)
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "search", "arguments": ""}}
    choices: list[Json] = [{"index": 0, "delta": {"role": "assistant", "tool_calls": [call]}, "finish_reason": None}]
    for part in ('{"q": ', '"x"}'):
        more = {"index": 0, "function": {"arguments": part}}
        choices.append({"index": 0, "delta": {"tool_calls": [more]}, "finish_reason": None})
    other = {"index": 1, "id": "call-2", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    choices.append({"index": 0, "delta": {"tool_calls": [other]}, "finish_reason": "tool_calls"})
    for choice in choices:
        response.add(Relayed("r", "", (), "stop" if choice["finish_reason"] else None, choices=(choice,)))
    (choice,) = response.body()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}},
        {"id": "call-2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
    ]


async def test_a_completion_works_whole_and_streamed() -> None:
    async with client() as (http, _):
        body = {"model": MODEL, "prompt": "def f(", "max_tokens": 5}
        read_answer = (await http.post("/v1/completions", json=body)).json()
        assert read_answer["object"] == "text_completion"
        streamed = events(await http.post("/v1/completions", json=body | {"stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == read_answer["choices"][0]["text"]


async def test_content_parts_tools_and_unknown_fields_are_forwarded() -> None:
    async with client() as (http, harness):
        turns = [
            {"role": "user", "content": [{"type": "text", "text": "What is in it?"}]},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function"}]},
            {"role": "tool", "content": "nothing", "tool_call_id": "1"},
        ]
        body = {"model": MODEL, "messages": turns, "max_tokens": 2, "mm_processor_kwargs": {"x": 1}, "top_k": 3}
        hints = {"priority": 2, "nvext": {"agent_hints": {"priority": 1, "osl": 9}, "router": {"ttft_target": 1}}}
        body |= hints
        answer = await http.post("/v1/chat/completions", json=body | {"retrieval": DOCS})
        assert answer.status_code == 200
        assert harness.library.calls[0][0].text == "What is in it?"
        (sent,) = harness.fake.generations()
        assert sent["messages"][1:] == turns[1:]
        (block, part) = sent["messages"][0]["content"]
        assert part == {"type": "text", "text": "What is in it?"}
        assert "passage 1.0." in block["text"]
        assert (sent["mm_processor_kwargs"], sent["top_k"]) == ({"x": 1}, 3)
        assert {name: sent[name] for name in hints} == hints
        assert "retrieval" not in sent


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_a_request_with_an_alias_reaches_the_server_with_the_models_own_name(path: str) -> None:
    asked: dict[str, Json] = {
        "/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}
    }  # fmt: skip
    async with client() as (http, harness):
        answer = await http.post(path, json=asked[path] | {"model": "gpt-4o"})
        assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
        assert [sent["model"] for sent in harness.fake.generations()] == [MODEL]


async def test_errors_are_http_errors_before_the_first_token_and_events_afterwards() -> None:
    async with client(Behaviour(breaks_after=4)) as (http, harness):
        broken = await http.post("/v1/chat/completions", json=CHAT | {"stream": True, "n": 2})
        *_, last = events(broken)
        assert last["error"]["code"] == "worker_lost"
        refused = await http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unreachable"
        health = await http.get("/health")
        assert (health.status_code, health.json()["missing"]) == (503, ["engine"])
        harness.fake.behaviour.breaks_after = None
        harness.clock.advance(60)
        await run_checks(harness.engine.balancer)
        assert (await http.get("/health")).status_code == 200


async def test_a_cached_answer_equals_the_servers_and_any_relevant_change_misses(tmp_path: Path) -> None:
    cache = answer_cache_harness.CacheHarness(tmp_path / "answers")
    async with client(Behaviour(token_ids=False), answers=cache.answers) as (http, harness):
        first = (await http.post("/v1/chat/completions", json=CHAT)).json()
        await asyncio.to_thread(until, lambda: cache.counts["stored"] == 1)
        again = (await http.post("/v1/chat/completions", json=CHAT)).json()
        assert "cached" not in first
        assert again["cached"]["similarity"] > 0.99
        assert again["choices"] == first["choices"]
        assert again["usage"] == first["usage"]
        assert len(harness.fake.generations()) == 1
        streamed = events(await http.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        told = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed)
        assert told == first["choices"][0]["message"]["content"]
        await http.post("/v1/chat/completions", json=CHAT | {"top_k": 3})
        assert len(harness.fake.generations()) == 2
    cache.answers.close()


async def test_the_servers_cached_tokens_priority_and_hints_are_passed_on() -> None:
    async with client(Behaviour(cached_tokens=7)) as (http, harness):
        for retrieval in ({}, {"retrieval": DOCS | {"every_tokens": 3}}):  # one request, and several
            chat = (await http.post("/v1/chat/completions", json=CHAT | retrieval)).json()
            assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
        order = {"priority": -2, "nvext": {"agent_hints": {"priority": 3}, "annotations": ["x"]}}
        asked = {"model": MODEL, "input": "What is a decorator?", "max_output_tokens": 4} | order
        made = (await http.post("/v1/responses", json=asked)).json()
        assert made["usage"]["input_tokens_details"]["cached_tokens"] == 7
        assert {name: harness.fake.generations()[-1][name] for name in order} == order
