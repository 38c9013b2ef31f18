"""LangChain retriever and vector store of a node's collection. Needs langchain-core: the extra [langchain]."""

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

from runtime.integrations.client import CollectionClient, Filter, Hybrid, Rerank, SearchHit


class TrinityRetriever(BaseRetriever):  # type: ignore[misc]
    """Retrieves the `k` passages of a collection that are nearest to a text and pass `filter` (OpenAI's format); with
    `hybrid`, also by keywords.

    `rerank` has the node's reranker order the passages; None: if it has one. `k`, `filter`, `hybrid` and `rerank` may
    also be arguments of `invoke`. A document's metadata contains the passage's attributes and title.
    """

    url: str
    collection: str
    api_key: SecretStr = SecretStr("")
    k: int = Field(4, ge=1)
    filter: Filter | None = None
    hybrid: Hybrid = False
    rerank: Rerank = None

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
        rerank: Rerank = None,
    ) -> list[Document]:
        filter, hybrid = self.filter if filter is None else filter, self.hybrid if hybrid is None else hybrid
        rerank = self.rerank if rerank is None else rerank
        return [_document(hit) for hit in self._client.search(query, k or self.k, filter, hybrid, rerank)]

    def close(self) -> None:
        """Close the connections, which are otherwise closed when the object is garbage-collected."""
        self._client.close()


class TrinityVectorStore(VectorStore):  # type: ignore[misc]
    """Vector store of a collection of a node. The node embeds the texts, so there is no `embedding`.

    The `filter` of a search is in OpenAI's format; `hybrid` adds keyword search; `rerank` has the node's reranker order
    the passages, None: if it has one. Metadata become the documents'
    attributes: strings, integers, floats, booleans and lists of strings. Searches find texts once they are added, and
    never find deleted ones.
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
        **arguments: Any,
    ) -> Self:
        """Create a store and add texts. `embedding` must be None; `arguments`: of the constructor."""
        if embedding is not None:
            raise ValueError("embedding must be None: the node embeds texts with its collection's embedder")
        store = cls(**arguments)
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
        """Store texts under their ids, or under new UUIDs, and return the ids."""
        texts = list(texts)
        names = [name or str(uuid4()) for name in ids or [""] * len(texts)]
        self._client.upsert([
            {"id": name, "text": text, "attributes": attributes}
            for name, text, attributes in zip(names, texts, metadatas or [{}] * len(texts), strict=True)
        ])  # fmt: skip
        return names

    def delete(self, ids: list[str] | None = None, **_: Any) -> bool:
        """Delete documents by id; missing ones are ignored."""
        if ids is None:
            raise ValueError("ids are required: deleting all documents of a collection is not supported")
        self._client.delete(ids)
        return True

    def similarity_search(self, query: str, k: int = 4, **options: Any) -> list[Document]:
        """Return the k nearest documents, nearest first. Options as of `similarity_search_with_score`."""
        return [document for document, _ in self.similarity_search_with_score(query, k, **options)]

    def similarity_search_with_score(
        self,
        query: str,
        k: int = 4,
        *,
        filter: Filter | None = None,
        hybrid: Hybrid = False,
        rerank: Rerank = None,
        **_: Any,
    ) -> list[tuple[Document, float]]:
        """Return documents with scores: the reranker's, if it ordered them; otherwise the cosine, the dot product, or
        1 / (1 + squared distance)."""
        return [(_document(hit), hit.score) for hit in self._client.search(query, k, filter, hybrid, rerank)]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda score: score


def _document(hit: SearchHit) -> Document:
    return Document(hit.text, id=hit.id, metadata=hit.metadata)
