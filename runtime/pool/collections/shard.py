"""A shard: a pool worker's part of a collection."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ipc import Served
from runtime.errors import CollectionError
from runtime.node.config import CollectionSection
from runtime.retrieval.collections.reader import CollectionReader

_WARM_UP_QUERIES = 8


@dataclass(frozen=True)
class Shard:
    """An opened shard: the reader of its segments, which are mapped and their edges checked, and of the log."""

    served: Served
    reader: CollectionReader

    @property
    def key(self) -> str:
        """Its name in the engine; each build of a collection has its own."""
        return engine_key(self.served.name, self.served.identity)

    def warm_up(self) -> None:
        """Run a few searches, which fault in memory that the first query would otherwise wait for."""
        dim = self.served.dim
        vectors = np.cos(np.arange(_WARM_UP_QUERIES * dim, dtype=np.float32)).reshape(_WARM_UP_QUERIES, -1)
        for segment in self.reader.state.segments:
            segment.index.search(vectors, k=1)


OpenShard = Callable[[CollectionSection, int], Shard]


def engine_key(collection: str, identity: str) -> str:
    """Return the engine's name of a build of a collection."""
    return f"{collection}@{identity}"


def open_shard(section: CollectionSection, worker: int) -> Shard:
    """Open the shard of a collection that the pool worker of this number serves. Raises `CollectionError`."""
    directory, shard = Path(section.path), worker % section.shards
    reader = CollectionReader(directory, background=True, shard=shard)
    about = reader.description
    try:
        if about.shards != section.shards:
            raise CollectionError(f"{directory} was built with {about.shards} shards, not {section.shards}")
        schema = {name: str(kind) for name, kind in reader.state.schema.items()}
    except CollectionError:
        reader.close()
        raise
    served = Served(section.name, about.dim, shard, section.shards, about.identity, schema, about.demanded or "")
    return Shard(served, reader)
