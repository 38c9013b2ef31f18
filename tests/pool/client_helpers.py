"""Helpers for queries to pools and their results."""

import numpy as np
import numpy.typing as npt

from gpu import GraphIndex
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import SearchResult
from runtime.testing.waiting import until

Vectors = npt.NDArray[np.float32]


def collect(client: SearchClient, count: int) -> dict[int, SearchResult]:
    """Return the next `count` results by ticket. Each arrives exactly once, and no other does."""
    found: list[SearchResult] = []

    def poll() -> None:
        found.extend(client.poll())
        client.sleep((), 1)

    until(lambda: len(found) >= count, poll)
    found += client.poll()
    by_ticket = {result.ticket: result for result in found}
    assert len(by_ticket) == len(found) == count
    return by_ticket


def exact(index: GraphIndex, queries: Vectors, k: int) -> list[list[int]]:
    """Return the results of an exhaustive search."""
    return [row.tolist() for row in index.search(queries, k, top_m=400)[0]]


def attached(client: SearchClient) -> SearchClient:
    """Wait until the client is attached to every pool of the plan."""

    def poll() -> None:
        assert client.poll() == []
        client.sleep((), 1)  # lets other threads run

    until(lambda: all(pool.state != "lost" for pool in client.statistics().pools), poll)
    return client
