"""A shard: a pool worker's part of a collection, which is one of its indexes, of one build."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpu import GraphIndex
from ipc import Served
from runtime.errors import CollectionError
from runtime.files import read_regular
from runtime.node.config import CollectionSection
from runtime.pool.collections.scopes import FilterableCollection, Finish, part_of
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import Filter
from runtime.retrieval.collections.checksums import Checksums, open_consistent
from runtime.retrieval.collections.collection import index_errors
from runtime.retrieval.collections.manifest import ATTRIBUTES, FileChecksum, Manifest
from runtime.retrieval.live.reader import LiveReader
from runtime.retrieval.live.storage.checksums import LiveChecksums
from runtime.retrieval.live.storage.manifest import is_live, read_description

_WARM_UP_QUERIES = 8


@dataclass(frozen=True)
class Shard:
    """An opened shard: the index mapped, its edges validated, its files held open by `checksums`.

    A live collection has a reader instead of an index.
    """

    served: Served
    index: GraphIndex | None
    checksums: Checksums | LiveChecksums
    columns: Columns | None = None  # of the whole collection, by row
    live: LiveReader | None = None

    @property
    def key(self) -> str:
        """Its name in the engine; each build of a collection has its own."""
        return engine_key(self.served.name, self.served.identity)

    def filterable(self, index: int) -> FilterableCollection:
        """Return the evaluation of filters to parts of the engine's index of this number."""
        columns, ids = self.columns or Columns(), None if self.index is None else self.index.data.ids

        def passing(condition: Filter, work: Work) -> Finish:
            rows = columns.matching(condition, work)
            found = [part_of(index, rows if ids is None else rows[ids])]
            return lambda: found

        return FilterableCollection(lambda: columns.schema, passing, self.served.demanded)

    def warm_up(self) -> None:
        """Run a few searches, which fault in memory that the first query would otherwise wait for."""
        if self.index is None:
            return
        vectors = np.cos(np.arange(_WARM_UP_QUERIES * self.index.dim, dtype=np.float32)).reshape(_WARM_UP_QUERIES, -1)
        self.index.search(vectors, k=1)


OpenShard = Callable[[CollectionSection, int], Shard]


def engine_key(collection: str, identity: str) -> str:
    """Return the engine's name of a build of a collection."""
    return f"{collection}@{identity}"


def open_shard(section: CollectionSection, worker: int) -> Shard:
    """Open the shard of a collection that the pool worker of this number serves. Raises `CollectionError`."""
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
    served = Served(section.name, about.dim, shard, section.shards, about.identity, schema, demanded, in_place=False)
    return Shard(served, None, reader.checksums, live=reader)


def _columns(directory: Path, manifest: Manifest) -> Columns | None:
    """Return the attributes of the documents, or None without any."""
    if ATTRIBUTES not in manifest.files:
        return None
    path = directory / ATTRIBUTES
    try:
        columns = Columns.decode(read_regular(path, manifest.files[ATTRIBUTES].bytes))
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error
    if columns.size != manifest.size:
        raise CollectionError(f"{path} has {columns.size} rows, not {manifest.size}")
    return columns


def _check_demand(section: CollectionSection, schema: Mapping[str, str]) -> None:
    """Raise `CollectionError` if the collection demands an attribute that no document has."""
    if section.demand and section.demand not in schema:
        raise CollectionError(f"collection {section.name!r} demands {section.demand!r}, which no document has")


def _is_own(name: str, folder: str) -> bool:
    """Return whether a file of the manifest belongs to this shard or to all of them."""
    return "/" not in name or name.startswith(f"{folder}/")
