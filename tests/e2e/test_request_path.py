"""A request through a whole node: HTTP, router, prefill, pool, hand-over, decode, and back."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from launchers.http_client import get, stream
from runtime import SearchClient
from runtime.node.worker_config import SEARCH_WIDTH, PoolSection
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.embedding.loading import load_embedder
from runtime.serving.model.model_info import ModelInfo
from runtime.testing.node import Node
from runtime.testing.reference import Reference
from runtime.testing.waiting import eventually
from tests.e2e.tokens import node_tokens, ragged_prompts

CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How does a with statement call __exit__?"}],
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
}


def test_greedy_tokens_through_the_node_equal_generate_for_ragged_prompts(node: Node, model: Path) -> None:

    reference = Reference(model)
    asked = ragged_prompts(ModelInfo.read(str(model)).vocabulary, count=24, longest=300, seed=1)
    with ThreadPoolExecutor(12) as threads:  # many at once: ragged batches, chunks of several prompts, joins mid-decode
        found = list(threads.map(lambda prompt: node_tokens(node.info.url, "tiny", prompt, 10), asked))
    assert found == [reference.generate(prompt, 10) for prompt in asked]


def test_the_openai_client_works_unchanged(node: Node) -> None:
    with openai.OpenAI(base_url=f"{node.info.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "What is a decorator?"}],
            max_tokens=6,
            temperature=0,
            extra_body={"retrieval": {"collection": "docs", "k": 2}, "ignore_eos": True},
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6
        assert answer.choices[0].finish_reason == "length"
        assert answer.model_extra is not None
        assert len(answer.model_extra["retrieval"]["passages"]) == 2
        pieces = client.completions.create(model="tiny", prompt="abc", max_tokens=6, temperature=0, stream=True)
        assert [piece.choices[0].finish_reason for piece in pieces][-1] in ("length", "stop")


def test_the_openai_client_searches_the_collection_and_has_texts_embedded(node: Node) -> None:
    question = "What is a decorator?"
    with openai.OpenAI(base_url=f"{node.info.url}/v1", api_key="none") as client:
        (store,) = (one for one in client.vector_stores.list() if one.id == "docs")  # others are the examples'
        assert (store.status, store.file_counts.total) == ("completed", 1)  # all documents are of one file
        assert store.metadata == {"embedder": "hashing-128", "dimensions": "128", "metric": "cosine"}
        found = client.vector_stores.search("docs", query=question, max_num_results=3).data
        (embedded,) = client.embeddings.create(model="hashing-128", input=question).data
    body = {"collection": "docs", "vector": embedded.embedding, "k": 3}
    passages = node.post("/v1/retrieval", body)[1]["passages"]
    assert [(result.file_id, (result.model_extra or {})["id"]) for result in found] == [
        ("python", passage["id"]) for passage in passages
    ]
    for result, passage in zip(found, passages, strict=True):
        assert result.score == pytest.approx(1 - passage["distance"], abs=1e-4)
        assert result.content[0].text == passage["text"]


def test_an_answer_contains_the_passages_of_exact_search_and_stage_timings(node: Node, collection: Path) -> None:
    status, answer = node.post("/v1/chat/completions", CHAT | {"retrieval": {"collection": "docs", "k": 4}})
    assert status == 200
    with CollectionReader(collection) as opened:
        assert opened.embedder is not None
        vector = load_embedder(opened.embedder).embed([CHAT["messages"][0]["content"]])  # type: ignore[index]
        limits = PoolSection()
        ids, distances = opened.search(vector, 4, limits.top_m, SEARCH_WIDTH)
        expected = [document and document.id for document in opened.documents(ids[0].tolist())]
    passages = answer["retrieval"]["passages"]
    assert [passage["id"] for passage in passages] == expected[: len(passages)]
    assert [passage["distance"] for passage in passages] == pytest.approx(distances[0][: len(passages)], abs=1e-5)
    assert all(passage["title"] for passage in passages)
    spans = answer["timings"]
    stages = {"queue", "batch", "embed", "retrieval", "passages", "admission", "prefill", "decode"}
    handed_over = {"room", "pull", "handover"}  # unless decode computed the prompt
    assert set(spans) - handed_over == stages | {"ttft", "tpot", "e2e"}
    assert set(spans) & handed_over in (handed_over, set())
    assert all(value >= 0 for value in spans.values())
    assert spans["ttft"] >= spans["embed"] + spans["retrieval"] + spans["prefill"]
    assert spans["e2e"] >= spans["ttft"]


def test_probes_append_new_passages_and_the_answer_equals_a_fresh_run_on_the_same_tokens(node: Node) -> None:
    body = CHAT | {"max_tokens": 24, "retrieval": {"collection": "docs", "k": 2, "every_tokens": 8}}
    before = node.metric("trinity_decode_probes_total")
    status, answer = node.post("/v1/chat/completions", body)
    assert status == 200
    assert node.metric("trinity_decode_probes_total") - before == 2  # after 8 and 16 tokens; the 24th is the last
    places = [passage["at_token"] for passage in answer["retrieval"]["passages"]]
    assert places == sorted(places)
    assert {0} < set(places) <= {0, 8, 16}
    ids = [passage["id"] for passage in answer["retrieval"]["passages"]]
    assert len(ids) == len(set(ids))
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["timings"]["probe_stall"] > 0
    assert node.post("/v1/chat/completions", body)[1]["choices"] == answer["choices"]


def test_a_chat_and_its_probes_support_hybrid_search(node: Node) -> None:
    question = CHAT["messages"][0]["content"]  # type: ignore[index]
    asked = {"collection": "docs", "query": question, "k": 2}
    by_words, by_vectors = (
        [passage["id"] for passage in node.post("/v1/retrieval", asked | {"hybrid": share})[1]["passages"]]
        for share in (1, 0)
    )
    assert by_words != by_vectors
    retrieval = {"collection": "docs", "k": 2, "every_tokens": 8, "hybrid": 1}
    status, answer = node.post("/v1/chat/completions", CHAT | {"max_tokens": 24, "retrieval": retrieval})
    assert status == 200
    passages = answer["retrieval"]["passages"]
    assert [passage["id"] for passage in passages if passage["at_token"] == 0] == by_words
    assert answer["usage"]["completion_tokens"] == 24


def test_a_prefetching_answer_stalls_only_for_embedding_its_probes(node: Node) -> None:
    retrieval = {"collection": "docs", "k": 2, "every_tokens": 32, "probe_mode": "prefetch", "probe_tokens": 64}
    status, answer = node.post("/v1/chat/completions", CHAT | {"max_tokens": 384, "retrieval": retrieval})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 384
    assert any(passage["at_token"] > 0 for passage in answer["retrieval"]["passages"])
    trace = json.loads(get(node.info.url, f"/v1/traces/{answer['id']}"))
    assert trace["state"] == "length"
    stages = [stage["name"] for stage in trace["stages"]]
    handed_over = ["room", "pull"] if "room" in stages else []
    searched = ["batch", "embed", "retrieval", "passages"]
    assert stages == ["queue", *searched, "admission", "prefill", *handed_over, "decode"]
    probes = trace["probes"]
    assert len(probes) > 1
    assert all(probe["stalled_s"] < probe["end_s"] - probe["begin_s"] for probe in probes)
    assert sum(probe["stalled_s"] for probe in probes) == pytest.approx(answer["timings"]["probe_stall"])


def test_a_seeded_answer_is_reproducible_and_a_stop_string_ends_it(node: Node) -> None:
    body = CHAT | {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 24}
    first, second = (node.post("/v1/chat/completions", body)[1]["choices"][0] for _ in range(2))
    assert first == second
    text = first["message"]["content"]
    stop = text[6:8]
    stopped = node.post("/v1/chat/completions", body | {"stop": [stop]})[1]["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["content"] == text[: text.index(stop)]


def test_retrieval_of_texts_and_vectors_equals_a_search_of_the_index(node: Node, collection: Path) -> None:
    with CollectionReader(collection) as opened:
        assert opened.embedder is not None
        vector = load_embedder(opened.embedder).embed(["the yield expression"])
        expected = [one and one.id for one in opened.documents(opened.search(vector, 5)[0][0].tolist())]
    for question in ({"query": "the yield expression"}, {"vector": vector[0].tolist()}):
        status, answer = node.post("/v1/retrieval", question | {"collection": "docs", "k": 5})
        assert status == 200
        assert [passage["id"] for passage in answer["passages"]] == expected
        trace = json.loads(get(node.info.url, f"/v1/traces/{answer['id']}"))
        assert (trace["kind"], trace["state"], trace["passages"]) == ("search", "found", 5)
        stages = [stage["name"] for stage in trace["stages"]]
        assert stages == ["queue", *["batch"] * ("query" in question), "embed", "retrieval", "passages", "respond"]
    for stage in ("queue", "batch", "embed", "retrieval", "passages", "respond"):
        assert node.metric(f"trinity_request_{stage}_time_seconds_count", worker="frontend-0") >= 1
    assert node.metric("trinity_embedding_wait_seconds_total", worker="frontend-0") > 0


def test_a_process_of_the_same_user_searches_through_the_ring(node: Node, collection: Path) -> None:
    index = CollectionReader(collection).state.segments[0].index
    queries = np.random.default_rng(0).normal(size=(20, index.dim)).astype(np.float32)
    expected, _ = index.search(queries, 8, top_m=64, search_width=4)
    with SearchClient.connect(node.run_dir) as client:
        for query, ids in zip(queries, expected, strict=True):
            found = client.search(query, 8, collection="docs", top_m=64, search_width=4)
            assert found.ids.tolist() == ids.tolist()


def test_a_client_disconnect_mid_stream_leaks_nothing(node: Node) -> None:
    cancelled = node.metric("trinity_requests_total", outcome="cancelled")
    body = CHAT | {"max_tokens": 1000, "retrieval": {"collection": "docs", "k": 2, "every_tokens": 16}}
    for _ in range(3):
        events = stream(node.info.url, "/v1/chat/completions", body)
        next(events)
        events.close()
    eventually(
        lambda: node.metric("trinity_requests_total", outcome="cancelled") == cancelled + 3, 60, "three cancellations"
    )
    node.wait_idle()
    eventually(lambda: node.metric("trinity_kv_cache_usage_perc") == 0, 60, "their KV blocks to be free")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"retrieval": {"collection": "docs", "k": 999}}, "invalid_request", "retrieval.k"),
        ({"messages": [{"role": "user", "content": "x" * 4000}]}, "context_length_exceeded", "messages"),
        ({"max_tokens": 5000}, "context_length_exceeded", "max_tokens"),
    ],
)
def test_what_exceeds_the_nodes_limits_is_refused_in_openai_format_and_the_node_keeps_serving(
    node: Node, body: dict[str, Any], code: str, param: str
) -> None:
    status, answer = node.post("/v1/chat/completions", CHAT | body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, param), answer
    assert answer["error"]["message"]
    assert node.post("/v1/chat/completions", CHAT | {"max_tokens": 1})[0] == 200


def test_a_token_id_outside_the_vocabulary_is_refused(node: Node) -> None:
    status, answer = node.post("/v1/completions", {"model": "tiny", "prompt": [5, 70_000], "max_tokens": 2})
    assert status == 400
    assert "70000" in answer["error"]["message"]
