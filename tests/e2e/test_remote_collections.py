"""A node without documents of its own in front of two that have half of them each."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtime import SearchClient
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.collections.python_docs import python_documents
from runtime.testing.node import Node, running

NODE = """
[node]
name = "{name}"
run_dir = "{home}/run-{name}"

[http]
port = 0
"""
MODEL = """
[model]
name = "{model}"
context_tokens = 2048
weights = "float32"

[prefill]
slots = 3
passage_tokens = 600

[decode]
slots = 3
probe_tokens = 128
"""
OWN = """
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


@pytest.fixture
def home(tmp_path: Path) -> Path:
    documents = python_documents()[:200]
    for name, some in (("whole", documents), ("left", documents[:100]), ("right", documents[100:])):
        Collection.build(some, tmp_path / name, embedder="hashing-128")
    return tmp_path


def _start(nodes: ExitStack, home: Path, name: str, section: str, model: Path | None = None) -> Node:
    config = home / f"{name}.toml"
    text = NODE + (MODEL.replace("{model}", str(model)) if model else "") + section
    config.write_text(text.replace("{home}", str(home)).replace("{name}", name))
    return nodes.enter_context(running(config))


def _chat(query: str) -> dict[str, object]:
    return {
        "model": "tiny", "messages": [{"role": "user", "content": query}], "max_tokens": 24, "temperature": 0,
        "ignore_eos": True, "retrieval": {"collection": "docs", "k": 2, "every_tokens": 8},
    }  # fmt: skip


def test_a_collection_on_two_nodes_is_found_as_on_one_and_partly_when_one_has_gone(home: Path, model: Path) -> None:
    with ExitStack() as nodes:
        whole = _start(nodes, home, "whole", OWN, model)
        left, right = (_start(nodes, home, name, OWN) for name in ("left", "right"))
        parts = REMOTE.format(nodes=json.dumps([left.info.url, right.info.url]))
        front = _start(nodes, home, "front", parts, model)
        with SearchClient.connect(front.run_dir) as client:
            for query in QUERIES:
                _, one = whole.post("/v1/retrieval", {"query": query, "collection": "docs", "k": 5})
                found = client.search(query, 5)
                assert [passage.id for passage in found.passages] == [passage["id"] for passage in one["passages"]]
        for query in QUERIES[:2]:  # with a probe every 8 tokens
            (status, one), (found_status, two) = (
                node.post("/v1/chat/completions", _chat(query)) for node in (whole, front)
            )
            assert (status, found_status) == (200, 200)
            assert len(one["retrieval"]["passages"]) > 2
            assert two["retrieval"] == one["retrieval"]
            assert two["choices"] == one["choices"]
        for query in QUERIES:
            (status, one), (found_status, two) = (
                node.post("/v1/retrieval", {"query": query, "collection": "docs", "k": 5}) for node in (whole, front)
            )
            assert (status, found_status) == (200, 200)
            assert two["passages"] == one["passages"]
            _, stores = front.post("/v1/vector_stores/docs/search", {"query": query, "max_num_results": 5})
            assert [found["id"] for found in stores["data"]] == [found["id"] for found in one["passages"]]
        assert right.stop() == 0
        status, answer = front.post("/v1/chat/completions", _chat(QUERIES[0]))
        assert (status, answer["retrieval"]["partial"]) == (200, True)
        asked = {"query": QUERIES[0], "collection": "docs", "k": 5}
        (status, some), (_, half) = front.post("/v1/retrieval", asked), left.post("/v1/retrieval", asked)
        assert (status, some["partial"]) == (200, True)
        assert some["passages"] == half["passages"]
