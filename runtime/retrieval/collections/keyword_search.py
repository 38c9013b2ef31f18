"""Keyword search of a built collection: BM25 ranks, with vector distances for fusion with the vector search."""

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpu import GpuError, GraphIndex
from runtime.errors import CollectionError
from runtime.files import open_regular
from runtime.retrieval.attributes.columns import Bits, Columns
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.collections.collection import gather_vectors
from runtime.retrieval.collections.keyword_index import KeywordIndex, distances
from runtime.retrieval.collections.manifest import ATTRIBUTES, KEYWORDS, Manifest
from runtime.retrieval.neighbors import Neighbors

_FILTERS_KEPT = 16


class KeywordSearch:
    """The keyword index, vectors and attributes of one build. Thread-safe."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Open the files that the manifest names. Raises `CollectionError`."""
        self._index = KeywordIndex.open(directory / KEYWORDS)
        self._attributes = -1
        self._passing = lru_cache(_FILTERS_KEPT)(self._evaluated)
        self._columns: Columns | None = None
        try:
            self._shards = [GraphIndex.load(directory / folder) for folder in manifest.indexes]
            if ATTRIBUTES in manifest.files:  # opened now: the path may lead to another build later
                self._attributes = open_regular(directory / ATTRIBUTES)
        except GpuError as error:
            self.close()
            raise CollectionError(str(error)) from error
        except OSError as error:
            self.close()
            raise CollectionError(f"{error.filename} cannot be read: {error.strerror}") from error

    def search_keywords(
        self, text: str, vector: NDArray[np.float32], depth: int, filter: Filter | None, deadline_ns: int
    ) -> Neighbors:
        """Return the rows that match words of a text and pass a filter, by descending BM25 score, int64 [≤ depth], and
        the distances of their vectors from the text's `vector`, float32 [≤ depth].

        Raises the errors of `KeywordIndex.search`.
        """
        bits = None if filter is None else self._passing(filter)
        rows = self._index.search(text, depth, bits, deadline_ns)
        return rows, distances(gather_vectors(self._shards, rows), vector, self._shards[0].metric)

    def _evaluated(self, filter: Filter) -> Bits:
        if self._columns is None:
            with open(os.dup(self._attributes), "rb") as file:
                self._columns = Columns.decode(file.read())
        return self._columns.matching(filter)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._index.close()
        if self._attributes >= 0:
            os.close(self._attributes)
            self._attributes = -1
