"""Fixtures: a node shared by most tests, and a factory of separate nodes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch", reason="the node's model needs the extra [llm]")

from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.ingestion.python_docs import python_documents
from runtime.testing.node import Node
from runtime.testing.tiny_model import make_tiny_llama

CONFIG = """
[node]
name = "{name}"
run_dir = "{run_dir}"
drain_s = {drain_s}

[http]
port = 0
drain_notice_s = 0

[model]
name = "{model}"
context_tokens = 2048

[prefill]
slots = 3
chunk_tokens = 128

[decode]
slots = 6

[prompts]
passage_tokens = 1600

[[collections]]
name = "docs"
path = "{collection}"
"""

STORES = """
[stores]
path = "stores"
"""

GATEWAY = """
[node]
name = "gateway"
run_dir = "run"
drain_s = 5

[http]
port = 0
drain_notice_s = 0

[model]
engine = "openai"
name = "tiny"
url = "{url}/v1"

[[collections]]
name = "docs"
path = "{collection}"
"""
"""A node without a model, in front of another: it starts in half the time."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("collections") / "docs"
    bulk_load.build(documents(), path, embedder="hashing-128")
    return path


def documents() -> list[Document]:
    """Return the documents of `collection`."""
    return [replace(document, attributes={"source": "python"}) for document in python_documents()[:200]]


StartNode = Callable[..., Node]


@pytest.fixture(scope="session")
def new_node(model: Path, collection: Path, tmp_path_factory: pytest.TempPathFactory) -> StartNode:
    """Start a node with the given timeouts and additional configuration `more`; the caller stops it."""

    def start(drain_s: float = 20.0, more: str = "", spares: int = 0, http: int = 1, notice_s: float = 0.0) -> Node:
        home = tmp_path_factory.mktemp("node")
        config = home / "node.toml"
        run_dir = home / "run"
        text = CONFIG.format(name=home.name, run_dir=run_dir, model=model, collection=collection, drain_s=drain_s)
        text = text.replace("drain_notice_s = 0", f"workers = {http}\ndrain_notice_s = {notice_s}")
        config.write_text(text.replace("slots =", f"spares = {spares}\nslots =") + more)
        return Node(config)

    return start


@pytest.fixture(scope="module")
def start_node(new_node: StartNode) -> Iterator[StartNode]:
    """Like `new_node`; all nodes are stopped at the end of the test file."""
    started: list[Node] = []

    def start(**options: Any) -> Node:
        started.append(new_node(**options))
        return started[-1]

    yield start
    for node in started:
        node.stop()


@pytest.fixture(scope="package")
def node(new_node: StartNode) -> Iterator[Node]:
    """The node shared by this folder's tests: even an idle node costs a few percent of a core."""
    node = new_node(more=STORES)
    yield node
    node.stop()
