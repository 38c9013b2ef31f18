"""What each process of a node does: pool, prefill, decode, frontend, supervisor, and the client that asks the pool."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.retrieval.search.async_client import AsyncSearchClient
    from runtime.retrieval.search.client import SearchClient
    from runtime.retrieval.search.query import SearchBatch, SearchResult

_HOME = {
    "AsyncSearchClient": "async_client",
    "SearchBatch": "query",
    "SearchClient": "client",
    "SearchResult": "query",
}

__all__ = ["AsyncSearchClient", "SearchBatch", "SearchClient", "SearchResult"]


def __getattr__(name: str) -> object:
    # Loaded on first use: most processes of a node import this package and never the client.
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"runtime.retrieval.search.{_HOME[name]}"), name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
