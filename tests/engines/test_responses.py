"""Responses with file search in front of an OpenAI server, by OpenAI's client: as in front of the node's own engine
(`tests/frontend/test_responses.py`)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.engines.engine_harness import SERVER_KINDS, EngineHarness
from tests.engines.fake_openai import MODEL, Behaviour
from tests.engines.test_routes import client

QUESTION = "What is a decorator?"
SEARCH: Any = [{"type": "file_search", "vector_store_ids": ["docs"], "max_num_results": 2}]
TEXTS = ("The with statement wraps a block.", "The try statement handles exceptions.")
CITING = "The with statement wraps a block. Nothing of it is here. The try statement handles exceptions"


@asynccontextmanager
async def node(behaviour: Behaviour = Behaviour()) -> AsyncIterator[tuple[openai.AsyncOpenAI, EngineHarness]]:  # noqa: B008
    """A node in front of a server, whose search finds `TEXTS`."""
    async with client(behaviour) as (http, harness):
        harness.library.texts = TEXTS
        http_client: Any = http  # its type is of httpx or of httpx2, by the version of openai
        base = "http://localhost/v1"
        yield openai.AsyncOpenAI(base_url=base, api_key="-", http_client=http_client, max_retries=0), harness


def say(harness: EngineHarness, text: str) -> None:
    """Let the server answer this, a word at a time."""
    words = [f"{word} " for word in text.split()]
    words[-1] = words[-1].rstrip()
    deltas = [{"role": "assistant", "content": ""}, *({"content": word} for word in words)]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices[-1]["finish_reason"] = "stop"
    harness.fake.says = [{"id": "x", "object": "chunk", "model": MODEL, "choices": [choice]} for choice in choices]


def prompt_of(harness: EngineHarness) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in harness.fake.generations()[-1]["messages"]]


@pytest.mark.parametrize("include", [True, False])
async def test_file_search_has_results_on_request_and_cites_sentences(include: bool) -> None:
    async with node() as (client, harness):
        say(harness, CITING)
        made = await client.responses.create(
            model=MODEL, input=QUESTION, tools=SEARCH, include=["file_search_call.results"] if include else [],
            instructions="Be brief.", temperature=0, top_p=0.5, max_output_tokens=40,
        )  # fmt: skip
        call, message = made.output
        assert (made.status, made.output_text) == ("completed", CITING)
        assert call.type == "file_search_call"
        assert (call.status, call.queries) == ("completed", [QUESTION])
        found = None if call.results is None else [(one.file_id, one.text, one.score) for one in call.results]
        assert found == ([("p1.0", TEXTS[0], 0.9), ("p1.1", TEXTS[1], 0.9)] if include else None)
        assert message.type == "message"
        assert message.content[0].type == "output_text"
        annotations = message.content[0].annotations
        cited = [(one.file_id, CITING[: one.index]) for one in annotations if one.type == "file_citation"]
        assert cited == [("p1.0", TEXTS[0]), ("p1.1", CITING)]
        (system, user), sent = prompt_of(harness), harness.fake.generations()[-1]
        assert system == ("system", "Be brief.")
        assert user[1].endswith(QUESTION)
        assert all(text in user[1] for text in TEXTS)
        assert (sent["temperature"], sent["top_p"], sent["max_tokens"]) == (0, 0.5, 40)
        assert (await client.responses.retrieve(made.id)).output == made.output


@pytest.mark.parametrize("kind", SERVER_KINDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_continues_with_the_passages_where_they_stood(kind: str, stream: bool) -> None:
    async with node(SERVER_KINDS[kind]) as (client, harness):
        first = await client.responses.create(
            model=MODEL, input=QUESTION, instructions="one", tools=SEARCH, max_output_tokens=20
        )
        before = prompt_of(harness)
        asked: Any = {"model": MODEL, "input": "And a class?", "instructions": "two", "previous_response_id": first.id}
        if stream:
            events = await client.responses.create(**asked, max_output_tokens=20, stream=True)
            *_, last = [event async for event in events]
            second = last.response
        else:
            second = await client.responses.create(**asked, max_output_tokens=20)
        assert prompt_of(harness) == [
            ("system", "two"), before[1], ("assistant", first.output_text), ("user", "And a class?")
        ]  # fmt: skip
        assert (second.previous_response_id, second.status) == (first.id, "incomplete")
        assert len(second.output_text) == 20
        third = await client.responses.create(model=MODEL, input="Why?", previous_response_id=second.id, store=False)
        assert [role for role, _ in prompt_of(harness)] == ["user", "assistant", "user", "assistant", "user"]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(third.id)


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_passages_that_the_answer_asks_for_can_be_cited(kind: str) -> None:
    async with node(SERVER_KINDS[kind]) as (client, harness):
        tool = [SEARCH[0] | {"every_tokens": 8}]
        made = await client.responses.create(
            model=MODEL, input=QUESTION, tools=tool, max_output_tokens=40, include=["file_search_call.results"]
        )
        assert len(harness.library.calls) > 1
        assert made.output[0].type == "file_search_call"
        assert len(made.output[0].results or []) > 2
        assert len(made.output_text) == 40


async def test_a_response_of_a_reasoning_server_counts_what_is_not_shown() -> None:
    async with node() as (client, harness):
        say(harness, "Forty two.")
        thinking: Any = {"index": 0, "delta": {"reasoning_content": "Let me see."}, "finish_reason": None}
        harness.fake.says.insert(1, {"choices": [thinking]})
        usage = {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}
        harness.fake.says.append(
            {"choices": [], "usage": usage | {"completion_tokens_details": {"reasoning_tokens": 4}}}
        )
        made = await client.responses.create(model=MODEL, input=QUESTION)
        assert made.output_text == "Forty two."
        assert made.usage is not None
        assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (9, 7, 16)
        assert made.usage.output_tokens_details.reasoning_tokens == 4
