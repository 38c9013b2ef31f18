"""Conversion of the bulk loads of earlier versions, which were flat, when they are opened. Nothing else reads them.

Their files are beside `collection.json`, which has their checksums; the shards share documents and attributes:

documents.sqlite, keywords.sqlite, attributes.msgpack    of all shards
index/, or index-0/ index-1/ …                           one index a shard

The files of the new segments are links to the old ones, except for what shards share, and for documents without a
keyword index. The manifest, which is written last, replaces the old layout by the new one in one step.
"""

import os
import shutil
import stat
import time
from pathlib import Path

import numpy as np

from gpu import GraphIndex
from runtime.errors import CollectionBusy, CollectionError
from runtime.files import read_regular, set_modes
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.collections.description import (
    ATTRIBUTES,
    DOCUMENTS,
    INDEX,
    KEYWORDS,
    MANIFEST,
    Description,
    FileChecksum,
    Manifest,
    encode_with_checksum,
    make_folders,
    read_description,
    status_of,
    verify_file,
)
from runtime.retrieval.collections.disk import Disk, storage_errors, writing
from runtime.retrieval.collections.documents import DocumentStore
from runtime.retrieval.collections.log import HEADER, LogWriter, log_files, log_path
from runtime.retrieval.collections.segment import index_errors
from runtime.retrieval.collections.segment_build import (
    building_segment,
    obsolete_files,
    seal_segment,
    write_documents,
)

_RETRY_S = 0.05


def upgrade_if_flat(directory: Path) -> Description:
    """Convert a flat bulk load, or wait until another process has; return the description.

    Raises `CollectionError`, also if this process may not write to it, and `NoRoom`.
    """
    while _is_flat(directory, description := read_description(directory)):
        if not os.access(directory, os.W_OK):
            raise CollectionError(
                f"an earlier version made {directory}, which this process may not write to, and it must be converted: "
                f"run `trinity index upgrade {directory}` as a user who may write to it, or on a writable copy"
            )
        try:
            with writing(directory):
                upgrade(Disk(), directory)
        except CollectionBusy:
            time.sleep(_RETRY_S)
    return description


def upgrade(disk: Disk, directory: Path) -> None:
    """Convert a flat bulk load for a writer, which holds the lock; do nothing to others. Raises `CollectionError`,
    with the old layout in place, and `NoRoom`."""
    description = read_description(directory)
    if not _is_flat(directory, description):
        return
    if _was_written(directory):
        raise CollectionError(f"{directory} is damaged: it has a log, but no file {MANIFEST}")
    shards, files = description.shards, _checked_files(directory, description)
    schema = dict(description.declared)
    if ATTRIBUTES in files:
        schema |= Columns.decode(read_regular(directory / ATTRIBUTES, files[ATTRIBUTES].bytes)).schema
    is_linked = DOCUMENTS not in files or (shards == 1 and KEYWORDS in files)
    segments, next_row = [], 0
    with storage_errors(f"{directory} cannot be converted"):
        make_folders(directory)
        disk.sync_directory(directory)
        for shard, folder in enumerate(_index_folders(shards)):
            with index_errors():
                index = GraphIndex.load(directory / folder)
            ids = index.data.ids
            next_row = max(next_row, index.size if ids is None else 1 + int(np.max(ids)))
            with building_segment(disk, directory, shard) as building:
                shutil.copytree(directory / folder, building / INDEX, copy_function=_link)
                if is_linked:
                    for name in {DOCUMENTS, ATTRIBUTES, KEYWORDS} & files.keys():
                        _link(directory / name, building / name)
                else:
                    with DocumentStore(directory / DOCUMENTS) as store:
                        own = (document for document in store.all() if document.row % shards == shard)
                        write_documents(building, own, schema, store.sources())
                segments.append(seal_segment(disk, building, index.size, shard))
        manifest = Manifest(0, segments, 0, next_row, shards, schema)
        LogWriter(disk, log_path(directory, 0), description.identity, 0).close()
        disk.write_file(directory / MANIFEST, encode_with_checksum(manifest))
        set_modes(directory, stat.S_IMODE(directory.stat().st_mode))
    for path in obsolete_files(directory, manifest, ()):
        disk.remove(path)


def _is_flat(directory: Path, description: Description) -> bool:
    return description.size > 0 and status_of(directory / MANIFEST) is None


def _was_written(directory: Path) -> bool:
    """Return whether there is more of a log than an upgrade begins with: the header of its first file."""
    logs = log_files(directory) if status_of(directory / "log") else []
    return any(first > 0 or path.stat().st_size > HEADER.size for first, path in logs)


def _checked_files(directory: Path, description: Description) -> dict[str, FileChecksum]:
    """Return the files that are converted, which have the right checksums: what is derived from damaged ones would get
    another. Raises `CollectionError`."""
    indexes = {f"{folder}/meta.json" for folder in _index_folders(description.shards)}
    if missing := indexes - description.files.keys():
        raise CollectionError(f"{directory} is damaged: its description does not list {', '.join(sorted(missing))}")
    known = indexes | {DOCUMENTS, ATTRIBUTES, KEYWORDS}
    files = {name: one for name, one in description.files.items() if name in known}
    for name, checksum in files.items():
        verify_file(directory / name, checksum)
    return files


def _index_folders(shards: int) -> tuple[str, ...]:
    return (INDEX,) if shards == 1 else tuple(f"{INDEX}-{shard}" for shard in range(shards))


def _link(source: str | Path, target: str | Path) -> None:
    """Link a file, or copy it where there are no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
