"""Reranking over HTTP: /v1/rerank, searches, vector stores and responses of OpenAI's unmodified client."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from runtime.errors import RerankerUnreachable
from runtime.retrieval.attributes.filters import AttributeBinding, decode_filter, parse_filter
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.embedding.model_directory import read_model_directory
from runtime.retrieval.passages import Passage
from runtime.retrieval.reranking.cross_encoder import CrossEncoder
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.search.query import Query, Rerank
from runtime.serving.http.access import Access
from runtime.serving.http.ranking import Ranker
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster, FakeSearch
from tests.frontend.request_errors import assert_error
from tests.retrieval.tiny_model import write_tiny_cross_encoder

TEXTS = ("dog rates", "rates rise", "cat", "cat sleeps")
FOUND = [Passage(f"p{number}", "", 0.1 * number, text) for number, text in enumerate(TEXTS)]
KEYS = ("0" * 20, "1" * 20)
TENANT = Access({"docs": AttributeBinding("tenant", "acme")})


class Faulty(CrossEncoder):
    """A cross-encoder that fails if a test sets it."""

    error: Exception | None = None

    def batches(self, query: str, texts: Any) -> Any:
        if self.error is not None:
            raise self.error
        return super().batches(query, texts)


@pytest.fixture(scope="module")
def ended() -> list[tuple[str, int]]:
    return []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    return Faulty(read_model_directory(write_tiny_cross_encoder(tmp_path_factory.mktemp("models") / "tiny-ranker")))


@pytest.fixture(scope="module")
def cluster(model: Faulty, ended: list[tuple[str, int]]) -> Iterator[Cluster]:
    reranking = Reranking(model, 20, lambda outcome, pairs, seconds: ended.append((outcome, pairs)))
    settings = Settings(
        "tiny", {"docs": 64, "bare": 0}, max_k=20, max_prompt_bytes=100, api_keys=KEYS, access={KEYS[1]: TENANT},
        ranker=Ranker("tiny-ranker", 30.0),
    )  # fmt: skip
    with Cluster(
        settings=settings,
        search=FakeSearch(FOUND, CollectionSummary(True, dim=64, metric="cosine")),
        reranking=reranking,
    ) as made:
        yield made
    reranking.close()


@pytest.fixture
def http(cluster: Cluster, model: Faulty, ended: list[tuple[str, int]]) -> Iterator[httpx.Client]:
    model.error = None
    ended.clear()
    with cluster.http() as client:
        client.headers["authorization"] = f"Bearer {KEYS[0]}"
        yield client


@pytest.fixture
def client(cluster: Cluster, http: httpx.Client) -> Iterator[openai.OpenAI]:
    with cluster.client(KEYS[0]) as made:
        yield made


def asked(cluster: Cluster) -> Query:
    found = cluster.search.calls[-1]
    assert isinstance(found, Query)
    return found


# ---- /v1/rerank


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_returned_by_relevance(http: httpx.Client, ended: Any, path: str) -> None:
    documents = ["rates rise", {"text": "cat sleeps"}, "cat"]
    body = {"model": "tiny-ranker", "query": "cat sleeps", "documents": documents}
    answer = http.post(path, json=body)
    found = answer.json()
    assert answer.status_code == 200
    assert list(found) == ["id", "model", "results", "usage"]
    assert (found["id"], found["model"]) == (answer.headers["x-request-id"], "tiny-ranker")
    assert [(one["index"], one["document"]) for one in found["results"]] == [
        (1, {"text": "cat sleeps"}), (2, {"text": "cat"}), (0, {"text": "rates rise"})
    ]  # fmt: skip
    scores = [one["relevance_score"] for one in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert found["usage"] == {"prompt_tokens": 20, "total_tokens": 20}
    assert ended == [("reranked", 3)]


def test_top_n_documents_are_returned_without_their_texts_on_request(http: httpx.Client) -> None:
    body: dict[str, Any] = {"query": "cat", "documents": ["dog", "cat", "rates"], "return_documents": False}
    for top_n, count in ((1, 1), (0, 3), (9, 3), (None, 3)):
        results = http.post("/v1/rerank", json=body | {"top_n": top_n}).json()["results"]
        assert (len(results), results[0]["index"], list(results[0])) == (count, 1, ["index", "relevance_score"])


def test_fields_without_effect_are_accepted_and_long_queries_are_not(http: httpx.Client) -> None:
    body: dict[str, Any] = {"query": "cat", "documents": ["dog"]}
    neutral = {"truncate_prompt_tokens": -1, "rank_fields": ["text"], "user": "me", "priority": 0, "truncation": True}
    assert http.post("/v1/rerank", json=body | neutral).status_code == 200
    assert http.post("/v1/rerank", json=body | {"documents": ["a"] * 1024}).status_code == 200
    answer = http.post("/v1/rerank", json=body | {"query": "x" * 101})
    assert_error(answer, 400, "invalid_request", "query", "query has 101 bytes, the limit is 100")


def test_another_model_and_a_node_without_reranker_are_404(http: httpx.Client) -> None:
    body = {"model": "other", "query": "cat", "documents": ["dog"]}
    answer = http.post("/v1/rerank", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "served: 'tiny-ranker'" in answer.json()["error"]["message"]
    with Cluster() as plain, plain.http() as there:
        answer = there.post("/v1/rerank", json=body)
        assert answer.status_code == 404
        assert "no reranker: set model in [rerank]" in answer.json()["error"]["message"]
        for path, wanted in (
            ("/v1/retrieval", {"rerank": True}),
            ("/v1/chat/completions", {"retrieval": {"rerank": True}}),
        ):
            sent = (
                {"query": "cat"}
                if path == "/v1/retrieval"
                else {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
            )
            answer = there.post(path, json=sent | wanted)
            assert (answer.status_code, answer.json()["error"]["param"][-6:]) == (400, "rerank")


# ---- searches


def test_a_search_with_rerank_fetches_more_and_returns_the_best(cluster: Cluster, http: httpx.Client) -> None:
    answer = http.post(
        "/v1/retrieval", json={"collection": "docs", "query": "cat sleeps", "k": 2, "rerank": True}
    ).json()
    assert [(one["id"], one["distance"]) for one in answer["passages"]] == [("p3", pytest.approx(0.3)), ("p2", 0.2)]
    assert answer["passages"][0]["relevance_score"] > answer["passages"][1]["relevance_score"] > 0
    assert answer["reranked"] is True
    assert asked(cluster).spec.k == 8
    trace = http.get(f"/v1/traces/{answer['id']}").json()
    assert [stage["name"] for stage in trace["stages"]] == [
        "queue", "embed", "retrieval", "passages", "rerank", "respond",
    ]  # fmt: skip


def test_after_the_time_of_a_request_the_order_stays_and_is_marked(http: httpx.Client, ended: Any) -> None:
    body = {"collection": "docs", "query": "cat sleeps", "k": 2, "rerank": {"timeout_s": 1e-9}}
    answer = http.post("/v1/retrieval", json=body).json()
    assert [one["id"] for one in answer["passages"]] == ["p0", "p1"]
    assert (answer["reranked"], answer["rerank_error"]) == (False, "deadline_exceeded")
    assert ended == [("late", 4)]


# ---- OpenAI's client


def test_stores_are_searched_with_the_nodes_reranker_unless_none_is_named(
    client: openai.OpenAI, cluster: Cluster
) -> None:
    for ranker in ("auto", "default-2024-11-15", "default-2024-08-21", "tiny-ranker", None):
        options: Any = openai.NOT_GIVEN if ranker is None else {"ranker": ranker}
        page = client.vector_stores.search("docs", query="cat sleeps", max_num_results=2, ranking_options=options)
        assert [one.file_id for one in page.data] == ["p3", "p2"]
        assert page.data[0].score > page.data[1].score > 0
        assert page.reranked is True  # type: ignore[attr-defined]
        assert asked(cluster).spec.k == 8
    page = client.vector_stores.search("docs", query="cat", max_num_results=2, ranking_options={"ranker": "none"})
    assert [(one.file_id, one.score) for one in page.data] == [("p0", 1.0), ("p1", 0.9)]
    assert not hasattr(page, "reranked")
    assert asked(cluster).spec.k == 2
    with pytest.raises(openai.BadRequestError, match=r"ranker 'other' is unknown; known: none, auto, .*, tiny-ranker"):
        client.vector_stores.search("docs", query="cat", ranking_options={"ranker": "other"})  # type: ignore[arg-type]


def test_the_threshold_is_one_of_relevance_and_not_applied_to_other_scores(
    client: openai.OpenAI, model: Faulty
) -> None:
    every = client.vector_stores.search("docs", query="cat sleeps").data
    least = every[1].score - 1e-9
    page = client.vector_stores.search("docs", query="cat sleeps", ranking_options={"score_threshold": least})
    assert [one.file_id for one in page.data] == ["p3", "p2"]
    model.error = RerankerUnreachable("down")
    page = client.vector_stores.search("docs", query="cat", ranking_options={"score_threshold": 0.99})
    assert [one.file_id for one in page.data] == ["p0", "p1", "p2", "p3"]
    assert (page.reranked, page.rerank_error) == (False, "reranker_unreachable")  # type: ignore[attr-defined]


def test_a_chat_is_reranked_before_prefill_and_not_in_probes(client: openai.OpenAI, cluster: Cluster) -> None:
    turns: Any = [{"role": "user", "content": "say=1"}]
    wish = {"retrieval": {"collection": "docs", "rerank": {"timeout_s": 3}}}
    client.chat.completions.create(model="tiny", messages=turns, extra_body=wish)
    found = cluster.players["prefill-0"].prefills[-1].generation.retrieval
    assert found is not None
    assert found.query("text", "prefill").rerank == Rerank(3.0)
    assert found.query("text", "decode").rerank is None


# ---- keys


def test_a_restricted_key_reranks_its_own_documents_only(http: httpx.Client, cluster: Cluster) -> None:
    headers = {"authorization": f"Bearer {KEYS[1]}"}
    body = {"query": "cat sleeps", "k": 2, "rerank": True}
    assert http.post("/v1/retrieval", json=body, headers=headers).json()["reranked"] is True
    spec = asked(cluster).spec
    assert (spec.k, spec.flow) == (8, 2)
    assert decode_filter(spec.filter) == parse_filter({"type": "eq", "key": "tenant", "value": "acme"})
    other = body | {"collection": "bare"}
    assert http.post("/v1/retrieval", json=other, headers=headers).status_code == 403
    assert http.post("/v1/rerank", json={"query": "a", "documents": ["b"]}, headers=headers).status_code == 200
    assert (
        http.post("/v1/rerank", json={"query": "a", "documents": ["b"]}, headers={"authorization": ""}).status_code
        == 401
    )
