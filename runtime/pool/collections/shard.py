"""A shard: a pool worker's part of a collection."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import structs

from ipc import Served
from runtime.errors import CollectionError
from runtime.node.config import CollectionSection
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.segment import Segment

_WARM_UP_QUERIES = 8


@dataclass(frozen=True)
class Shard:
    """An opened shard: the reader of its segments, which are mapped and their edges checked, and of the log.

    served: what does not change of what sessions are told of it.
    """

    served: Served
    reader: CollectionReader

    @property
    def offered(self) -> Served:
        """What sessions are told of it, as of now. Without writes, vectors of requests may stay in a GPU's memory if
        all rows are in one index."""
        reader = self.reader
        schema = {name: str(kind) for name, kind in reader.state.schema.items()}
        in_place = not reader.was_written and len(reader.state.segments) == 1
        return structs.replace(self.served, attributes=schema, in_place=in_place)

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
    reader = CollectionReader(directory, background=True, shard=shard, prepare=Segment.check)
    about = reader.description
    if about.shards != section.shards:
        reader.close()
        raise CollectionError(f"{directory} was built with {about.shards} shards, not {section.shards}")
    served = Served(section.name, about.dim, shard, section.shards, about.identity, demanded=about.demanded or "")
    return Shard(served, reader)
