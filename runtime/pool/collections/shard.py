"""What a pool worker holds of a collection: one of its indexes, of one build."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpu import GraphIndex
from ipc import Served
from runtime.errors import CollectionError
from runtime.node.config import CollectionSection
from runtime.pool.collections.scopes import Filtered, Part, part_of
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.collections.checksums import Checksums, open_consistent
from runtime.retrieval.collections.collection import index_errors
from runtime.retrieval.collections.manifest import ATTRIBUTES, FileChecksum, Manifest
from runtime.retrieval.live.reader import LiveReader
from runtime.retrieval.live.storage.checksums import LiveChecksums
from runtime.retrieval.live.storage.manifest import is_live, read_description

_TOUCHES = 8


@dataclass(frozen=True)
class Shard:
    """A shard of a collection, mapped and its edges checked. `checksums` has open what it was read from. A live
    collection has a reader instead of an index."""

    served: Served
    index: GraphIndex | None
    checksums: Checksums | LiveChecksums
    columns: Columns | None = None  # of the whole collection, by row
    live: LiveReader | None = None

    @property
    def key(self) -> str:
        """What the engine calls it: another build of the collection is another index."""
        return key_of(self.served.name, self.served.identity)

    def filtered(self, index: int) -> Filtered:
        """How filters are evaluated for the engine's index of this number."""
        columns, ids = self.columns or Columns(), None if self.index is None else self.index.data.ids

        def parts(wanted: Filter) -> list[Part]:
            rows = columns.passing(wanted)
            return [part_of(index, rows if ids is None else rows[ids])]

        return Filtered(lambda: columns.schema, parts, self.served.demanded)

    def touch(self) -> None:
        """A few searches, so that a first query finds its memory there."""
        if self.index is None:
            return
        vectors = np.cos(np.arange(_TOUCHES * self.index.dim, dtype=np.float32)).reshape(_TOUCHES, -1)
        self.index.search(vectors, k=1)


OpenShard = Callable[[CollectionSection, int], Shard]


def key_of(collection: str, identity: str) -> str:
    """The engine's name of a collection of this identity."""
    return f"{collection}@{identity}"


def desk_number(served: Served, index: int) -> int:
    """What the desk calls the collection whose index has this number: below -1 where only filters may search it."""
    return -2 - index if served.demanded else index


def open_shard(section: CollectionSection, worker: int) -> Shard:
    """What the pool worker of this number serves of a collection. Raises `CollectionError`."""
    directory = Path(section.path)
    if is_live(directory):
        return _open_live(section, directory, worker)

    def opened(manifest: Manifest) -> Shard:
        if len(manifest.indexes) != section.shards:
            raise CollectionError(f"{directory} was built with {len(manifest.indexes)} shards, not {section.shards}")
        shard = worker % section.shards
        folder = directory / manifest.indexes[shard]
        with index_errors():
            index = GraphIndex.load(folder)
            index.check_graph()
            arrays = {folder / name: FileChecksum(*checksum) for name, checksum in index.files().items()}
        if (index.dim, index.metric) != (manifest.dim, manifest.metric) or index.size > manifest.size:
            raise CollectionError(f"{folder} is not the index that {directory}'s manifest describes")
        columns = _columns(directory, manifest)
        schema = {} if columns is None else {name: str(kind) for name, kind in columns.schema.items()}
        _check_demand(section, schema)
        served = Served(section.name, index.dim, shard, section.shards, manifest.identity, schema, section.demand)
        own = {directory / name: checksum for name, checksum in manifest.files.items() if _is_own(name, folder.name)}
        return Shard(served, index, Checksums({**own, **arrays}), columns)

    return open_consistent(directory, opened, lambda shard: shard.checksums.close())


def _open_live(section: CollectionSection, directory: Path, worker: int) -> Shard:
    if (made := read_description(directory).shard_count) != section.shards:
        raise CollectionError(f"{directory} was made with {made} shards, not {section.shards}")
    shard = worker % section.shards
    reader = LiveReader(directory, background=True, shard=shard)
    about, schema = reader.description, {name: str(kind) for name, kind in reader.state.schema.items()}
    if section.demand:
        _check_demand(section, schema)
    demanded = section.demand or about.demanded or ""
    served = Served(section.name, about.dim, shard, section.shards, about.identity, schema, demanded)
    return Shard(served, None, reader.checksums, live=reader)


def _columns(directory: Path, manifest: Manifest) -> Columns | None:
    """The attributes of its documents; None where there are none."""
    if ATTRIBUTES not in manifest.files:
        return None
    path = directory / ATTRIBUTES
    try:
        columns = Columns.decode(path.read_bytes())
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error
    if columns.size != manifest.size:
        raise CollectionError(f"{path} has {columns.size} rows, not {manifest.size}")
    return columns


def _check_demand(section: CollectionSection, schema: Mapping[str, str]) -> None:
    """Raises `CollectionError` where no search could meet what the collection demands."""
    if section.demand and section.demand not in schema:
        known = ", ".join(sorted(schema)) or "none"
        raise CollectionError(
            f"collection {section.name!r} demands {section.demand!r}, which no document has; attributes: {known}"
        )


def _is_own(name: str, folder: str) -> bool:
    """Whether a file of the manifest is of this shard, or of all."""
    return "/" not in name or name.startswith(f"{folder}/")
