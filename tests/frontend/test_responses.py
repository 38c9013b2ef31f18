"""OpenAI's unmodified client requests responses with file search, streams, continues, reads and deletes them."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from runtime.errors import InvalidRequest
from runtime.retrieval.stores.catalogue import Catalogue
from runtime.retrieval.stores.records import StoredResponse, UnknownObject
from runtime.retrieval.stores.responses import TTL_S, ResponseStore
from runtime.serving.http.citations import Citation, Citations
from runtime.serving.http.routes.responses_body import parse_responses
from runtime.serving.http.service import Settings
from runtime.serving.messages import Generation
from tests.frontend.cluster import Cluster
from tests.frontend.fake_workers import run
from tests.frontend.store_node import store_node
from tests.frontend.test_store_tenants import SETTINGS, clients_of
from tests.frontend.test_stores import upload
from tests.frontend.test_vector_stores import Stand

SEARCH: Any = [{"type": "file_search", "vector_store_ids": ["docs"], "max_num_results": 2}]
CITING = "answer=The_with_statement_wraps_a_block._Nothing_of_it_is_here._The_try_statement_handles_exceptions"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    stand = Stand()
    settings = Settings("tiny", {"docs": 64, "bare": 0}, max_k=20)
    with Cluster(settings=settings, search=stand) as made:
        yield made


def generation(cluster: Cluster) -> Generation:
    """What the workers got last."""
    return cluster.players["prefill-0"].prefills[-1].generation


def test_a_response_without_tools_has_one_message(client: openai.OpenAI, cluster: Cluster) -> None:
    made = client.responses.create(
        model="tiny", input="say=3", instructions="Be brief.", temperature=0, top_p=0.5, max_output_tokens=9,
        metadata={"a": "b"},
    )  # fmt: skip
    assert made.output_text == "w0 w1 w2 "
    assert (made.status, made.metadata, made.instructions) == ("completed", {"a": "b"}, "Be brief.")
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (3, 3)
    assert made.usage.input_tokens_details.cached_tokens == 2
    sent = generation(cluster)
    assert [(turn.role, turn.content) for turn in sent.messages] == [("system", "Be brief."), ("user", "say=3")]
    assert (sent.sampling.temperature, sent.sampling.top_p, sent.sampling.max_tokens) == (0.0, 0.5, 9)
    assert sent.retrieval is None


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    made = client.responses.create(model="tiny", input="say=9", max_output_tokens=2)
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"


def test_messages_of_all_roles_and_parts_are_accepted(client: openai.OpenAI, cluster: Cluster) -> None:
    turns: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "file_search_call", "id": "fs_1", "queries": ["one"], "status": "completed"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "two", "annotations": []}]},
        {"role": "user", "content": "say=1"},
    ]
    client.responses.create(model="tiny", input=turns)
    assert [(turn.role, turn.content) for turn in generation(cluster).messages] == [
        ("system", "Be brief."), ("user", "one"), ("assistant", "two"), ("user", "say=1")
    ]  # fmt: skip


def test_a_stream_has_openais_events_in_order_and_ends_with_the_whole_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="tiny", input=CITING, tools=SEARCH, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:9] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.file_search_call.in_progress",
        "response.file_search_call.searching",
        "response.file_search_call.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"
    ]  # fmt: skip
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == deltas
    assert client.responses.retrieve(last.response.id).output == last.response.output
    added: list[Any] = [event.annotation for event in events if event.type == "response.output_text.annotation.added"]
    message = last.response.output[1]
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    assert [one.index for one in added] == [getattr(one, "index") for one in message.content[0].annotations]  # noqa: B009
    assert len(added) == 2
    first_annotation = kinds.index("response.output_text.annotation.added")
    assert first_annotation < len(kinds) - 6, "a sentence is cited once it is complete, not at the end"


def test_a_failure_within_a_stream_is_an_event_and_one_before_it_a_status(client: openai.OpenAI) -> None:
    *_, last = client.responses.create(model="tiny", input="fail=2", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "the fake failed"
    with pytest.raises(openai.BadRequestError, match="refused: context_length_exceeded"):
        client.responses.create(model="tiny", input="refuse=context_length_exceeded", stream=True)


def test_the_search_is_announced_while_it_runs(client: openai.OpenAI, cluster: Cluster) -> None:
    with client.responses.create(model="tiny", input="hang=prefill", tools=SEARCH, stream=True) as stream:
        kinds = [event.type for _, event in zip(range(5), stream, strict=False)]
        assert kinds[-1] == "response.file_search_call.searching"
        assert not cluster.players["decode-0"].held
    cluster.wait(lambda: not cluster.held())
    *_, last = client.responses.create(model="tiny", input="refuse=context_length_exceeded", tools=SEARCH, stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == (
        "invalid_prompt", "refused: context_length_exceeded"
    )  # fmt: skip


def test_every_field_of_openais_client_is_known() -> None:
    for name in get_type_hints(ResponseCreateParamsBase):
        with contextlib.suppress(InvalidRequest):
            assert parse_responses(msgspec.json.encode({"model": "m", "input": "i", name: None}))
        with pytest.raises(InvalidRequest) as found:
            parse_responses(msgspec.json.encode({"model": 1, "input": "i", name: {"unlikely": 1}}))
        assert "unknown field" not in found.value.message


def test_stored_responses_are_read_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model="tiny", input="say=1")
    assert client.responses.retrieve(made.id).output_text == made.output_text
    client.responses.delete(made.id)
    for call in (lambda: client.responses.retrieve(made.id), lambda: client.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="tiny", input="say=1", previous_response_id=made.id)
    assert refused.value.param == "previous_response_id"
    unstored = client.responses.create(model="tiny", input="say=1", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_fields_with_no_effect_are_accepted(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="tiny", input="say=1", background=False, truncation="disabled", user="u", service_tier="auto",
        text={"format": {"type": "text"}}, parallel_tool_calls=True, tool_choice="auto", prompt_cache_key="k",
    )  # fmt: skip
    assert made.status == "completed"


def test_tool_choice_none_searches_nothing_and_a_threshold_becomes_a_distance(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    client.responses.create(model="tiny", input="say=1", tools=SEARCH, tool_choice="none")
    assert generation(cluster).retrieval is None
    for threshold, distance in ({"score_threshold": 0.75}, 0.25), ({"score_threshold": -0.25}, 1.25), ({}, 1e30):
        ranked: Any = SEARCH[0] | {"ranking_options": {"ranker": "auto"} | threshold}
        client.responses.create(model="tiny", input="say=1", tools=[ranked])
        retrieval = generation(cluster).retrieval
        assert retrieval is not None
        assert (retrieval.max_distance, retrieval.k, retrieval.quote) == (distance, 2, True)


def test_the_text_of_a_file_is_a_part_of_its_message_within_the_limit_of_a_prompt(tmp_path: Path) -> None:
    with store_node(tmp_path, Settings("tiny", {}, max_prompt_bytes=500)) as cluster, cluster.client() as client:
        ids = [upload(client), upload(client, "long.txt", b"x" * 600), upload(client, "empty.txt", b" ")]
        asked: Any = [
            [
                {
                    "role": "user",
                    "content": [{"type": "input_file", "file_id": id}, {"type": "input_text", "text": "say=1"}],
                }
            ]
            for id in (*ids, "file-none")
        ]
        first = client.responses.create(model="tiny", input=asked[0])
        (turn,) = generation(cluster).messages
        assert turn.content.startswith("[leave.md]\n")
        assert "Parental leave is twelve weeks long." in turn.content
        assert turn.content.endswith("Friday.\n\nsay=1")
        client.responses.create(model="tiny", input="say=2", previous_response_id=first.id)
        assert generation(cluster).messages[0].content == turn.content
        with pytest.raises(openai.BadRequestError, match=r"input has .* bytes, the limit is 500"):
            client.responses.create(model="tiny", input=asked[1])
        with pytest.raises(openai.BadRequestError, match="cannot be read: there is no text in it"):
            client.responses.create(model="tiny", input=asked[2])
        with pytest.raises(openai.NotFoundError, match="no file has the id 'file-none'") as unknown:
            client.responses.create(model="tiny", input=asked[3])
        assert unknown.value.param == "input"
        tool: Any = {"type": "file_search", "vector_store_ids": ["vs_none"]}
        with pytest.raises(openai.NotFoundError, match="no vector store has the id 'vs_none'") as unknown:
            client.responses.create(model="tiny", input="say=1", tools=[tool])
        assert unknown.value.param == "tools[0].vector_store_ids"


def test_a_tenants_responses_and_stores_are_its_own(tmp_path: Path) -> None:
    with store_node(tmp_path, SETTINGS) as cluster, clients_of(cluster) as (_, acme, blue):
        store = acme.vector_stores.create().id
        tool: Any = {"type": "file_search", "vector_store_ids": [store]}
        made = acme.responses.create(model="tiny", input="say=1", tools=[tool])
        part: Any = {"type": "input_file", "file_id": upload(acme)}
        for call in (
            lambda: blue.responses.create(model="tiny", input=[{"role": "user", "content": [part]}]),
            lambda: blue.responses.retrieve(made.id),
            lambda: blue.responses.delete(made.id),
            lambda: blue.responses.create(model="tiny", input="say=1", previous_response_id=made.id),
            lambda: blue.responses.create(model="tiny", input="say=1", tools=[tool]),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert acme.responses.retrieve(made.id).id == made.id


# ---- citations


def test_a_sentence_without_a_run_of_a_passage_cites_nothing() -> None:
    citations = Citations(["one two three four five six", "alpha beta"])
    text = "Seven two three eight. One two three nine! Alpha beta? Yes. two THREE, four five"
    found = [*citations.add(text), *citations.finish()]
    assert found == [Citation(1, text.index("?") + 1), Citation(0, len(text))]


@given(st.text("ab .\n", max_size=60), st.integers(1, 7))
def test_citations_do_not_depend_on_how_the_text_is_cut_and_stand_behind_a_word_or_a_mark(text: str, size: int) -> None:
    passages = ["a b a b a a b", "b b b b"]
    whole, parts = Citations(passages), Citations(passages)
    at_once = [*whole.add(text), *whole.finish()]
    cut = [one for at in range(0, len(text), size) for one in parts.add(text[at : at + size])] + [*parts.finish()]
    assert cut == at_once
    for one in at_once:
        assert 0 < one.position <= len(text)
        assert re.search(r"\S$", text[: one.position])


# ---- storage


def stored(number: int, tenant: str = "") -> StoredResponse:
    return StoredResponse(
        id=f"resp_{number}", tenant=tenant, created_at=1000 + number, body=msgspec.Raw(b"{}"), turns=[]
    )


def kept(store: ResponseStore, tenant: str, *numbers: int) -> list[int]:
    """Return those of the responses that are stored."""

    async def find() -> list[int]:
        found = []
        for number in numbers:
            with contextlib.suppress(UnknownObject):
                await store.get(f"resp_{number}", tenant)
                found.append(number)
        return found

    return list(run(find()))


def test_stored_responses_are_bounded_in_number_and_time() -> None:
    now = [1000.0]
    store = ResponseStore(Catalogue(None), lambda: now[0], max_responses=4)
    for number in range(6):
        run(store.put(stored(number)))
    assert kept(store, "", *range(6)) == [2, 3, 4, 5]
    now[0] = 1004.0 + TTL_S
    assert kept(store, "", *range(6)) == [5]


def test_a_tenant_that_stores_much_removes_only_its_own_responses() -> None:
    store = ResponseStore(Catalogue(None), lambda: 1000.0, max_responses=5)
    run(store.put(stored(0, "acme")))
    for number in range(1, 9):
        run(store.put(stored(number, "blue")))
    assert kept(store, "acme", 0) == [0]
    assert kept(store, "blue", *range(9)) == [7, 8]
