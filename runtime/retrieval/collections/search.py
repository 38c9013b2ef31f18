"""Search over the state of a collection, for vectors and for words.

For vectors, sealed segments are searched by their graphs, growing rows exactly, and the results are merged.

For words, the segments' keyword indexes and that of the growing rows are ranked together. Searches add growing rows to
theirs, each for a short while: as long as the newer version of a document is not in it, the older one is found.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu import GpuError
from runtime.errors import InvalidRequest
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.attributes.evaluation import Work, check_deadline
from runtime.retrieval.attributes.filters import Filter, binds, check_filter
from runtime.retrieval.collections.growing_segment import GrowingSegment
from runtime.retrieval.collections.state import Snapshot, State, vectors_of
from runtime.retrieval.keywords.index import search_indexes
from runtime.retrieval.neighbors import Neighbors, merge_neighbors

_ADD_S = 0.25  # how long a search for words adds growing rows to their index


def search(
    state: State,
    queries: NDArray[Any],
    k: int,
    top_m: int = 64,
    search_width: int = 1,
    filter: Filter | None = None,
    threads: int = 1,
    patience: int | None = None,
) -> Neighbors:
    """Return the k nearest rows of each query [q, d]: row numbers int64 [q, k] and distances float32 [q, k].

    Padded with -1 and +inf if fewer rows pass the filter. Never returns a row that was deleted before the call.
    Raises `InvalidRequest`, `InvalidFilter`, and `CollectionError` for a damaged graph.
    """
    demanded = state.description.demanded
    if demanded is not None and not binds(filter, demanded):
        raise InvalidRequest(f"this collection demands a filter that binds {demanded!r} by eq or in", "filter")
    if filter is not None:
        check_filter(filter, state.schema)  # which only grows
    snapshot = state.snapshot()
    *allowed, growing = snapshot.passing(filter, Work())
    found, top_m = [], max(k, top_m)
    try:
        for segment, alive, mask in zip(snapshot.segments, snapshot.alive, allowed, strict=False):
            some = None if alive.count == alive.size and filter is None else mask
            found.append(segment.searchable.search(queries, k, top_m, search_width, patience, threads, some))
        if not found or growing.any():
            found.append(_search_growing(snapshot.growing, queries, k, growing))
    except GpuError as error:
        raise InvalidRequest(str(error)) from error
    return found[0] if len(found) == 1 else merge_neighbors(found, k)


def _search_growing(growing: GrowingSegment, queries: NDArray[Any], k: int, allowed: Bits) -> Neighbors:
    from gpu.cpu.exact import nearest  # compiled code, loaded by the first search

    positions, count = np.flatnonzero(allowed), len(allowed)
    nodes, distances = nearest(growing.all_vectors, queries, k, None if len(positions) == count else positions, count)
    return np.where(nodes >= 0, nodes + growing.first, -1), distances


# ---- words


def search_keywords(
    state: State,
    text: str,
    vector: NDArray[np.float32],
    depth: int,
    filter: Filter | None,
    deadline_ns: int,
    clock: Callable[[], float] = time.monotonic,
) -> Neighbors:
    """Return the rows that match words of a text and pass a filter, by descending BM25 score, int64 [≤ depth], and
    the distances of their vectors from the text's `vector`, float32 [≤ depth].

    Raises the errors of `search_indexes`, and `Unavailable` if a segment has no index.
    """
    snapshot, until = state.snapshot(), clock() + _ADD_S
    snapshot.growing.add_postings(snapshot.alive[-1].size, lambda: clock() < until)
    visible = _visible(snapshot, filter, Work(partial(check_deadline, deadline_ns)))
    indexes = [part.searched(bits) for part, bits in zip(snapshot.parts, visible, strict=True)]
    rows = search_indexes([one for one in indexes if one is not None], text, depth, deadline_ns)
    return rows, distances(vectors_of(snapshot.parts, rows, len(vector)), vector, state.description.metric)


def _visible(snapshot: Snapshot, filter: Filter | None, work: Work) -> list[Bits]:
    """Return which rows of each part a search for words may find. Those whose newer versions are not in the index of
    the growing rows yet remain visible."""
    passing, growing = snapshot.passing(filter, work), snapshot.growing
    count = len(growing.postings)
    if count < len(passing[-1]):
        until = growing.first + count
        newer = until + np.flatnonzero(snapshot.alive[-1].mask[count:])
        rows = np.array([growing.replaced_by(row, until) for row in newer.tolist()], np.int64)
        for number, part in enumerate(snapshot.parts):
            at = part.positions(rows)
            at, passing[number] = at[at < len(passing[number])], passing[number].copy()
            passing[number][at] = True if filter is None else part.passing(filter)[at]
        passing[-1] = passing[-1][:count]  # another search may add the newer ones meanwhile
    return passing


def distances(vectors: NDArray[np.float32], query: NDArray[np.float32], metric: str) -> NDArray[np.float32]:
    """Return distances of vectors [n, d] to a query [d]: squared for l2; 1 - cosine; negative dot product for ip."""
    if metric == "l2":
        return np.asarray(np.square(vectors - query).sum(axis=1), np.float32)
    if metric == "ip":
        return np.asarray(-(vectors @ query), np.float32)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    return np.asarray(1 - (vectors @ query) / np.maximum(lengths, 1e-30), np.float32)
