"""What each process of a node does: pool, prefill, decode, frontend, supervisor, and the client that asks the pool."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.retrieval.client import SearchClient, SearchResult

__all__ = ["SearchClient", "SearchResult"]


def __getattr__(name: str) -> object:
    # Loaded on first use: most processes of a node import this package and never the client.
    if name in __all__:
        from runtime.retrieval import client

        return getattr(client, name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
