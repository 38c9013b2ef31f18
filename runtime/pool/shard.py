"""What a pool worker holds of a collection: one of its indexes, of one build."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpu import GraphIndex
from ipc import Served
from runtime.errors import CollectionError
from runtime.node.config import CollectionSection
from runtime.retrieval.collections.checksums import Checksums
from runtime.retrieval.collections.collection import index_errors
from runtime.retrieval.collections.manifest import FileFacts, Manifest
from runtime.retrieval.collections.unchanged import open_unchanged

_TOUCHES = 8


@dataclass(frozen=True)
class Shard:
    """A shard of a collection, mapped and its edges checked. `checksums` has open what it was read from."""

    served: Served
    index: GraphIndex
    checksums: Checksums

    @property
    def key(self) -> str:
        """What the engine calls it: another build of the collection is another index."""
        return key_of(self.served.name, self.served.identity)

    def touch(self) -> None:
        """A few searches, so that a first query finds its memory there."""
        vectors = np.cos(np.arange(_TOUCHES * self.index.dim, dtype=np.float32)).reshape(_TOUCHES, -1)
        self.index.search(vectors, k=1)


OpenShard = Callable[[CollectionSection, int], Shard]


def key_of(collection: str, identity: str) -> str:
    """The engine's name of a collection of this identity."""
    return f"{collection}@{identity}"


def open_shard(section: CollectionSection, worker: int) -> Shard:
    """What the pool worker of this number serves of a collection. Raises `CollectionError`."""
    directory = Path(section.path)

    def opened(manifest: Manifest) -> Shard:
        if len(manifest.indexes) != section.shards:
            raise CollectionError(f"{directory} was built with {len(manifest.indexes)} shards, not {section.shards}")
        shard = worker % section.shards
        folder = directory / manifest.indexes[shard]
        with index_errors():
            index = GraphIndex.load(folder)
            index.check_graph()
            arrays = {folder / name: FileFacts(*facts) for name, facts in index.files().items()}
        if (index.dim, index.metric) != (manifest.dim, manifest.metric) or index.size > manifest.size:
            raise CollectionError(f"{folder} is not the index that {directory}'s manifest describes")
        served = Served(section.name, index.dim, shard, section.shards, manifest.identity)
        own = {directory / name: facts for name, facts in manifest.files.items() if _is_own(name, folder.name)}
        return Shard(served, index, Checksums({**own, **arrays}))

    return open_unchanged(directory, opened, lambda shard: shard.checksums.close())


def _is_own(name: str, folder: str) -> bool:
    """Whether a file of the manifest is of this shard, or of all."""
    return "/" not in name or name.startswith(f"{folder}/")
