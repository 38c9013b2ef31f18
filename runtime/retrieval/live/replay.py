"""A collection's state from its files: what the manifest names, and the log behind it."""

from pathlib import Path
from typing import NamedTuple

from runtime.errors import CollectionError
from runtime.retrieval.live.state import State
from runtime.retrieval.live.storage.log import log_files, read_log
from runtime.retrieval.live.storage.manifest import Manifest, read_description, read_manifest
from runtime.retrieval.live.storage.operations import decode


class Replayed(NamedTuple):
    """first, end: the last file of the log, and where its last whole record ends. torn_bytes: what is behind that."""

    state: State
    manifest: Manifest
    first: int
    end: int
    torn_bytes: int


def replay(directory: Path, until: int | None = None) -> Replayed:
    """Read a collection, up to the record `until`, with which a file of the log begins. Changes nothing.

    Raises `CollectionError`.
    """
    description, manifest = read_description(directory), read_manifest(directory)
    state = State(directory, description, manifest)
    try:
        files = [found for found in log_files(directory) if found[0] >= manifest.sequence]
        files = [found for found in files if until is None or found[0] < until]
        if until != manifest.sequence and (not files or files[0][0] != manifest.sequence):
            raise CollectionError(f"{directory / 'log'} does not have the log from record {manifest.sequence} on")
        first, end, torn_bytes = manifest.sequence, 0, 0
        for first, path in files:
            if first != state.sequence:
                raise CollectionError(f"{path} begins behind record {state.sequence}: a file of the log is missing")
            last = first == files[-1][0]
            records, end, torn_bytes = read_log(path, description.identity, first, last=last and until is None)
            for record in records:
                state.apply(decode(record.payload, description.dim))
        if until is not None and state.sequence != until:
            raise CollectionError(f"{directory / 'log'} ends at record {state.sequence}, before {until}")
    except BaseException:
        state.close()
        raise
    return Replayed(state, manifest, first, end, torn_bytes)
