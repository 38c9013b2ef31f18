"""OpenAI's unmodified client lists collections as vector stores, searches them and requests embeddings."""

import base64
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from runtime.errors import EmbedderFailed, InvalidFilter, UnknownCollection
from runtime.node.config import HttpSection
from runtime.retrieval.attributes.filters import decode_filter
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.embedding.embedder import Embedder, HashingEmbedder, TextKind, Vectors
from runtime.retrieval.passages import OnRead, Passage
from runtime.retrieval.search.query import Query
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster, FakeSearch
from tests.frontend.request_errors import assert_error

FOUND = {
    "leave": [
        Passage("leave.pdf#7", "Leave", 0.25, "Twelve weeks.", {"source": "hr/leave.pdf", "heading": "A", "page": 3}),
        Passage("plain", "Plain", 0.5, "No file."),
    ],
    "pay": [
        Passage("plain", "Plain", 0.125, "No file."),
        Passage("far", "Far", 0.75, "Far away."),
    ],
}
FOUND["opposite"] = [Passage("opposite", "", 1.25, "A negative cosine.")]
FOUND["mixed"] = [Passage("words", "", 0.75, "By words."), Passage("vector", "", 0.25, "By its vector.")]
HASHING = HashingEmbedder(64)


class Stand(FakeSearch):
    """Two collections, one with hashing embeddings; searches match by words."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[TextKind] = []

    def summary(self, collection: str) -> CollectionSummary:
        if collection == "bare":
            return CollectionSummary(metric="l2")
        if collection != "docs":
            raise UnknownCollection(collection)
        return CollectionSummary(True, 900, 12_345, 1_700_000_000, 64, "cosine", "hashing-64")

    def documents(self, collection: str) -> CollectionDocuments:
        opened: Any = SimpleNamespace(file_count=lambda hidden: 30)
        return opened  # type: ignore[no-any-return]

    def embedders(self) -> dict[str, Embedder]:
        return {"hashing-64": HASHING}

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind, flow: int) -> tuple[Vectors, int]:
        self.kinds.append(kind)
        return await super().embed(embedder, texts, kind, flow)

    def passages(self, query: Query, on_read: OnRead) -> list[Passage]:
        return FOUND[query.text][: query.spec.k]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    stand = Stand()
    settings = Settings(model="tiny", collections={"docs": 64, "bare": 0}, max_k=20, max_prompt_bytes=100)
    with Cluster(settings=settings, search=stand) as cluster:
        yield cluster


@pytest.fixture
def stand(cluster: Cluster) -> Iterator[Stand]:
    assert isinstance(cluster.search, Stand)
    yield cluster.search
    cluster.search.error = None


def test_collections_are_listed_as_vector_stores(client: openai.OpenAI) -> None:
    docs, bare = client.vector_stores.list()
    assert (docs.id, docs.name, docs.object, docs.status) == ("docs", "docs", "vector_store", "completed")
    assert (docs.created_at, docs.usage_bytes, docs.file_counts.total) == (1_700_000_000, 12_345, 30)
    assert docs.metadata == {"embedder": "hashing-64", "dimensions": "64", "metric": "cosine"}
    assert (bare.id, bare.status) == ("bare", "in_progress")
    assert client.vector_stores.retrieve("docs") == docs


def test_lists_are_paginated(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [store.id for store in client.vector_stores.list(limit=1)] == ["docs", "bare"]
    assert [store.id for store in client.vector_stores.list(order="asc")] == ["bare", "docs"]
    assert [store.id for store in client.vector_stores.list(limit=1).data] == ["docs"]  # iterating gets all pages
    page = http.get("/v1/vector_stores?limit=1").json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, "docs", "docs")
    assert [store.id for store in client.vector_stores.list(before="bare").data] == ["docs"]
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=none", "after")):
        refused = http.get(f"/v1/vector_stores?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_search_returns_files_scores_and_attributes(client: openai.OpenAI, stand: Stand) -> None:
    page = client.vector_stores.search("docs", query="leave", max_num_results=2)
    assert (page.object, page.model_extra) == (
        "vector_store.search_results.page", {"search_query": ["leave"], "has_more": False, "next_page": None},
    )  # fmt: skip
    first, second = page.data
    assert (first.file_id, first.filename, first.score) == ("hr/leave.pdf", "leave.pdf", 0.75)
    assert first.attributes == {"source": "hr/leave.pdf", "heading": "A", "page": 3}
    assert [(part.type, part.text) for part in first.content] == [("text", "Twelve weeks.")]
    assert (second.file_id, second.filename, second.attributes) == ("plain", "plain", {})
    assert (stand.calls[-1].spec.collection, stand.calls[-1].spec.k) == ("docs", 2)


def test_filters_in_openais_format_reach_the_search(client: openai.OpenAI, stand: Stand) -> None:
    client.vector_stores.search(
        "docs",
        query="leave",
        filters={
            "type": "and",
            "filters": [{"type": "eq", "key": "team", "value": "hr"}, {"type": "gt", "key": "page", "value": 2}],
        },
    )
    wanted: Any = decode_filter(stand.calls[-1].spec.filter)
    (one, other) = wanted.filters
    assert {(part.key, part.operator, part.values) for part in (one, other)} == {
        ("team", "eq", ("hr",)), ("page", "gt", (2,)),
    }  # fmt: skip


def test_the_parameter_of_an_error_that_a_pool_finds_in_a_filter_is_the_name_that_it_has_in_the_body(
    client: openai.OpenAI, stand: Stand
) -> None:
    stand.error = InvalidFilter("no document has the attribute 'team'", "filter")
    with pytest.raises(openai.BadRequestError, match="no document has the attribute 'team'") as refused:
        client.vector_stores.search("docs", query="leave", filters={"type": "eq", "key": "team", "value": "hr"})
    assert refused.value.param == "filters"


def test_several_queries_return_each_passage_once_nearest_first(client: openai.OpenAI) -> None:
    page = client.vector_stores.search("docs", query=["leave", "pay"], max_num_results=2)
    assert [(found.file_id, found.score) for found in page] == [("plain", 0.875), ("hr/leave.pdf", 0.75)]


def test_results_below_a_threshold_are_left_out(client: openai.OpenAI) -> None:
    page = client.vector_stores.search("docs", query="pay", ranking_options={"ranker": "auto", "score_threshold": 0.5})
    assert [found.file_id for found in page] == ["plain"]


@pytest.mark.parametrize(
    ("threshold", "scores"), [({}, [-0.25]), ({"score_threshold": -0.25}, [-0.25]), ({"score_threshold": 0.0}, [])]
)
def test_without_a_threshold_ranking_options_leave_out_nothing(
    client: openai.OpenAI, threshold: Any, scores: list[float]
) -> None:
    page = client.vector_stores.search("docs", query="opposite", ranking_options={"ranker": "none"} | threshold)
    assert [found.score for found in page] == scores


@pytest.mark.parametrize(
    ("embedding", "text", "share"), [(1, 1, 0.5), (3.0, 1.0, 0.25), (0, 2, 1.0), (2, 0, 0.0), (0, 0, 0.0)]
)
def test_openais_hybrid_weights_set_the_keyword_weight(
    client: openai.OpenAI, stand: Stand, embedding: float, text: float, share: float
) -> None:
    weights = {"embedding_weight": embedding, "text_weight": text}
    client.vector_stores.search("docs", query="pay", extra_body={"ranking_options": {"hybrid_search": weights}})
    assert stand.calls[-1].hybrid == share


def test_an_unknown_store_is_not_found(client: openai.OpenAI) -> None:
    for ask in (lambda: client.vector_stores.retrieve("none"), lambda: client.vector_stores.search("none", query="a")):
        with pytest.raises(openai.NotFoundError, match="no vector store 'none' is loaded; loaded: docs, bare"):
            ask()


def test_texts_are_embedded_in_both_encodings(client: openai.OpenAI, http: httpx.Client, stand: Stand) -> None:
    texts = [f"word {number}" for number in range(40)]
    answer = client.embeddings.create(model="hashing-64", input=texts)  # which asks for base64
    found = np.array([one.embedding for one in answer.data])
    np.testing.assert_allclose(found, HASHING.embed(texts), atol=1e-6)
    assert [one.index for one in answer.data] == list(range(40))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (80, 80)
    assert set(stand.kinds) == {"query"}
    assert http.post("/v1/embeddings", json={"model": "hashing-64", "input": "word 0"}).json()["data"][0][
        "embedding"
    ] == pytest.approx(found[0].tolist(), abs=1e-6)
    packed = http.post(
        "/v1/embeddings", json={"model": "hashing-64", "input": "word 0", "encoding_format": "base64", "user": "u"}
    ).json()
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4"), found[0])


def test_passages_can_be_embedded_as_passages(client: openai.OpenAI, stand: Stand) -> None:
    client.embeddings.create(model="hashing-64", input="a", dimensions=64, extra_body={"input_type": "passage"})
    assert stand.kinds[-1] == "passage"


def test_another_embedder_than_a_collections_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no collection uses the embedder 'other'; available: hashing-64"):
        client.embeddings.create(model="other", input="a")


def test_a_failed_embedding_is_an_error_and_frees_its_place(http: httpx.Client, stand: Stand) -> None:
    stand.error = EmbedderFailed("no vectors")
    for _ in range(70):  # more than may be embedded at once
        refused = http.post("/v1/embeddings", json={"model": "hashing-64", "input": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "embedder_failed")


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/embeddings", {"model": "hashing-64", "input": "a"}, "embedding took longer than its limit of 0.05 s"),
        ("/v1/retrieval", {"collection": "docs", "query": "pay"}, "the search took longer than its limit of 0.05 s"),
    ],
)
def test_what_takes_longer_than_its_limit_ends_with_an_error_and_is_given_up(
    path: str, body: dict[str, Any], error: str
) -> None:
    stand = Stand()
    stand.hangs = True
    settings = Settings(
        collections={"docs": 64}, http=HttpSection(request_timeout_s=0.05), search_timeout_s=0.05, max_k=20
    )
    with Cluster(settings=settings, search=stand) as cluster, cluster.http() as http:
        assert_error(http.post(path, json=body), 504, "deadline_exceeded", None, error)
        assert stand.running == 0
