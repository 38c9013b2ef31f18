"""LlamaIndex's retriever on a node's collection, with the real package."""

import asyncio

import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed: [llama-index]")

from runtime.errors import InvalidFilter
from runtime.integrations.llama_index import TrinityRetriever
from tests.integrations.conftest import KEY

pytestmark = pytest.mark.usefixtures("animals")


def test_passages_are_returned_as_nodes_with_scores_ids_and_metadata(url: str) -> None:
    retriever = TrinityRetriever(url, "notes", KEY, k=2)
    first, second = retriever.retrieve("cats purr")
    assert (first.node.node_id, first.node.get_content()) == ("cats", "cats purr")
    assert first.node.metadata == {"title": "Cats", "legs": 4}
    assert first.score > second.score
    assert [one.node_id for one in asyncio.run(retriever.aretrieve("cats purr"))] == ["cats", "birds"]
    retriever.close()


def test_a_filter_is_applied_and_an_invalid_one_is_the_nodes_error(url: str) -> None:
    retriever = TrinityRetriever(url, "notes", KEY, filter={"type": "eq", "key": "legs", "value": 2})
    assert [one.node_id for one in retriever.retrieve("cats purr")] == ["birds"]
    retriever.close()
    wrong = TrinityRetriever(url, "notes", KEY, filter={"type": "eq", "key": "feet", "value": 2})
    with pytest.raises(InvalidFilter, match="feet"):
        wrong.retrieve("cats")
    wrong.close()
