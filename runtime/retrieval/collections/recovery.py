"""Recovery: the state of a collection from its manifest and the log behind it."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from runtime.errors import CollectionError
from runtime.retrieval.collections.description import read_description
from runtime.retrieval.collections.log import LogFollower, log_files
from runtime.retrieval.collections.manifest import Manifest, read_manifest
from runtime.retrieval.collections.operations import decode
from runtime.retrieval.collections.state import State


class Replayed(NamedTuple):
    """first, end: the last log file, and the end of its last complete record. torn_bytes: bytes behind that."""

    state: State
    manifest: Manifest
    first: int
    end: int
    torn_bytes: int


def replay(directory: Path, until: int | None = None, *, searched: bool = True) -> Replayed:
    """Read a collection, up to the record `until`, the first of a log file. Changes no file.

    Raises `CollectionError`.
    """
    description = read_description(directory)
    manifest = read_manifest(directory, description)
    state = State(directory, description, manifest, searched=searched)
    if not manifest.has_log:
        return Replayed(state, manifest, 0, 0, 0)
    try:
        newest = max((first for first, _ in log_files(directory)), default=0)
        with closing(LogFollower(directory, description.identity, manifest.sequence)) as log:
            for record in log.poll():
                if until is None or record.sequence < until:
                    state.apply(decode(record.payload, description.dim))
            first, end, torn_bytes = log.first, log.end, log.torn_bytes
        if until is not None and state.sequence != until:
            raise CollectionError(f"{directory / 'log'} ends at record {state.sequence}, before {until}")
        if first < newest:
            raise CollectionError(f"{directory / 'log'} is damaged: record {state.sequence} is missing")
    except BaseException:
        state.close()
        raise
    return Replayed(state, manifest, first, end, torn_bytes)
