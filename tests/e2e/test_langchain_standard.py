"""LangChain's own standard tests of vector stores and retrievers, on a node.

They need langchain-tests, which brings pytest plugins of its own: install it into another environment than that of the
other tests, and run `pytest -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function` with this file.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")

from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from runtime.integrations.langchain import TrinityRetriever, TrinityVectorStore
from runtime.retrieval.attributes.schema import AttributeType
from runtime.retrieval.collections.bulk_load import create
from runtime.testing.writable_node import DIM, DOCUMENTS, WritableNode

ALL = {"type": "ne", "key": "unused", "value": ""}
"""A filter that all documents pass."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a node with the collection `notes`."""
    home = tmp_path_factory.mktemp("langchain")
    create(home / "notes", DIM, embedder=f"hashing-{DIM}", schema={"unused": AttributeType.STRING})
    with WritableNode(home) as writable:
        yield writable.url


@pytest.fixture
def url(node: str) -> Iterator[str]:
    """The URL of the node, whose collection is empty."""
    yield node
    httpx.request("DELETE", node + DOCUMENTS, json={"filter": ALL}, timeout=60, trust_env=False).raise_for_status()


class TestVectorStore(VectorStoreIntegrationTests):  # type: ignore[misc]
    """Without `get_by_ids`: a node searches, and has no route for documents by their ids."""

    @property
    def has_get_by_ids(self) -> bool:
        return False

    @pytest.fixture
    def vectorstore(self, url: str) -> Iterator[VectorStore]:
        store = TrinityVectorStore(url, "notes")
        yield store
        store.close()


class TestRetriever(RetrieversIntegrationTests):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def place(self, url: str) -> Iterator[None]:
        self.url = url
        store = TrinityVectorStore(url, "notes")
        store.add_texts(["cats purr", "dogs bark", "birds sing", "fish swim"])
        yield
        store.close()

    @property
    def retriever_constructor(self) -> type[TrinityRetriever]:
        return TrinityRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"url": self.url, "collection": "notes"}

    @property
    def retriever_query_example(self) -> str:
        return "cats"
