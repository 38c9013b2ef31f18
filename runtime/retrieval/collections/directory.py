"""A collection's directory appears whole or not at all, and nothing that Trinity did not write is ever deleted."""

import os
import re
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import CollectionError, OutputRefused
from runtime.retrieval.collections.manifest import DOCUMENTS, INDEX, MANIFEST, is_collection

_INDEX_NAME = re.compile(rf"{INDEX}(-\d+)?")


@contextmanager
def new_directory(out: Path, *, replace: bool) -> Iterator[Path]:
    """Fill the directory that this yields; it becomes `out` if the block ends well, and is removed if it does not.

    replace: a collection that is at `out` is deleted once the new one is complete. Whatever else is there is refused,
    with `CollectionError`, before the block runs.
    """
    out = out.absolute()
    _refuse(out, replace)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        building = _sibling(out, "building")
        building.mkdir()
    except OSError as error:
        raise CollectionError(f"{error.filename} cannot be made: {error.strerror}") from error
    try:
        yield building
        _refuse(out, replace)  # much may have happened since
        _swap(building, out)
    except (OSError, sqlite3.Error) as error:  # a full disk, mostly
        free = shutil.disk_usage(out.parent).free
        raise CollectionError(f"{out} cannot be built: {error} ({free >> 20:,} MiB are free there)") from error
    except MemoryError as error:
        raise CollectionError(f"{out} cannot be built: not enough memory") from error
    finally:
        if building.exists():
            shutil.rmtree(building)


def _refuse(out: Path, replace: bool) -> None:
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise OutputRefused(f"{out} exists and is not a directory: use another --out")
    if not replace:
        raise OutputRefused(f"{out} exists already: use another --out, or --force replaces a collection")
    if not is_collection(out):
        raise OutputRefused(f"{out} is not a collection and will not be replaced: use another --out")
    indexes = [path for path in out.iterdir() if _INDEX_NAME.fullmatch(path.name) and path.is_dir()]
    strange = [path for path in out.iterdir() if path not in indexes and path.name not in (MANIFEST, DOCUMENTS)]
    for index in indexes:
        strange += [path for path in index.iterdir() if path.name != "meta.json" and path.suffix != ".npy"]
    if strange:
        raise OutputRefused(f"{out} will not be replaced: {strange[0]} is no part of a collection; use another --out")


def _swap(building: Path, out: Path) -> None:
    """Rename into place. A reader that opens `out` between two renames misses it; one that has it open keeps it."""
    old = _sibling(out, "replaced") if out.exists() else None
    try:
        if old is not None:
            out.rename(old)
        building.rename(out)
    except OSError as error:
        if old is not None and old.exists() and not out.exists():
            old.rename(out)
        raise CollectionError(f"{out} cannot be put in place: {error.strerror}") from error
    if old is not None:
        shutil.rmtree(old)


def _sibling(out: Path, purpose: str) -> Path:
    return out.parent / f".{out.name}.{purpose}-{secrets.token_hex(4)}"
