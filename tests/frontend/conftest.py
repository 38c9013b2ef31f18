import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.retrieval.collections.validation import UpsertDocument
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.frontend.remote_nodes import KEY, NodeCollection


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[[list[UpsertDocument]], tuple[NodeCollection, str]]]:
    """Start nodes that serve a part of the documents; return the collection and the node's URL."""
    with contextlib.ExitStack() as nodes:

        def start(documents: list[UpsertDocument]) -> tuple[NodeCollection, str]:
            collection = NodeCollection(tmp_path / f"node-{documents[0].id}-{len(documents)}", documents)
            settings = Settings(collections={"docs": 64}, api_keys=(KEY,))
            node = Cluster(prefills=0, decodes=0, settings=settings, search=collection, catalogue=collection)  # type: ignore[arg-type]
            nodes.enter_context(node)
            return collection, node.url

        yield start
