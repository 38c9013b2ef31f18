"""What a collection's directory contains: an immutable description, and the segments and the log that documents are in.

collection.json     what never changes (`Description`), with a checksum of itself
MANIFEST            the segments, and the log's position behind them (`Manifest`)
log/                write-ahead log of upserts and deletes, which acknowledges them (`log`)
segments/<number>/  sealed: an index with row numbers as ids, documents, attributes (`segment_files`)
tombstones/         <generation>.npy: int64, the deleted rows of the manifest's segments
served/             the log position of each process that serves the collection (`reader_barrier`)
writer.lock         lock of the only writing process

A document gets a row number when it is stored; row numbers are never reused. An upsert of an existing id stores the
document under a new row and deletes the old one. A row number therefore denotes one text permanently, and a result
cannot mix texts.

Bulk loads of earlier versions have another layout, and are converted when they are opened: see `upgrade`.
"""

import io
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from runtime.errors import CollectionError
from runtime.files import read_regular
from runtime.retrieval.attributes.schema import MAX_ATTRIBUTES, AttributeType
from runtime.retrieval.collections.description import (
    ATTRIBUTES,
    DOCUMENTS,
    KEYWORDS,
    SEGMENTS_FORMAT,
    FileChecksum,
    checksum_of,
    decoded,
    read_bytes,
)

MANIFEST = "MANIFEST"
FLAT_FILES = (DOCUMENTS, ATTRIBUTES, KEYWORDS, "words.sqlite")  # of a flat bulk load, beside its indexes
MAX_SEGMENTS = 512
_Number = Annotated[int, Meta(ge=0)]


class SegmentInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sealed segment: the number of its directory, its rows, the checksum of its description, and its shard."""

    number: _Number
    size: _Number
    sha256: str
    shard: int = 0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a collection's segments.

    sequence: the first log record that the segments do not contain, which begins a log file. next_row, next_segment:
    the lowest numbers that were never used. introduced: of earlier versions, which counted the attributes of tenants.
    """

    generation: _Number
    segments: Annotated[list[SegmentInfo], Meta(max_length=MAX_SEGMENTS)]
    sequence: _Number
    next_row: _Number
    next_segment: _Number
    schema: Annotated[dict[str, AttributeType], Meta(max_length=MAX_ATTRIBUTES)]
    tombstones: FileChecksum | None = None
    format: str = SEGMENTS_FORMAT
    version: int = 1
    sha256: str = ""
    introduced: dict[str, str] | msgspec.UnsetType = msgspec.UNSET

    def tombstones_path(self, directory: Path) -> Path:
        return directory / "tombstones" / f"{self.generation}.npy"


def make_folders(directory: Path) -> None:
    """Make the folders of a collection. Raises `OSError`."""
    for folder in ("log", "segments", "tombstones"):
        (directory / folder).mkdir(mode=0o700, exist_ok=True)


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest. Raises `CollectionError`."""
    path = directory / MANIFEST
    found = decoded(path, read_bytes(path), Manifest)
    if len({segment.number for segment in found.segments}) != len(found.segments):
        raise CollectionError(f"{path} is damaged: segments have the same number")
    return found


def tombstones_content(rows: NDArray[np.int64]) -> tuple[bytes, FileChecksum]:
    """Encode a tombstones file; also return its checksum."""
    file = io.BytesIO()
    np.save(file, np.sort(rows), allow_pickle=False)
    content = file.getvalue()
    return content, checksum_of(content)


def read_tombstones(directory: Path, manifest: Manifest) -> NDArray[np.int64]:
    """Read the deleted rows of a manifest's segments. Raises `CollectionError`."""
    if manifest.tombstones is None:
        return np.empty(0, np.int64)
    path = manifest.tombstones_path(directory)
    try:
        content = read_regular(path, manifest.tombstones.bytes)
        if checksum_of(content) != manifest.tombstones:
            raise CollectionError(f"{path} is damaged: its checksum differs from the manifest's")
        rows = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CollectionError(f"{path} is damaged: {error}") from error
    if rows.ndim != 1 or rows.dtype != np.int64:
        raise CollectionError(f"{path} is damaged: it contains {rows.dtype} of shape {list(rows.shape)}")
    return np.asarray(rows)
