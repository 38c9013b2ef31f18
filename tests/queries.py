"""Queries as requests make them, and the passages that they find."""

from typing import Any

from ipc import SearchSpec, Stage
from runtime.errors import CollectionError
from runtime.retrieval.attributes.filters import FilterLike, filter_bytes
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.passages import Passage, ignore_size
from runtime.retrieval.retrieval_steps import read_passages
from runtime.retrieval.search.query import Query, SearchResult
from runtime.retrieval.search.vectors import query_vector


def query_of(
    text: str | None,
    collection: str = "docs",
    k: int = 4,
    stage: Stage = "prefill",
    deadline_ns: int = 0,
    *,
    vector: Any = None,
    filter: FilterLike = None,
    hybrid: float = 0.0,
    flow: int = 0,
) -> Query:
    """Return the query for a text, or for a vector."""
    spec = SearchSpec(collection, k, stage, deadline_ns=deadline_ns, filter=filter_bytes(filter), flow=flow)
    return Query(spec, None if vector is None else query_vector(vector), text or "", hybrid)


def passages_of(registry: CollectionRegistry, collection: str, result: SearchResult) -> tuple[Passage, ...]:
    """Return the passages of a search result."""
    steps = read_passages(registry, collection, result, ignore_size, 1, 0)
    try:
        read = next(steps)
        try:
            documents = read.run()
        except CollectionError as error:
            steps.throw(error)
        else:
            steps.send(documents)
    except StopIteration as end:
        passages: tuple[Passage, ...] = end.value
        return passages
    raise AssertionError("they are read at once")
