"""Conversion of a flat bulk load, which an earlier version made, into segments with a log.

The files of the new segments are links to the old ones, except for what its shards share. The manifest, which is
written last, replaces the old layout by the new one in one step; until then readers find the old one. The old files are
removed with the other files that the manifest does not need, see `obsolete_files`.
"""

import os
import shutil
from contextlib import closing
from pathlib import Path

from msgspec.structs import replace

from runtime.errors import CollectionError
from runtime.retrieval.attributes.schema import AttributeType
from runtime.retrieval.collections.description import (
    ATTRIBUTES,
    DOCUMENTS,
    INDEX,
    KEYWORDS,
    MAX_ROWS,
    Description,
    encode_with_checksum,
    read_description,
)
from runtime.retrieval.collections.disk import Disk, storage_error
from runtime.retrieval.collections.log import LogWriter, log_path
from runtime.retrieval.collections.manifest import (
    MANIFEST,
    SegmentInfo,
    make_folders,
    read_manifest,
)
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.collections.segment_files import META, building_segment, seal_segment, write_documents


def upgrade(disk: Disk, directory: Path) -> None:
    """Convert a flat bulk load, for a writer, which holds the lock.

    Raises `CollectionError`, also for any collection that has no numbers left for rows, and `NoRoom`.
    """
    description = read_description(directory)
    manifest = read_manifest(directory, description)
    if manifest.next_row >= MAX_ROWS:
        raise CollectionError(f"{directory} has the id {manifest.next_row - 1}: documents cannot be added behind it")
    if manifest.has_log:
        return
    try:
        make_folders(directory)
        disk.sync_directory(directory)
        schema, first = dict(description.schema), manifest.next_segment  # new numbers: pools serve both meanwhile
        segments = [
            _sealed(disk, directory, description, info, number, schema)
            for number, info in enumerate(manifest.segments, first)
        ]
        next_segment = first + len(segments)
        upgraded = replace(manifest, segments=segments, generation=0, next_segment=next_segment, schema=schema)
        LogWriter(disk, log_path(directory, 0), description.identity, 0).close()
        disk.write_file(directory / MANIFEST, encode_with_checksum(upgraded))
    except OSError as error:
        raise storage_error(error, f"{directory} cannot be written") from error


def _sealed(
    disk: Disk,
    directory: Path,
    description: Description,
    info: SegmentInfo,
    number: int,
    schema: dict[str, AttributeType],
) -> SegmentInfo:
    """Make a segment of this number of a shard of the bulk load, whose attributes are added to the schema."""
    with (
        closing(Segment.load(directory, info, description, None)) as flat,
        building_segment(disk, directory, number) as building,
    ):
        schema |= {name: kind for name, kind in flat.columns.schema.items() if name not in schema}
        shutil.copytree(flat.index_folder, building / INDEX, copy_function=_link)
        known = {META: flat.files[f"{flat.index_folder.name}/meta.json"]}
        if description.shard_count == 1:
            for name in {DOCUMENTS, ATTRIBUTES, KEYWORDS} & flat.files.keys():
                _link(directory / name, building / name)
                known[name] = flat.files[name]
        elif flat.store is not None:
            write_documents(building, flat.store.all(), schema, flat.store.sources())
        return seal_segment(disk, building, info.size, info.shard, known)


def _link(source: str | Path, target: str | Path) -> None:
    """Link a file, or copy it where there are no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
