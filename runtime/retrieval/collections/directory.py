"""A collection's directory appears whole or not at all, and nothing that Trinity did not write is ever deleted."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import CollectionError, NoRoom, OutputRefused
from runtime.retrieval.collections.manifest import ATTRIBUTES, DOCUMENTS, INDEX, MANIFEST, WORDS, is_collection

_INDEX_NAME = re.compile(rf"{INDEX}(-\d+)?")
_HALF_INDEX_NAME = re.compile(rf"{INDEX}(-\d+)?|\.{INDEX}(-\d+)?\.[0-9a-f]{{32}}")  # see `gpu.index.storage.save`
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# SQLite says "full" of a full disk alone: a quota and a limit of file sizes are failed writes to it.
_OWN = (MANIFEST, DOCUMENTS, ATTRIBUTES, WORDS)
_SQLITE_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
_NUMPY_NO_ROOM = re.compile(r"\d+ requested and \d+ written")  # has no errno


@contextlib.contextmanager
def atomic_directory(out: Path, *, replace: bool) -> Iterator[Path]:
    """Fill the directory that this yields; it becomes `out` if the block ends well, and is removed if it does not.

    replace: a collection that is at `out` is deleted once the new one is complete. Whatever else is there is refused,
    with `CollectionError`, before the block runs. `NoRoom`: the disk, a quota or memory is not enough.

    What killed builds of `out` left behind is removed first; one that lives has its directory locked.
    """
    out = out.absolute()
    _refuse(out, replace)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead_builds(out)
    except OSError as error:
        raise _cannot_make(error) from error
    building, lock = _sibling(out, "building"), None
    try:  # from before it is made: an interrupt may come at any line
        try:
            lock = _made_and_locked(building)
        except OSError as error:
            raise _cannot_make(error) from error
        yield building
        _refuse(out, replace)  # much may have happened since
        _swap(building, out)
    except (OSError, sqlite3.Error) as error:  # a full disk, mostly
        free = shutil.disk_usage(out.parent).free
        raise _error_of(error)(f"{out} cannot be built: {error} ({free >> 20:,} MiB are free there)") from error
    except MemoryError as error:
        raise NoRoom(f"{out} cannot be built: not enough memory") from error
    finally:
        if building.exists():
            shutil.rmtree(building)
        if lock is not None:
            os.close(lock)


def _cannot_make(error: OSError) -> CollectionError:
    return _error_of(error)(f"{error.filename} cannot be made: {error.strerror}")


def _error_of(error: OSError | sqlite3.Error) -> type[CollectionError]:
    if isinstance(error, sqlite3.Error):
        full = getattr(error, "sqlite_errorcode", None) in _SQLITE_NO_ROOM
    else:
        full = error.errno in NO_ROOM or _NUMPY_NO_ROOM.fullmatch(str(error)) is not None
    return NoRoom if full else CollectionError


def _made_and_locked(building: Path) -> int:
    """The descriptor of a new directory that holds its lock, which goes with this process."""
    while True:
        building.mkdir(exist_ok=True)
        try:
            fd = _opened(building)
        except FileNotFoundError:  # another build took it for a dead one's before it was locked
            continue
        if _lock(fd) is not False and _is_at(building, fd):
            return fd
        os.close(fd)


def _remove_dead_builds(out: Path) -> None:
    """Remove what a build writes and nobody has locked; what cannot be removed is left."""
    name = re.compile(rf"\.{re.escape(out.name)}\.building-[0-9a-f]{{8}}")
    found: list[Path] = []
    with contextlib.suppress(OSError):
        found += [path for path in out.parent.iterdir() if name.fullmatch(path.name)]
    for path in found:
        with contextlib.suppress(OSError):
            fd = _opened(path)
            try:
                if _lock(fd) and _is_at(path, fd) and not _strange(path, _HALF_INDEX_NAME) and not _has_links(path):
                    shutil.rmtree(path)
            finally:
                os.close(fd)


def _opened(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(fd: int) -> bool | None:
    """Whether the lock could be had; None where the file system has no locks for directories."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _has_links(directory: Path) -> bool:
    return any(path.is_symlink() for path in directory.rglob("*"))


def _refuse(out: Path, replace: bool) -> None:
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise OutputRefused(f"{out} exists and is not a directory: use another --out")
    if not replace:
        raise OutputRefused(f"{out} exists already: use another --out, or --force replaces a collection")
    if not is_collection(out):
        raise OutputRefused(f"{out} is not a collection and will not be replaced: use another --out")
    if strange := _strange(out, _INDEX_NAME):
        raise OutputRefused(f"{out} will not be replaced: {strange[0]} is no part of a collection; use another --out")


def _strange(directory: Path, index_name: re.Pattern[str]) -> list[Path]:
    """What is no part of a collection."""
    indexes = [path for path in directory.iterdir() if index_name.fullmatch(path.name) and path.is_dir()]
    strange = [path for path in directory.iterdir() if path not in indexes and path.name not in _OWN]
    for index in indexes:
        strange += [path for path in index.iterdir() if path.name != "meta.json" and path.suffix != ".npy"]
    return strange


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
