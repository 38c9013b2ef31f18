"""Words beside the vector of a client's search: looked for in this process, in the collection's own files.

Pools know nothing of words. They are asked for more rows than are wanted, and what the text's words find in the build
that has answered is fused with these (docs/hybrid.md).
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
from runtime.retrieval.search.query import SearchOptions, SearchResult, fuse_keywords, make_spec
from runtime.retrieval.search.vectors import as_vectors, on_host

_NO_DEADLINE = 1 << 62


@dataclass(frozen=True)
class HybridQuery:
    """A text whose words are looked for, their `share`, and how many rows are wanted; `depth`: of each side."""

    collection: str
    wanted: FilterLike
    text: str
    share: float
    k: int
    depth: int


class HybridSearch:
    """The words of a node's collections, opened when they are first asked for. Any number of threads may ask.

    `paths`: where the node's own collections lie now. `remote`: those that are on other nodes.
    """

    def __init__(self, pools: Dispatcher, remote: Collection[str] = ()) -> None:
        self.paths: Callable[[], Mapping[str, str]] = dict
        self._pools, self._remote = pools, remote
        self._builds: dict[str, OpenBuild] = {}
        self._lock = threading.Lock()

    def asked(self, text: Any, hybrid: Any, k: Any, options: SearchOptions) -> HybridQuery | None:
        """What a search asks for beside the nearest; None if it is not hybrid. Raises `InvalidRequest`."""
        if not isinstance(hybrid, numbers.Real) or not 0 <= float(hybrid) <= 1:
            raise InvalidRequest(
                f"hybrid must be True, False or the words' share between 0 and 1, not {hybrid!r}", "hybrid"
            )
        if not isinstance(text, str) or bool(text) != bool(hybrid):
            raise InvalidRequest(f"text and hybrid go together: text is {text!r:.64}, hybrid is {hybrid!r}", "text")
        if not hybrid:
            return None
        collection, top_m = options.get("collection", ""), options.get("top_m")
        if collection in self._remote:  # ranks of different nodes say nothing of each other
            raise InvalidRequest(f"collection {collection!r} is on other nodes: they are asked without it", "hybrid")
        wanted = make_spec(k, "", "prefill", top_m, 1, None)
        most = min((pool.max_k for pool in self._pools.clients()), default=PoolSection().max_k)
        depth = max(wanted.k, min(FUSION_DEPTH * wanted.k, most, wanted.top_m or most))
        return HybridQuery(
            collection, options.get("filter"), text, 0.5 if hybrid is True else float(hybrid), wanted.k, depth
        )

    def fused(self, result: SearchResult, asked: HybridQuery, vector: Any, deadline_ns: int) -> SearchResult:
        """A pool's result and what the words find in the build that it is from. Raises `InvalidRequest` for a build
        without words, `DeadlineExceeded`, and `Unavailable` where its words are not here (yet)."""
        content, row = filter_bytes(asked.wanted), np.asarray(on_host(as_vectors(vector)), np.float32)
        try:
            with self._lock:
                words = self._opened(asked.collection, result.identity).words
            if words is None:
                raise InvalidRequest(f"{asked.collection!r} has no index of words (docs/hybrid.md)", "hybrid")
            passing = decode_filter(content) if content else None
            found = words.search_keywords(asked.text, row, asked.depth, passing, deadline_ns or _NO_DEADLINE)
        except CollectionError as error:
            told = f"collection {asked.collection!r}: its words cannot be searched: {error.message}"
            raise Unavailable(told) from error
        return fuse_keywords(result, found, asked.k, asked.share)

    def _opened(self, collection: str, identity: str) -> OpenBuild:
        """The build, if it is what lies in its directory now. Raises `CollectionError`, `Unavailable`."""
        build = self._builds.get(collection)
        if build is None or build.identity != identity:
            paths = self.paths()
            path = paths.get(collection or next(iter(paths), ""))  # without a name it is the only one
            if path is None:
                raise Unavailable(f"the files of collection {collection!r} are not known here")
            found = open_build(Path(path), "never", verify_first=False)
            if found.identity != identity:
                found.close()
                raise Unavailable(f"another build than the pools serve lies in {path}: reload it")
            self._builds[collection] = found
            if build is not None:
                build.close()
            build = found
        return build

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        with self._lock:
            while self._builds:
                self._builds.popitem()[1].close()
