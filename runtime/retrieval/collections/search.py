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
from runtime.errors import InvalidRequest, Unavailable
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.attributes.evaluation import Work, check_deadline
from runtime.retrieval.attributes.filters import Filter, binds, check_filter
from runtime.retrieval.collections.growing_segment import GrowingSegment
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.collections.state import Snapshot, State, vectors_of
from runtime.retrieval.keywords.index import Searched, search_indexes
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
    try:
        parts = []
        for segment, whole, bits in zip(snapshot.segments, snapshot.whole, allowed, strict=False):
            mask = None if whole and filter is None else bits
            parts.append(segment.searchable.search(queries, k, max(k, top_m), search_width, patience, threads, mask))
        if not parts or (len(growing) and growing.any()):
            parts.append(_search_growing(snapshot.growing, queries, k, growing))
    except GpuError as error:
        raise InvalidRequest(str(error)) from error
    return parts[0] if len(parts) == 1 else merge_neighbors(parts, k)


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
    snapshot.growing.add_postings(len(snapshot.alive[-1]), lambda: clock() < until)
    searched = _searched(state, snapshot, filter, Work(partial(check_deadline, deadline_ns)))
    rows = search_indexes(searched, text, depth, deadline_ns)
    return rows, distances(vectors_of(snapshot.parts, rows, len(vector)), vector, state.description.metric)


def _searched(state: State, snapshot: Snapshot, filter: Filter | None, work: Work) -> list[Searched]:
    passing, growing = snapshot.passing(filter, work), snapshot.growing
    count = len(growing.postings)
    if count < len(passing[-1]):  # the rows whose newer versions are not in the index yet remain visible
        until = growing.first + count
        rows = growing.replaced_by(until + np.flatnonzero(snapshot.alive[-1][count:]), until)
        for number, part in enumerate(snapshot.parts):
            at = part.positions(rows)
            at, passing[number] = at[at < len(passing[number])], passing[number].copy()
            passing[number][at] = True if filter is None else part.passing(filter)[at]
        passing[-1] = passing[-1][:count]
    searched = []
    for part, bits in zip(snapshot.parts, passing, strict=True):
        if isinstance(part, Segment) and part.lacks_keywords:
            where = state.directory
            raise Unavailable(f"{where} has a segment without a keyword index: `trinity index compact` makes one")
        words, rows = part.keywords if isinstance(part, Segment) else growing.postings, part.rows
        if isinstance(part, Segment) and part.stored > part.size:  # it has the rows of other shards, too
            visible = np.zeros(part.stored, bool)
            visible[rows] = bits
            rows, bits = np.arange(part.stored), visible
        if words is not None:
            searched.append(Searched(words, rows, bits))
    return searched


def distances(vectors: NDArray[np.float32], query: NDArray[np.float32], metric: str) -> NDArray[np.float32]:
    """Return distances of vectors [n, d] to a query [d]: squared for l2; 1 - cosine; negative dot product for ip."""
    if metric == "l2":
        return np.asarray(np.square(vectors - query).sum(axis=1), np.float32)
    if metric == "ip":
        return np.asarray(-(vectors @ query), np.float32)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    return np.asarray(1 - (vectors @ query) / np.maximum(lengths, 1e-30), np.float32)
