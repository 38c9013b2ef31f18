"""Atomic creation of a collection's directory. Files that Trinity did not write are never deleted."""

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import CollectionError, OutputRefused
from runtime.files import set_modes
from runtime.retrieval.collections.description import is_collection
from runtime.retrieval.collections.disk import (
    LOCK,
    acquire_lock,
    lock_is_current,
    storage_error,
    storage_errors,
    writing,
)

_OWN_FILES = re.compile(
    r"(\.?(collection\.json|MANIFEST)|log/\.?\d+\.log)(\.part)?|writer\.lock|(tombstones|served|segments/\.merging)/[^/]+"
    r"|(segments/(\.building-)?\d+/)?"
    r"(segment\.json|(documents|keywords|words)\.sqlite(-journal)?|attributes\.msgpack"
    r"|(index(-\d+)?|\.index(-\d+)?\.[0-9a-f]{32})/(meta\.json|[^/]+\.npy))"  # see `gpu.index.storage.save`
)

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


@contextlib.contextmanager
def atomic_directory(out: Path, *, replace: bool, locked: bool = False) -> Iterator[Path]:
    """Yield a temporary directory to fill; rename it to `out` if the block succeeds, remove it if the block raises.

    replace: delete an existing collection at `out` once the new one is complete, unless another process writes to it
    before or then (`CollectionBusy`). locked: the caller holds the writer's lock. Anything else at `out` is refused
    with `CollectionError` before the block runs. Raises `NoRoom` if the disk, a quota or memory is exhausted.

    One build of `out` runs at a time, others are `CollectionBusy`. What a killed one left is removed by the next.
    """
    out = out.absolute()
    _check_output(out, replace)
    with _lock(out, locked):  # a writer that has it now is told before hours of embedding
        pass
    building = out.with_name(f".{out.name}.building")
    with storage_errors(f"{building} cannot be made"):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _claim(building)
    try:
        yield building
        _check_output(out, replace)  # again: `out` may have changed since
        with _lock(out, locked):
            _rename_into_place(building, out)
    except (OSError, sqlite3.Error, MemoryError) as error:  # mostly a full disk
        free = shutil.disk_usage(out.parent).free
        raise storage_error(error, f"with {free >> 20:,} MiB free, {out} cannot be built") from error
    finally:
        if lock_is_current(lock, building):
            _remove(building)
        os.close(lock)


def _claim(building: Path) -> int:
    """Create the directory of a build and lock it as a writer does, or remove what a killed build left there; return
    the lock.

    Raises `CollectionBusy` if another build holds it, `OutputRefused` if there is anything else, `CollectionError`,
    `OSError`.
    """
    while True:
        try:
            building.mkdir(mode=0o700)
        except FileExistsError:
            if building.is_symlink():
                raise
        lock_file = building / LOCK
        try:
            if lock_file.is_symlink() or not lock_file.exists():
                _refuse_foreign(building)  # before it gets a lock file
            lock = acquire_lock(building)
        except (CollectionError, FileNotFoundError):
            if building.exists():
                raise
            continue  # another build has just put it in place
        if lock_is_current(lock, building):
            break
        os.close(lock)  # as above
    try:
        _refuse_foreign(building)  # now that no other build changes it
    except BaseException:
        os.close(lock)
        raise
    _clear(building)
    return lock


def _clear(building: Path) -> None:
    for path in building.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove(building: Path) -> None:
    """Remove a directory whose lock is held, which goes last: until then no other build begins in it."""
    _clear(building)
    shutil.rmtree(building, ignore_errors=True)  # another build may have it now


def _refuse_foreign(building: Path) -> None:
    if foreign := [*_foreign_files(building), *(path for path in building.rglob("*") if path.is_symlink())]:
        raise OutputRefused(f"{building} will not be removed: {foreign[0]} is not part of a collection")


def _check_output(out: Path, replace: bool) -> None:
    """Raise `OutputRefused` if something at `out` may not be replaced."""
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise OutputRefused(f"{out} exists and is not a directory: use another --out")
    if not replace:
        raise OutputRefused(f"{out} already exists: use another --out, or --force to replace a collection")
    if not is_collection(out):
        raise OutputRefused(f"{out} is not a collection and will not be replaced: use another --out")
    if foreign := _foreign_files(out):
        raise OutputRefused(f"{out} will not be replaced: {foreign[0]} is not part of a collection; use another --out")


def _foreign_files(directory: Path) -> list[Path]:
    """Return the files that are not part of a collection."""
    files = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return [path for path in files if not _OWN_FILES.fullmatch(str(path.relative_to(directory)))]


def _lock(out: Path, locked: bool) -> contextlib.AbstractContextManager[None]:
    """Hold the writer's lock of the collection that is replaced, if there is one and it is not `locked` already."""
    return contextlib.nullcontext() if locked or not out.exists() else writing(out)


def _rename_into_place(building: Path, out: Path) -> None:
    """Rename into place, private or with the permissions of the directory that is replaced. Open files stay valid."""
    replaced = out.exists()
    set_modes(building, stat.S_IMODE(out.stat().st_mode) if replaced else 0o700)
    if replaced and _exchange(building, out):
        _remove(building)  # if this is killed, the next build does
        return
    old = out.with_name(f".{out.name}.replaced-{secrets.token_hex(4)}") if replaced else None
    try:
        if old is not None:
            out.rename(old)  # a reader that opens `out` now fails
        building.rename(out)
    except OSError as error:
        if old is not None and old.exists() and not out.exists():
            old.rename(out)
        raise CollectionError(f"{out} cannot be put in place: {error.strerror}") from error
    if old is not None:
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; return whether the file system can do that (NFS cannot)."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # not every libc has it
    names = os.fsencode(one), os.fsencode(other)
    return renameat2 is not None and renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0
