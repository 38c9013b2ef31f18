"""LangChain's retriever and vector store on a node's collection, with the real package."""

from collections.abc import Iterator

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed: [langchain]")

from langchain_core.documents import Document

from runtime.errors import InvalidFilter
from runtime.integrations.langchain import TrinityRetriever, TrinityVectorStore
from tests.integrations.conftest import KEY


@pytest.fixture
def store(url: str) -> Iterator[TrinityVectorStore]:
    store = TrinityVectorStore(url, "notes", KEY)
    store.add_documents([
        Document("cats purr", id="cats", metadata={"legs": 4}),
        Document("dogs bark", id="dogs", metadata={"legs": 4, "tags": ["loud"]}),
        Document("birds sing", id="birds", metadata={"legs": 2}),
    ])  # fmt: skip
    yield store
    store.close()


def test_documents_come_back_with_their_ids_and_metadata(store: TrinityVectorStore) -> None:
    assert store.similarity_search("dogs bark", k=1) == [
        Document("dogs bark", id="dogs", metadata={"legs": 4, "tags": ["loud"]})
    ]
    ((document, score),) = store.similarity_search_with_relevance_scores("birds sing", k=1)
    assert (document.id, score) == ("birds", pytest.approx(1.0, abs=1e-3))


def test_a_filter_is_applied_and_an_invalid_one_is_the_nodes_error(store: TrinityVectorStore) -> None:
    two_legs = {"type": "eq", "key": "legs", "value": 2}
    assert [one.id for one in store.similarity_search("dogs bark", k=3, filter=two_legs)] == ["birds"]
    assert [one.id for one in store.as_retriever(search_kwargs={"filter": two_legs}).invoke("dogs")] == ["birds"]
    with pytest.raises(InvalidFilter, match="no document has the attribute 'feet'"):
        store.similarity_search("dogs", filter={"type": "eq", "key": "feet", "value": 2})


def test_texts_without_ids_get_new_ones_and_existing_ids_are_replaced(store: TrinityVectorStore) -> None:
    (fresh,) = store.add_texts(["fish swim"])
    assert store.similarity_search("fish swim", k=1) == [Document("fish swim", id=fresh)]
    store.add_texts(["fish are silent"], ids=[fresh])
    assert [one.page_content for one in store.similarity_search("fish", k=5) if one.id == fresh] == ["fish are silent"]
    assert store.delete([fresh, "nobody"])
    assert fresh not in [one.id for one in store.similarity_search("fish swim", k=5)]


def test_unsupported_operations_are_refused(store: TrinityVectorStore, url: str) -> None:
    with pytest.raises(ValueError, match="the node embeds"):
        TrinityVectorStore.from_texts(["a"], object(), url=url, collection="notes")
    with pytest.raises(ValueError, match="ids are required"):
        store.delete()
    with pytest.raises(ValueError, match="zip"):
        store.add_texts(["a", "b"], [{}])


def test_a_retriever_accepts_k_and_a_filter_at_construction_and_per_query(store: TrinityVectorStore, url: str) -> None:
    retriever = TrinityRetriever(url=url, collection="notes", api_key=KEY, k=2)
    nearest, _ = retriever.invoke("cats purr")
    assert nearest.id == "cats"
    assert len(retriever.invoke("cats purr", k=3)) == 3
    found = retriever.invoke("cats purr", filter={"type": "eq", "key": "legs", "value": 2})
    assert [one.id for one in found] == ["birds"]
    assert KEY not in repr(retriever)
    retriever.close()
