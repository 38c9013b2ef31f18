"""LangChain's retriever and vector store on a collection of a node. Needs langchain-core: the extra [langchain]."""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Self
from uuid import uuid4

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from pydantic import Field, SecretStr

from runtime.integrations.client import CollectionClient, Filter, Hybrid, SearchHit


class TrinityRetriever(BaseRetriever):  # type: ignore[misc]
    """The `k` passages of a collection that are nearest to a text and pass `filter` (OpenAI's format); with `hybrid`
    by the text's words too.

    `k`, `filter` and `hybrid` may be given to `invoke` too. A document's metadata has the passage's attributes and
    title.
    """

    url: str
    collection: str
    api_key: SecretStr = SecretStr("")
    k: int = Field(4, ge=1)
    filter: Filter | None = None
    hybrid: Hybrid = False

    @cached_property
    def _client(self) -> CollectionClient:
        return CollectionClient(self.url, self.collection, self.api_key.get_secret_value())

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        filter: Filter | None = None,
        hybrid: Hybrid | None = None,
    ) -> list[Document]:
        wanted, words = self.filter if filter is None else filter, self.hybrid if hybrid is None else hybrid
        found = self._client.search(query, k or self.k, wanted, words)
        return [_document(one) for one in found]

    def close(self) -> None:
        """Close its connections; what is not closed is so when it is collected."""
        self._client.close()


class TrinityVectorStore(VectorStore):  # type: ignore[misc]
    """A live collection of a node, which embeds the texts itself: there is no `embedding` here.

    `filter` of a search is in OpenAI's format; with `hybrid` a text's words are looked for too; metadata are the
    documents' attributes: strings, integers, floats, booleans and lists of strings. What is added is found some 20 ms
    later, what is deleted is not found any more.
    """

    def __init__(self, url: str, collection: str, api_key: str = "") -> None:
        self._client = CollectionClient(url, collection, api_key)
        self.close = self._client.close

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **place: Any,
    ) -> Self:
        """A store with these texts. `embedding` is None; `place`: the constructor's arguments."""
        if embedding is not None:
            raise ValueError("embedding must be None: the node embeds, by its collection's embedder")
        store = cls(**place)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **_: Any,
    ) -> list[str]:
        """Store texts under their ids, or new ones where there is none, and return these."""
        texts = list(texts)
        names = [name or str(uuid4()) for name in ids or [""] * len(texts)]
        self._client.upsert([
            {"id": name, "text": text, "attributes": attributes}
            for name, text, attributes in zip(names, texts, metadatas or [{}] * len(texts), strict=True)
        ])  # fmt: skip
        return names

    def delete(self, ids: list[str] | None = None, **_: Any) -> bool:
        """Delete documents by their ids; those that are not there are no error."""
        if ids is None:
            raise ValueError("ids are needed: what is in the collection is not deleted as a whole")
        self._client.delete(ids)
        return True

    def similarity_search(
        self, query: str, k: int = 4, *, filter: Filter | None = None, hybrid: Hybrid = False, **_: Any
    ) -> list[Document]:
        """The k nearest documents that pass a filter, nearest first."""
        return [_document(one) for one in self._client.search(query, k, filter, hybrid)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, *, filter: Filter | None = None, hybrid: Hybrid = False, **_: Any
    ) -> list[tuple[Document, float]]:
        """The same with their scores: the cosine; the dot product; 1 / (1 + squared distance)."""
        return [(_document(one), one.score) for one in self._client.search(query, k, filter, hybrid)]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda score: score


def _document(found: SearchHit) -> Document:
    return Document(found.text, id=found.id, metadata=found.metadata)
