"""Atomic creation of a collection's directory. Files that Trinity did not write are never deleted."""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import CollectionError, NoRoom, OutputRefused
from runtime.files import set_modes
from runtime.retrieval.collections.description import is_collection
from runtime.retrieval.collections.disk import NO_ROOM, writing

_OWN_FILES = re.compile(
    r"\.?(collection\.json|MANIFEST)(\.part)?|writer\.lock|log/\d+\.log|(tombstones|served|segments/\.merging)/[^/]+"
    r"|(segments/(\.building-)?\d+/)?"
    r"(segment\.json|(documents|keywords|words)\.sqlite|attributes\.msgpack"
    r"|(index(-\d+)?|\.index(-\d+)?\.[0-9a-f]{32})/(meta\.json|[^/]+\.npy))"  # see `gpu.index.storage.save`
)
# SQLite reports SQLITE_FULL for a full disk only; an exceeded quota or file size limit is a failed write.
_SQLITE_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
_NUMPY_NO_ROOM = re.compile(r"\d+ requested and \d+ written")  # has no errno


@contextlib.contextmanager
def atomic_directory(out: Path, *, replace: bool, locked: bool = False) -> Iterator[Path]:
    """Yield a temporary directory to fill; rename it to `out` if the block succeeds, remove it if the block raises.

    replace: delete an existing collection at `out` once the new one is complete, unless another process writes to it
    then (`CollectionBusy`). locked: the caller holds the writer's lock. Anything else at `out` is refused
    with `CollectionError` before the block runs. Raises `NoRoom` if the disk, a quota or memory is exhausted.

    Leftovers of killed builds of `out` are removed first; a running build holds a lock on its directory.
    """
    out = out.absolute()
    _check_output(out, replace)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead_builds(out)
    except OSError as error:
        raise _creation_error(error) from error
    building, lock = _sibling(out, "building"), None
    try:  # entered before the directory exists: an interrupt may arrive at any line
        try:
            lock = _create_locked(building)
        except OSError as error:
            raise _creation_error(error) from error
        yield building
        _check_output(out, replace)  # again: `out` may have changed since
        with contextlib.nullcontext() if locked or not out.exists() else writing(out):
            _rename_into_place(building, out)
    except (OSError, sqlite3.Error) as error:  # mostly a full disk
        free = shutil.disk_usage(out.parent).free
        raise _error_class(error)(f"{out} cannot be built: {error} ({free >> 20:,} MiB are free there)") from error
    except MemoryError as error:
        raise NoRoom(f"{out} cannot be built: not enough memory") from error
    finally:
        if building.exists():
            shutil.rmtree(building)
        if lock is not None:
            os.close(lock)


def _creation_error(error: OSError) -> CollectionError:
    return _error_class(error)(f"{error.filename} cannot be made: {error.strerror}")


def _error_class(error: OSError | sqlite3.Error) -> type[CollectionError]:
    if isinstance(error, sqlite3.Error):
        full = getattr(error, "sqlite_errorcode", None) in _SQLITE_NO_ROOM
    else:
        full = error.errno in NO_ROOM or _NUMPY_NO_ROOM.fullmatch(str(error)) is not None
    return NoRoom if full else CollectionError


def _create_locked(building: Path) -> int:
    """Create a directory and lock it; return the descriptor. The lock ends with this process."""
    while True:
        building.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = _open_directory(building)
        except FileNotFoundError:  # another build removed it as a leftover before it was locked
            continue
        if _try_lock(fd) is not False and _is_at(building, fd):
            return fd
        os.close(fd)


def _remove_dead_builds(out: Path) -> None:
    """Remove unlocked directories of builds of `out`, as far as that is possible."""
    name = re.compile(rf"\.{re.escape(out.name)}\.building-[0-9a-f]{{8}}")
    found: list[Path] = []
    with contextlib.suppress(OSError):
        found += [path for path in out.parent.iterdir() if name.fullmatch(path.name)]
    for path in found:
        with contextlib.suppress(OSError):
            fd = _open_directory(path)
            try:
                if _try_lock(fd) and _is_at(path, fd) and _is_build(path):
                    shutil.rmtree(path)
            finally:
                os.close(fd)


def _open_directory(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _try_lock(fd: int) -> bool | None:
    """Try to lock; whether that succeeded. None if the file system does not lock directories."""
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


def _is_build(building: Path) -> bool:
    """Whether a directory of a build contains only what a build writes."""
    return not any(path.is_symlink() for path in building.rglob("*")) and not _foreign_files(building)


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


def _rename_into_place(building: Path, out: Path) -> None:
    """Rename into place, private or with the permissions of the directory that is replaced.

    A reader that opens `out` between the two renames fails; open files stay valid."""
    old = _sibling(out, "replaced") if out.exists() else None
    set_modes(building, stat.S_IMODE(out.stat().st_mode) if old else 0o700)
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
