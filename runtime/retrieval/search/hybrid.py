"""Hybrid search of a client: a keyword search in this process, fused with the pools' results by rank.

The pools know vectors only. A hybrid query requests more rows from them than are wanted, searches the keyword index of
the build that answered, and fuses the two (docs/hybrid.md).
"""

import numbers
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ipc import SearchSpec
from runtime.errors import CollectionError, InvalidRequest, Unavailable
from runtime.node.placement.plan import MAX_K
from runtime.retrieval.attributes.filters import decode_filter
from runtime.retrieval.neighbors import FUSION_DEPTH
from runtime.retrieval.open_build import OpenBuild, open_build
from runtime.retrieval.search.dispatcher import Dispatcher
from runtime.retrieval.search.query import Query, SearchResult
from runtime.retrieval.search.vectors import on_host

_NO_DEADLINE = 1 << 62


class HybridSearch:
    """Keyword indexes of a node's collections, opened on first use. Thread-safe.

    `paths`: returns the directories of the node's own collections. `remote`: names of collections on other nodes.
    """

    def __init__(self, dispatcher: Dispatcher, remote: Collection[str] = ()) -> None:
        self.paths: Callable[[], Mapping[str, str]] = dict
        self._dispatcher, self._remote = dispatcher, remote
        self._builds: dict[str, OpenBuild] = {}
        self._lock = threading.Lock()

    def widen(self, spec: SearchSpec, text: Any, hybrid: Any) -> tuple[SearchSpec, float]:
        """Return a search with the rows that its fusion needs of each side, and the keywords' weight; 0 for none.

        Raises `InvalidRequest`.
        """
        if not isinstance(hybrid, numbers.Real) or not 0 <= float(hybrid) <= 1:
            raise InvalidRequest(
                f"hybrid must be True, False or the keywords' weight between 0 and 1, not {hybrid!r}", "hybrid"
            )
        if not isinstance(text, str) or bool(text) != bool(hybrid):
            raise InvalidRequest(f"text and hybrid go together: text is {text!r:.64}, hybrid is {hybrid!r}", "text")
        if not hybrid:
            return spec, 0.0
        if spec.collection in self._remote:  # ranks of different nodes are not comparable
            raise InvalidRequest(f"collection {spec.collection!r} is on other nodes, without hybrid search", "hybrid")
        max_k = min((pool.max_k for pool in self._dispatcher.pools.clients()), default=MAX_K)
        depth = max(spec.k, min(FUSION_DEPTH * spec.k, max_k, spec.top_m or max_k))
        return replace(spec, k=depth), 0.5 if hybrid is True else float(hybrid)

    def fuse(self, result: SearchResult, query: Query, k: int) -> SearchResult:
        """Search the keyword index of the build that `result` comes from; return the `k` best of both.

        Raises `DeadlineExceeded`, and `Unavailable` if the build cannot be opened here.
        """
        assert query.vector is not None, "it has been searched"
        spec, row = query.spec, on_host(query.vector)
        try:
            with self._lock:
                build = self._opened(spec.collection, result.identity)
            parsed = decode_filter(spec.filter) if spec.filter else None
            found = build.documents.search_keywords(query.text, row, spec.k, parsed, spec.deadline_ns or _NO_DEADLINE)
            return build.fuse(result, found, k, query.hybrid)
        except CollectionError as error:
            raise Unavailable(
                f"collection {spec.collection!r}: its keyword index cannot be searched: {error.message}"
            ) from error

    def _opened(self, collection: str, identity: str) -> OpenBuild:
        """Return this build, if it is what the directory contains now. Raises `CollectionError`, `Unavailable`."""
        build = self._builds.get(collection)
        if build is None or build.identity != identity:
            paths = self.paths()
            path = paths.get(collection)
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
