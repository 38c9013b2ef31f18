"""LlamaIndex retriever of a node's collection. Needs llama-index-core: the extra [llama-index]."""

import asyncio

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from runtime.integrations.client import CollectionClient, Filter, Hybrid, Rerank


class TrinityRetriever(BaseRetriever):  # type: ignore[misc]
    """Retrieves the `k` passages of a collection that are nearest to a text and pass `filter` (OpenAI's format), as
    nodes; with `hybrid`, also by keywords.

    `rerank` has the node's reranker order them; None: if it has one. A node's metadata contains the passage's
    attributes and title.
    """

    def __init__(
        self,
        url: str,
        collection: str,
        api_key: str = "",
        *,
        k: int = 4,
        filter: Filter | None = None,
        hybrid: Hybrid = False,
        rerank: Rerank = None,
    ) -> None:
        self._client = CollectionClient(url, collection, api_key)
        self._k, self._filter, self._hybrid, self._rerank = k, filter, hybrid, rerank
        self.close = self._client.close
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        passages = self._client.search(query_bundle.query_str, self._k, self._filter, self._hybrid, self._rerank)
        return [
            NodeWithScore(node=TextNode(id_=one.id, text=one.text, metadata=one.metadata), score=one.score)
            for one in passages
        ]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)
