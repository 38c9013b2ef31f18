"""Hybrid search of a client: a keyword search in this process, fused with the pools' results by rank.

The pools know vectors only. A hybrid query requests more rows from them than are wanted, searches the keyword index of
the build that answered, and fuses the two (docs/hybrid.md).
"""

import numbers
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import CollectionError, InvalidRequest, Unavailable
from runtime.node.config import PoolSection
from runtime.retrieval.attributes.filters import FilterLike, decode_filter, filter_bytes
from runtime.retrieval.neighbors import FUSION_DEPTH
from runtime.retrieval.open_build import OpenBuild, open_build
from runtime.retrieval.search.dispatcher import Dispatcher
from runtime.retrieval.search.query import SearchOptions, SearchResult, make_spec
from runtime.retrieval.search.vectors import as_vectors, on_host

_NO_DEADLINE = 1 << 62


@dataclass(frozen=True)
class HybridQuery:
    """The keyword side of a hybrid query: its text, `weight` and `k`. `depth`: rows from each side."""

    collection: str
    filter: FilterLike
    text: str
    weight: float
    k: int
    depth: int


class HybridSearch:
    """Keyword indexes of a node's collections, opened on first use. Thread-safe.

    `paths`: returns the directories of the node's own collections. `remote`: names of collections on other nodes.
    """

    def __init__(self, pools: Dispatcher, remote: Collection[str] = ()) -> None:
        self.paths: Callable[[], Mapping[str, str]] = dict
        self._pools, self._remote = pools, remote
        self._builds: dict[str, OpenBuild] = {}
        self._lock = threading.Lock()

    def parse(self, text: Any, hybrid: Any, k: Any, options: SearchOptions) -> HybridQuery | None:
        """Return the keyword side of a search; None if it is not hybrid. Raises `InvalidRequest`."""
        if not isinstance(hybrid, numbers.Real) or not 0 <= float(hybrid) <= 1:
            raise InvalidRequest(
                f"hybrid must be True, False or the keywords' weight between 0 and 1, not {hybrid!r}", "hybrid"
            )
        if not isinstance(text, str) or bool(text) != bool(hybrid):
            raise InvalidRequest(f"text and hybrid go together: text is {text!r:.64}, hybrid is {hybrid!r}", "text")
        if not hybrid:
            return None
        collection, top_m = options.get("collection", ""), options.get("top_m")
        if collection in self._remote:  # ranks of different nodes are not comparable
            raise InvalidRequest(f"collection {collection!r} is on other nodes, without hybrid search", "hybrid")
        spec = make_spec(k, "", "prefill", top_m, 1, None)
        max_k = min((pool.max_k for pool in self._pools.clients()), default=PoolSection().max_k)
        depth = max(spec.k, min(FUSION_DEPTH * spec.k, max_k, spec.top_m or max_k))
        weight = 0.5 if hybrid is True else float(hybrid)
        return HybridQuery(collection, options.get("filter"), text, weight, spec.k, depth)

    def fuse(self, result: SearchResult, query: HybridQuery, vector: Any, deadline_ns: int) -> SearchResult:
        """Search the keyword index of the build that `result` comes from; return both fused.

        Raises `InvalidRequest` for a build without a keyword index, `DeadlineExceeded`, and `Unavailable` if the build
        cannot be opened here.
        """
        content, row = filter_bytes(query.filter), np.asarray(on_host(as_vectors(vector)), np.float32)
        try:
            with self._lock:
                build = self._opened(query.collection, result.identity)
            if (keywords := build.keywords) is None:
                raise InvalidRequest(f"{query.collection!r} has no keyword index (docs/hybrid.md)", "hybrid")
            parsed = decode_filter(content) if content else None
            found = keywords.search_keywords(query.text, row, query.depth, parsed, deadline_ns or _NO_DEADLINE)
            return build.fuse(result, found, query.k, query.weight)
        except CollectionError as error:
            raise Unavailable(
                f"collection {query.collection!r}: its keyword index cannot be searched: {error.message}"
            ) from error

    def _opened(self, collection: str, identity: str) -> OpenBuild:
        """Return this build, if it is what the directory contains now. Raises `CollectionError`, `Unavailable`."""
        build = self._builds.get(collection)
        if build is None or build.identity != identity:
            paths = self.paths()
            path = paths.get(collection or next(iter(paths), ""))  # without a name: the only collection
            if path is None:
                raise Unavailable(f"the directory of collection {collection!r} is not known here")
            found = open_build(Path(path), "never", verify_first=False)
            if found.identity != identity:
                found.close()
                raise Unavailable(f"{path} contains another build than the pools serve: reload it")
            self._builds[collection] = found
            if build is not None:
                build.close()
            build = found
        return build

    def close(self) -> None:
        """Close the files. Idempotent."""
        with self._lock:
            while self._builds:
                self._builds.popitem()[1].close()
