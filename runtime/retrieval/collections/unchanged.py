"""Opening several files of a collection as those of one build, though another may take its place at any moment."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from runtime.errors import CollectionError
from runtime.retrieval.collections.manifest import Manifest, facts_of, read_manifest

_ATTEMPTS = 3
_T = TypeVar("_T")


def open_unchanged(directory: Path, opened: Callable[[Manifest], _T], close: Callable[[_T], None]) -> _T:
    """`opened(manifest)`, which opens files of the collection at `directory`: all of them are of that manifest's build.

    What is opened of a build that is replaced meanwhile is closed again by `close`.

    Raises what `opened` raises, and `CollectionError` for a directory without a collection, for an index description
    that is not the one that the collection was sealed with, or if there is another collection at every look.
    """
    for _ in range(_ATTEMPTS):
        before, manifest = _place(directory), read_manifest(directory)
        try:
            found = opened(manifest)
        except CollectionError:
            if _place(directory) == before:
                raise
            continue
        try:
            damaged = _damaged_description(directory, manifest, before)
            whole = _place(directory) == before and read_manifest(directory).identity == manifest.identity
        except CollectionError:
            close(found)
            raise
        if damaged is None and whole:
            return found
        close(found)
        if damaged is not None:
            raise CollectionError(f"{damaged} is damaged: its checksum is not the one it was built with")
    raise CollectionError(f"{directory} was replaced by another collection while it was opened, {_ATTEMPTS} times")


def _damaged_description(directory: Path, manifest: Manifest, place: tuple[int, int]) -> Path | None:
    """A description that is not the one that the collection was sealed with, though the directory is the same."""
    for name, facts in manifest.files.items():
        if name.endswith(".json") and facts_of(directory / name) != facts and _place(directory) == place:
            return directory / name
    return None


def _place(directory: Path) -> tuple[int, int]:
    """Which directory has this name now."""
    try:
        found = os.stat(directory)
    except OSError:  # whoever reads in it will say so
        return 0, 0
    return found.st_dev, found.st_ino
