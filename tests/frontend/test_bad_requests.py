"""Malformed and invalid requests: each is a typed error that names the parameter."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ipc import SearchSpec
from runtime.errors import InvalidRequest, Unavailable
from runtime.retrieval.attributes.filters import filter_bytes
from runtime.serving.http.api_types import ChatBody, CompletionBody, RetrievalOptions
from runtime.serving.http.parsing import parse
from runtime.serving.http.retrieval_body import RetrievalBody
from runtime.serving.http.service import Settings
from runtime.serving.http.unsupported_fields import NEUTRAL
from tests.frontend.cluster import Cluster
from tests.frontend.fake_workers import PASSAGES
from tests.frontend.request_errors import CHAT, COMPLETION, SEARCH, SETTINGS, assert_error


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(settings=SETTINGS) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"model": }', b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 9000, b'{"a":' * 1500],
)
def test_malformed_json_is_refused(http: httpx.Client, body: bytes) -> None:
    assert_error(
        http.post("/v1/completions", content=body), 400, "invalid_request", message="the body is not valid JSON"
    )


@pytest.mark.parametrize(
    ("body", "message"), [("[]", "an array"), ("3", "a number"), ("null", "null"), ('"x"', "a string")]
)
def test_a_body_that_is_not_an_object_is_refused(http: httpx.Client, body: str, message: str) -> None:
    answer = http.post("/v1/completions", content=body)
    assert_error(answer, 400, "invalid_request", message=f"must be a JSON object, not {message}")


@pytest.mark.parametrize("field", sorted(NEUTRAL.keys() - ChatBody.model_fields))
def test_fields_of_other_servers_are_accepted_only_with_values_that_change_nothing(field: str) -> None:
    for value in (None, *NEUTRAL[field]):
        parse(ChatBody, json.dumps(CHAT | {field: value}).encode())
    with pytest.raises(InvalidRequest, match=f"^{field} is not supported"):
        parse(ChatBody, json.dumps(CHAT | {field: ["something", "else"]}).encode())


def test_a_content_part_contains_only_text_and_hints(http: httpx.Client) -> None:
    part = {"type": "text", "text": "say=1", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "name": "me", "content": [part]}
    assert http.post("/v1/chat/completions", json=CHAT | {"messages": [message]}).status_code == 200
    message["content"] = [part | {"annotations": [1]}]
    answer = http.post("/v1/chat/completions", json=CHAT | {"messages": [message]})
    assert_error(answer, 400, "invalid_request", "messages[0].content", "content parts with 'annotations'")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_a_body_that_a_web_page_could_send_without_preflight_is_refused(http: httpx.Client, kind: str) -> None:
    answer = http.post("/v1/completions", content=json.dumps(COMPLETION), headers={"content-type": kind})
    assert_error(answer, 415, "unsupported_media_type", message="send the header 'Content-Type: application/json'")


def test_the_type_of_a_body_may_name_its_charset(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=COMPLETION, headers={"content-type": "Application/JSON; charset=utf-8"})
    assert answer.status_code == 200


def test_an_unknown_collection_is_not_found_before_any_work_is_done(cluster: Cluster, http: httpx.Client) -> None:
    before = len(cluster.players["prefill-0"].prefills)
    answer = http.post("/v1/chat/completions", json=CHAT | {"retrieval": {"collection": "dogs"}})
    assert_error(
        answer, 404, "unknown_collection", "retrieval.collection", "no collection 'dogs' is loaded; loaded: docs"
    )
    assert_error(
        http.post("/v1/retrieval", json=SEARCH | {"collection": "dogs"}), 404, "unknown_collection", "collection"
    )
    assert len(cluster.players["prefill-0"].prefills) == before


def test_a_search_on_a_node_without_collections_is_not_found() -> None:
    with Cluster(settings=Settings("tiny")) as cluster, cluster.http() as http:
        answer = http.post("/v1/completions", json=COMPLETION | {"retrieval": {}})
    assert_error(answer, 404, "unknown_collection", "retrieval.collection", "this node has no collections")


def test_a_prompt_beyond_the_context_is_refused_with_size_and_limit(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=COMPLETION | {"prompt": [1] * 2040, "max_tokens": 9})
    assert_error(answer, 400, "context_length_exceeded", "max_tokens", "at least 2049 tokens, the model's")
    answer = http.post("/v1/responses", json={"model": "tiny", "input": "say=1", "max_output_tokens": 4000})
    assert_error(answer, 400, "context_length_exceeded", "max_output_tokens", "tokens, the model's context holds 2048")


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/audio/speech", "/v1/chat/completions/", "/docs", "/openapi.json", "/v1/%2e"]
)
def test_an_unknown_path_is_not_found(http: httpx.Client, path: str) -> None:
    assert_error(http.get(path), 404, "not_found")


# ---- search alone


def test_retrieval_accepts_text_or_a_vector(cluster: Cluster, http: httpx.Client) -> None:
    answer = http.post("/v1/retrieval", json=SEARCH | {"k": 2})
    found = answer.json()
    assert (found["object"], found["collection"]) == ("retrieval", "docs")
    assert found["id"].startswith("ret-")
    assert found["id"] == answer.headers["x-request-id"]
    assert found["passages"] == [
        {"id": passage.id, "title": passage.title, "distance": passage.distance, "text": passage.text}
        for passage in PASSAGES
    ]
    asked = cluster.search.calls[-1]
    assert (asked.spec, asked.text, asked.vector) == (SearchSpec("docs", 2), "with", None)
    assert cluster.search.timeout_s == 10.0
    http.post("/v1/retrieval", json=SEARCH | {"filter": {"type": "eq", "key": "page", "value": 3}})
    assert cluster.search.calls[-1].spec.filter == filter_bytes({"type": "eq", "key": "page", "value": 3})
    http.post("/v1/retrieval", json={"collection": "docs", "vector": [1, 2, 3, 4.5], "k": 1})
    asked = cluster.search.calls[-1]
    assert (asked.spec, asked.text, list(asked.vector)) == (SearchSpec("docs", 1), "", [1, 2, 3, 4.5])
    assert http.post("/v1/retrieval", json=SEARCH).json()["id"] != found["id"]


def test_errors_of_the_search_keep_their_status(cluster: Cluster, http: httpx.Client) -> None:
    try:
        cluster.search.error = Unavailable("no pool answers")
        answer = http.post("/v1/retrieval", json=SEARCH)
        assert_error(answer, 503, "unavailable", message="no pool answers")
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-request-id"].startswith("ret-")
        cluster.search.error = ZeroDivisionError("a secret of the house")
        answer = http.post("/v1/retrieval", json=SEARCH)
        assert_error(answer, 500, "internal_error", message="internal error")
        assert "secret" not in answer.text
        cluster.search.error = RuntimeError("can't start new thread")  # of an executor
        answer = http.post("/v1/retrieval", json=SEARCH)
        assert_error(answer, 503, "overloaded", message="the limit of processes and threads is reached")
        assert answer.headers["retry-after"] == "1"
    finally:
        cluster.search.error = None
    assert http.post("/v1/retrieval", json=SEARCH).status_code == 200


FILTERED = [
    (ChatBody, CHAT | {"retrieval": {"collection": "docs"}}, "retrieval"),
    (CompletionBody, COMPLETION | {"retrieval": {"collection": "docs"}}, "retrieval"),
    (RetrievalBody, SEARCH, ""),
]


@pytest.mark.parametrize(("kind", "body", "at"), FILTERED)
def test_an_invalid_filter_is_located_and_null_is_no_filter(kind: Any, body: dict[str, Any], at: str) -> None:
    def parsed(told: Any) -> Any:
        whole = body | ({at: body[at] | {"filter": told}} if at else {"filter": told})
        return parse(kind, json.dumps(whole).encode())

    wrongs: list[Any] = ["x", [], {"type": "like"}, {"type": "eq", "key": "k" * 10_000, "value": 1}]
    for wrong in wrongs:
        with pytest.raises(InvalidRequest) as caught:
            parsed(wrong)
        assert (caught.value.code, caught.value.param) == ("invalid_filter", f"{at}.filter".removeprefix("."))
    found = parsed(None)
    assert (found.retrieval if at else found).filter is None


@pytest.mark.parametrize(("kind", "body", "at"), FILTERED)
def test_hybrid_is_a_boolean_or_the_weight_of_keywords(kind: Any, body: dict[str, Any], at: str) -> None:
    def parsed(told: Any) -> Any:
        whole = body | ({at: body[at] | {"hybrid": told}} if at else {"hybrid": told})
        found = parse(kind, json.dumps(whole).encode())
        return found.retrieval.hybrid if at else found.hybrid

    assert [parsed(told) for told in (True, False, 1, 0, 0.25)] == [0.5, 0.0, 1.0, 0.0, 0.25]
    wrongs: list[Any] = ["yes", 1.5, -1, [], {}]
    for wrong in wrongs:
        with pytest.raises(InvalidRequest, match="between 0 and 1") as caught:
            parsed(wrong)
        assert caught.value.param == f"{at}.hybrid".removeprefix(".")


@pytest.mark.parametrize(("kind", "body"), [(ChatBody, CHAT), (CompletionBody, COMPLETION)])
def test_a_null_field_of_retrieval_counts_as_absent(kind: Any, body: dict[str, Any]) -> None:
    def parsed(retrieval: dict[str, Any]) -> Any:
        return parse(kind, json.dumps(body | {"retrieval": retrieval}).encode()).retrieval

    names = RetrievalOptions.model_fields.keys() - {"collection"}
    assert parsed({"collection": "docs"} | dict.fromkeys(names)) == parsed({"collection": "docs"})
