"""A node with only remote documents in front of two nodes with half of them each."""

import json
from contextlib import ExitStack
from pathlib import Path

from runtime import SearchClient
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.documents import Document
from runtime.testing.node import Node, running
from tests.e2e.conftest import CONFIG, documents

PART = """
[node]
name = "{name}"
run_dir = "{home}/run-{name}"

[http]
port = 0
drain_notice_s = 0

[[collections]]
name = "docs"
path = "{home}/{name}"
"""
REMOTE = """
[[remote]]
name = "docs"
nodes = {nodes}
missing = "partial"
"""
QUERIES = ["How does a with statement call __exit__?", "comparison chaining", "default argument values", "a generator"]


def _part(home: Path, name: str, some: list[Document]) -> Path:
    """Return the configuration of a node with a part of the documents."""
    bulk_load.build(some, home / name, embedder="hashing-128")
    config = home / f"{name}.toml"
    config.write_text(PART.format(home=home, name=name))
    return config


def _front(home: Path, model: Path, nodes: list[str]) -> Path:
    """Return the shared node's configuration with the documents on remote nodes."""
    text = CONFIG.format(name="front", run_dir=home / "run-front", model=model, collection="", drain_s=20.0)
    config = home / "front.toml"
    config.write_text(text.partition("[[collections]]")[0] + REMOTE.format(nodes=json.dumps(nodes)))
    return config


def _chat(query: str) -> dict[str, object]:
    return {
        "model": "tiny", "messages": [{"role": "user", "content": query}], "max_tokens": 24, "temperature": 0,
        "ignore_eos": True, "retrieval": {"collection": "docs", "k": 2, "every_tokens": 8},
    }  # fmt: skip


def test_a_collection_on_two_nodes_equals_one_and_is_partial_without_one(
    node: Node, model: Path, tmp_path: Path
) -> None:
    with ExitStack() as nodes:
        left = nodes.enter_context(running(_part(tmp_path, "left", documents()[:100])))
        right = nodes.enter_context(running(_part(tmp_path, "right", documents()[100:])))
        front = nodes.enter_context(running(_front(tmp_path, model, [left.info.url, right.info.url])))
        with SearchClient.connect(front.run_dir) as client:
            for query in QUERIES:
                _, one = node.post("/v1/retrieval", {"query": query, "collection": "docs", "k": 5})
                found = client.search(query, 5)
                assert [passage.id for passage in found.passages] == [passage["id"] for passage in one["passages"]]
        for query in QUERIES[:2]:  # with a probe every 8 tokens
            (status, one), (found_status, two) = (
                asked.post("/v1/chat/completions", _chat(query)) for asked in (node, front)
            )
            assert (status, found_status) == (200, 200)
            assert len(one["retrieval"]["passages"]) > 2
            assert two["retrieval"] == one["retrieval"]
            assert two["choices"] == one["choices"]
        for query in QUERIES:
            (status, one), (found_status, two) = (
                asked.post("/v1/retrieval", {"query": query, "collection": "docs", "k": 5}) for asked in (node, front)
            )
            assert (status, found_status) == (200, 200)
            assert two["passages"] == one["passages"]
            _, stores = front.post("/v1/vector_stores/docs/search", {"query": query, "max_num_results": 5})
            assert [found["id"] for found in stores["data"]] == [found["id"] for found in one["passages"]]
        assert right.stop() == 0
        status, answer = front.post("/v1/chat/completions", _chat(QUERIES[0]))
        assert (status, answer["retrieval"]["partial"]) == (200, True)
        body = {"query": QUERIES[0], "collection": "docs", "k": 5}
        (status, some), (_, half) = front.post("/v1/retrieval", body), left.post("/v1/retrieval", body)
        assert (status, some["partial"]) == (200, True)
        assert some["passages"] == half["passages"]
