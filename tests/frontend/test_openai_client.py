"""The official client works against the frontend, unchanged, and against an HTTP worker before it: beside what
`test_transcripts.py` has recorded of both."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.frontend.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(through: Path | None) -> Iterator[Cluster]:
    with Cluster(private=through) as cluster:
        yield cluster


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


DOCS = {"retrieval": {"collection": "docs", "k": 2, "every_tokens": 2}}


def test_continuous_usage_stats_adds_usage_to_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=ask("say=3"), stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts[-3:] == [1, 2, 3]
    assert last.usage.completion_tokens == 3


def test_token_ids_are_accepted_and_returned(cluster: Cluster, client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=3, extra_body=extra)
    sent = cluster.players["prefill-0"].prefills[-1].generation
    assert sent.prompt == (5, 6, 7)
    assert sent.sampling.ignore_eos
    assert answer.choices[0].token_ids == [100, 101, 102]  # type: ignore[attr-defined]
    assert answer.prompt_token_ids == [1, 2, 3]  # type: ignore[attr-defined]
    chunks = list(client.completions.create(model="tiny", prompt=[5], max_tokens=3, stream=True, extra_body=extra))
    assert chunks[0].prompt_token_ids == [1, 2, 3]  # type: ignore[attr-defined]
    assert [chunk.choices[0].token_ids for chunk in chunks[1:]] == [[100], [101], [102]]  # type: ignore[attr-defined]


def test_sampling_parameters_reach_the_workers_unchanged(cluster: Cluster, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ask("say=1"), temperature=0.5, top_p=0.25, seed=-1, stop="a", max_completion_tokens=7
    )
    assert answer._request_id == answer.id
    sampling = cluster.players["prefill-0"].prefills[-1].generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 2**63 - 1)
    assert (sampling.stop, sampling.max_tokens, sampling.ignore_eos) == (("a",), 7, False)


def test_without_a_seed_each_request_gets_its_own_and_openais_default_temperature(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    for _ in range(2):
        client.chat.completions.create(model="tiny", messages=ask("say=1"))
    first, second = (prefill.generation.sampling for prefill in cluster.players["prefill-0"].prefills[-2:])
    assert first.seed != second.seed
    assert (first.temperature, first.top_p) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "head_start_s", "expected"),
    [
        ({}, 0.0, 0),
        ({"priority": 3}, -3.0, 0),
        ({"nvext": {"agent_hints": {"priority": 5, "osl": 64, "speculative_prefill": True}}}, 5.0, 64),
        ({"nvext": {"agent_hints": {"strict_priority": 1, "priority": -1}, "annotations": []}}, 99_999.0, 0),
    ],
)
def test_priorities_become_the_head_start_of_a_prompt(
    cluster: Cluster, client: openai.OpenAI, fields: dict[str, Any], head_start_s: float, expected: int
) -> None:
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "say=1"}], extra_body=fields)
    sent = cluster.players["prefill-0"].prefills[-1].generation
    assert (sent.head_start_s, sent.expected_tokens) == (head_start_s, expected)


def test_roles_and_text_parts_become_messages(cluster: Cluster, client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "say="}, {"type": "text", "text": "1"}]
    client.chat.completions.create(
        model="tiny", messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    )
    turns = cluster.players["prefill-0"].prefills[-1].generation.messages
    assert [(turn.role, turn.content) for turn in turns] == [("system", "Be brief."), ("user", "say=1")]


def test_an_answer_with_retrieval_contains_passages_and_timings(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(model="tiny", messages=ask("say=3 probe=2"), extra_body=DOCS)
    assert answer.retrieval == {
        "collection": "docs",
        "passages": [
            {"id": "with-1", "title": "The with statement", "distance": 0.25, "at_token": 0},
            {"id": "try-2", "title": "The try statement", "distance": 0.5, "at_token": 0},
            {"id": "with-1", "title": "The with statement", "distance": 0.25, "at_token": 2},
        ],
    }
    assert answer.timings == {"ttft": 0.005, "e2e": 0.015, "decode": 0.01, "tpot": 0.005, "probe_stall": 0.0}


@pytest.mark.parametrize("off", [{"retrieval": False}, {"retrieval": None}, {}])
def test_retrieval_is_optional(cluster: Cluster, client: openai.OpenAI, off: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ask("say=1"), extra_body=off)
    assert not hasattr(answer, "retrieval")
    assert cluster.players["prefill-0"].prefills[-1].generation.retrieval is None


def test_an_error_within_a_stream_ends_it_with_an_error_event(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="tiny", messages=ask("fail=2"), stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(3)] == ["", "w0 ", "w1 "]
    with pytest.raises(openai.APIError, match="the fake failed"):
        next(stream)


def test_no_request_is_left_after_these_tests(cluster: Cluster) -> None:
    cluster.wait(lambda: not cluster.held())
