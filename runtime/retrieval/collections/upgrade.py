"""Bulk loads of earlier versions, which are flat. They are read as they are, and converted when they are written to.

Their files are beside `collection.json`, which has their checksums; the shards share documents and attributes:

documents.sqlite, keywords.sqlite, attributes.msgpack    of all shards
index/, or index-0/ index-1/ …                           one index a shard

A reader makes the manifest that such a directory does not have. It names the segments to which the conversion links the
files, so a reader that has them open goes on with them. The conversion's manifest, which is written last, replaces the
old layout by the new one in one step.
"""

import os
import shutil
import stat
from contextlib import closing
from pathlib import Path

import msgspec

from runtime.errors import CollectionError
from runtime.files import set_modes
from runtime.retrieval.collections.description import (
    DOCUMENTS,
    INDEX,
    KEYWORDS,
    MANIFEST,
    Manifest,
    SegmentInfo,
    checksum_of,
    encode_with_checksum,
    is_flat,
    make_folders,
    read_description,
    read_manifest_file,
    verify_file,
)
from runtime.retrieval.collections.disk import Disk, storage_errors
from runtime.retrieval.collections.documents import DocumentStore
from runtime.retrieval.collections.log import HEADER, begin_log_file, log_files
from runtime.retrieval.collections.segment import META, Contents, Segment, flat_files
from runtime.retrieval.collections.segment_build import new_segment, obsolete_files, seal_segment
from runtime.retrieval.keywords.index import KeywordFile

IDS = f"{INDEX}/ids.npy"


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest, or of a flat bulk load one of generation -1, without a schema. Raises `CollectionError`."""
    try:
        return read_manifest_file(directory)
    except CollectionError:
        if not is_flat(directory, description := read_description(directory)):
            raise
    if any(first > 0 or path.stat().st_size > HEADER.size for first, path in log_files(directory)):
        raise CollectionError(f"{directory} is damaged: it has a log, but no file {MANIFEST}")
    segments, shards = [], description.shards
    for shard in range(shards):
        size = len(range(shard, description.size, shards))
        files = flat_files(directory, description, shard)
        text = msgspec.json.encode(Contents(size, {name: file.known for name, file in files.items()}))
        segments.append(SegmentInfo(shard, size, checksum_of(text).sha256, shard))
    return Manifest(-1, segments, 0, description.size, shards, {})


def upgrade(disk: Disk, directory: Path) -> None:
    """Convert a flat bulk load for a writer, which holds the lock; do nothing to others. Raises `CollectionError`,
    with the old layout in place, and `NoRoom`."""
    description, flat = read_description(directory), read_manifest(directory)
    if flat.generation >= 0:
        return
    files = flat_files(directory, description, 0).keys() - {META}
    lacks_keywords = DOCUMENTS in files and KEYWORDS not in files
    schema, segments, next_row = dict(description.declared), list[SegmentInfo](), 0
    for name in files:  # a damaged one would get another checksum
        verify_file(directory / name, description.files[name])
    with storage_errors(f"{directory} cannot be converted"):
        make_folders(directory)
        disk.sync_directory(directory)
        if lacks_keywords:  # the shards share one, as they do the documents; as a flat bulk load it still has none
            disk.remove(directory / KEYWORDS)  # of an upgrade that was killed
            with DocumentStore(directory / DOCUMENTS) as store:
                KeywordFile.create(directory / KEYWORDS, ((one.title, one.text) for one in store.all()))
            files.add(KEYWORDS)
        for info in flat.segments:
            with closing(Segment(directory, info, description)) as segment:
                schema |= segment.columns.schema
                if ids := segment.files.get(IDS):  # the other arrays keep their checksums, which `verify` compares
                    verify_file(*ids)
                next_row = max(next_row, 1 + int(segment.rows.max()))
            # One with another file than the flat one has another number: readers open it as any new segment.
            number = info.number + description.shards if lacks_keywords else info.number
            with new_segment(disk, directory, number) as folder:
                index = flat_files(directory, description, info.shard)[META].path.parent
                shutil.copytree(index, folder / INDEX, copy_function=_link)
                for name in files:
                    _link(directory / name, folder / name)
                segments.append(seal_segment(disk, folder, info.size, info.shard))
        manifest = Manifest(0, segments, 0, next_row, 1 + segments[-1].number, schema)
        begin_log_file(disk, directory, description.identity, 0)
        disk.write_file(directory / MANIFEST, encode_with_checksum(manifest))
        set_modes(directory, stat.S_IMODE(directory.stat().st_mode))
    for path in obsolete_files(directory, manifest, ()):
        disk.remove(path)


def _link(source: str | Path, target: str | Path) -> None:
    """Link a file, or copy it where there are no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
