"""What is asked of pools and comes back."""

import numpy as np
import numpy.typing as npt

from gpu import GraphIndex
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import SearchResult
from runtime.testing.waiting import until

Vectors = npt.NDArray[np.float32]


def collect(client: SearchClient, count: int) -> dict[int, SearchResult]:
    """The next `count` results by ticket; each comes once, and no other."""
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
    """What a search that looks at everything finds."""
    return [row.tolist() for row in index.search(queries, k, top_m=400)[0]]


def attached(client: SearchClient) -> SearchClient:
    """With every pool of the plan."""

    def poll() -> None:
        assert client.poll() == []
        client.sleep((), 1)  # else nobody else gets on

    until(lambda: all(pool.state != "lost" for pool in client.statistics().pools), poll)
    return client
