"""A collection that is written and served by pools, with the expected results of searches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runtime.node.placement.plan import NodePlan
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.search.client import SearchClient
from runtime.testing.pool import InProcessPool
from runtime.testing.waiting import until
from tests.gpu.datasets import clustered
from tests.pool.client_helpers import Vectors
from tests.queries import passages_of

DIM = 16
SEALED = 300  # rows of a segment large enough to be searched by its graph


def tenant_filter(tenant: str) -> dict[str, Any]:
    """Return the filter of a tenant's documents."""
    return {"type": "eq", "key": "tenant", "value": tenant}


class WrittenCollection:
    """A collection, its writer and a model of its contents: vectors and attributes by id."""

    def __init__(self, path: Path, **made: Any) -> None:
        create(path, DIM, metric="l2", **made)
        self.path, self.writer = path, CollectionWriter(path, background=False, seal_rows=1 << 20)
        self.held: dict[str, tuple[Vectors, dict[str, Any]]] = {}
        self._random = np.random.default_rng(5)

    def upsert(self, *names: str, **attributes: Any) -> None:
        vectors = clustered(self._random, len(names), DIM)
        documents = [
            UpsertDocument(name, f"text of {name}", attributes=attributes, vector=vector)
            for name, vector in zip(names, vectors, strict=True)
        ]
        self.writer.upsert(documents)
        self.held |= {name: (vector, attributes) for name, vector in zip(names, vectors, strict=True)}

    def replace(self, name: str) -> int:
        """Replace a document by one with the same vector; return its row."""
        vector, attributes = self.held[name]
        self.writer.upsert([UpsertDocument(name, f"text of {name}", attributes=attributes, vector=vector)])
        return self.writer.state.rows_of([name])[name]

    def delete(self, *names: str) -> None:
        self.writer.delete(names)
        for name in names:
            self.held.pop(name, None)

    def nearest(self, query: Vectors, k: int, attributes: Mapping[str, Any] | None = None) -> list[str]:
        """Return the nearest documents with these attributes."""
        wanted = (attributes or {}).items()
        near = {
            name: float(np.square(v - query).sum()) for name, (v, own) in self.held.items() if wanted <= own.items()
        }
        return sorted(near, key=near.__getitem__)[:k]


class Served:
    """Searches of the collection through a pool, and lookups of its documents as by an answering worker."""

    def __init__(self, plan: NodePlan, pools: list[InProcessPool], client: SearchClient) -> None:
        self.plan, self.pools, self.pool, self.client = plan, pools, pools[0], client
        self._registry = CollectionRegistry(plan)
        self._registry.follow("docs", client.identities("docs"))

    def find(self, query: Vectors, k: int = 10, **options: Any) -> list[str]:
        """Return the ids given by the texts."""
        result = self.client.search(query, k, top_m=64, **options)
        found = passages_of(self._registry, "docs", result)
        assert all(passage.text == f"text of {passage.id}" for passage in found)
        return [passage.id for passage in found]

    def until_found(self, query: Vectors, expected: list[str], **options: Any) -> None:
        until(lambda: self.find(query, max(len(expected), 1), **options) == expected)
