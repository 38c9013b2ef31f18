"""The processes of a node (pool, prefill, decode, frontend, supervisor), and the search client."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.retrieval.search.async_client import AsyncSearchClient
    from runtime.retrieval.search.client import SearchClient
    from runtime.retrieval.search.query import SearchBatch, SearchResult

_MODULE_OF = {
    "AsyncSearchClient": "async_client",
    "SearchBatch": "query",
    "SearchClient": "client",
    "SearchResult": "query",
}

__all__ = ["AsyncSearchClient", "SearchBatch", "SearchClient", "SearchResult"]


def __getattr__(name: str) -> object:
    # Imported lazily: most processes of a node never use the client.
    if name in _MODULE_OF:
        import importlib

        return getattr(importlib.import_module(f"runtime.retrieval.search.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
