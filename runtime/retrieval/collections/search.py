"""Search over the state of a collection: sealed segments by their graphs, growing rows exactly, then a merge.

Where only a share of a segment's rows may be results (because of a filter or deletions), either each of those rows is
compared with the query, or the graph is walked with a candidate list that is longer in inverse proportion to that
share. The rule is the engine's: `gpu.cpu.extend.filtered`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu import GpuError, GraphIndex
from gpu.params import MAX_TOP_M
from runtime.errors import InvalidRequest
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import Filter, binds, check_filter
from runtime.retrieval.collections.growing_segment import GrowingSegment
from runtime.retrieval.collections.state import State
from runtime.retrieval.neighbors import Neighbors, merge_neighbors


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
    Raises `InvalidRequest`, `InvalidFilter`.
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
            parts.append(search_segment(segment.index, queries, k, top_m, search_width, mask, threads, patience))
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


def search_segment(
    index: GraphIndex,
    queries: NDArray[Any],
    k: int,
    top_m: int,
    search_width: int,
    allowed: Bits | None,
    threads: int = 1,
    patience: int | None = None,
) -> Neighbors:
    """Return the k nearest allowed rows of a segment, as `search` does. Raises `GpuError`."""
    top_m = max(k, top_m)
    if allowed is None:
        return index.search(queries, k, top_m, search_width, patience, threads)
    from gpu.cpu.extend import filtered

    rows, queries = np.flatnonzero(allowed), np.asarray(queries)
    scan_rows = (
        filtered.SCAN_ROWS_PER_ENTRY_BATCHED if len(queries) >= filtered.MIN_BATCH else filtered.SCAN_ROWS_PER_ENTRY
    )
    longer = int(filtered.filtered_top_m(top_m, len(rows), index.size, MAX_TOP_M, scan_rows))
    if not longer:
        return index.exact(queries, k, rows)
    return index.search(queries, k, longer, search_width, patience, threads, allowed=allowed, min_allowed=top_m)
