"""A node without documents of its own in front of two that have half of them each."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

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


def _start(nodes: ExitStack, home: Path, name: str, section: str) -> Node:
    config = home / f"{name}.toml"
    config.write_text((NODE + section).replace("{home}", str(home)).replace("{name}", name))
    return nodes.enter_context(running(config))


def test_a_collection_on_two_nodes_is_found_as_on_one_and_partly_when_one_has_gone(home: Path) -> None:
    with ExitStack() as nodes:
        whole, left, right = (_start(nodes, home, name, OWN) for name in ("whole", "left", "right"))
        front = _start(nodes, home, "front", REMOTE.format(nodes=json.dumps([left.info.url, right.info.url])))
        for query in QUERIES:
            (status, one), (found_status, two) = (
                node.post("/v1/retrieval", {"query": query, "collection": "docs", "k": 5}) for node in (whole, front)
            )
            assert (status, found_status) == (200, 200)
            assert two["passages"] == one["passages"]
            _, stores = front.post("/v1/vector_stores/docs/search", {"query": query, "max_num_results": 5})
            assert [found["id"] for found in stores["data"]] == [found["id"] for found in one["passages"]]
        assert right.stop() == 0
        asked = {"query": QUERIES[0], "collection": "docs", "k": 5}
        (status, some), (_, half) = front.post("/v1/retrieval", asked), left.post("/v1/retrieval", asked)
        assert (status, some["partial"]) == (200, True)
        assert some["passages"] == half["passages"]
