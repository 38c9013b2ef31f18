"""Small collections to write to."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.disk import Disk
from runtime.retrieval.collections.maintenance import BuildSegment
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter

DIM = 8


def vector_of(seed: int, dim: int = DIM) -> NDArray[np.float32]:
    """Return a random vector determined by the seed."""
    return np.random.default_rng(seed).standard_normal(dim).astype(np.float32)


def document(name: str, seed: int, **attributes: Any) -> UpsertDocument:
    return UpsertDocument(name, f"text {seed}", f"title {seed}", attributes, vector_of(seed))


def documents(names: range, **attributes: Any) -> list[UpsertDocument]:
    return [document(str(number), number, **attributes) for number in names]


def new_writer(directory: Path, **options: Any) -> CollectionWriter:
    """Create a collection and open its writer, by default without a background process."""
    dim, shards = options.pop("dim", DIM), options.pop("shards", 1)
    create(directory, dim, metric="l2", degree=8, shards=shards)
    return open_writer(directory, **options)


def open_writer(directory: Path, **options: Any) -> CollectionWriter:
    disk = options.pop("disk", None) or Disk()
    return CollectionWriter(directory, background=options.pop("background", False), disk=disk, **options)


def contents(writer: Any) -> dict[str, str]:
    """Return the texts of all documents by id."""
    rows = writer.state.alive_rows()
    found = [one for one in writer.state.documents(rows.tolist()) if one is not None]
    assert len({one.id for one in found}) == len(found) == writer.state.count
    return {one.id: one.text for one in found}


def maintain(writer: Any, build: BuildSegment) -> bool:
    """Seal or merge like the writer's own threads; return whether a segment was due and installed."""
    return bool(writer.maintenance.seal_if_due(build) or writer.maintenance.merge_if_due(build))
