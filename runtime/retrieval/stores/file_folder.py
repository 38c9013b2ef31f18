"""Uploaded files on disk: one file each, named by its id, readable by this user alone.

An upload is written to `<id>.part`, synced, and renamed. Its descriptor is locked until its record is stored, so that
`sweep` removes what a killed process left, and nothing of an upload that another process has in progress.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from runtime.files import open_regular
from runtime.retrieval.collections.disk import Disk, storage_error

_PART = ".part"
_DISK = Disk()
T = TypeVar("T")


class Upload:
    """A file that is being received; a context manager, which removes it unless `keep` was called."""

    def __init__(self, folder: Path, id: str) -> None:
        self.id = id
        self._part, self._path, self._kept = folder / f"{id}{_PART}", folder / id, False
        self.bytes = 0
        self._fd = _guarded(lambda: open_regular(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), self._part)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, part: bytes) -> None:
        """Append. Raises `NoRoom`, `CollectionError`."""
        _guarded(lambda: _DISK.write(self._fd, part), self._part)
        self.bytes += len(part)

    def finish(self) -> None:
        """Make it durable, under its own name. Raises as `write`."""
        _guarded(lambda: _DISK.sync(self._fd), self._part)
        _guarded(lambda: self._part.rename(self._path), self._part)
        _guarded(lambda: _DISK.sync_directory(self._path.parent), self._path)

    def keep(self) -> None:
        """Its record is stored."""
        self._kept = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            self._part.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
        os.close(self._fd)


class FileFolder:
    """The folder; methods block on the disk. Ids are the node's own (`records.new_id`)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _guarded(lambda: path.mkdir(mode=0o700, parents=True, exist_ok=True), path)

    def upload(self, id: str) -> Upload:
        """Begin a file. Raises `NoRoom`, `CollectionError`."""
        return Upload(self._path, id)

    def path(self, id: str) -> Path:
        return self._path / id

    def remove(self, id: str) -> None:
        """Remove a file, if it exists."""
        self.path(id).unlink(missing_ok=True)

    def sweep(self, is_known: Callable[[str], bool]) -> None:
        """Remove the files without a record, except those that a process is uploading."""
        for path in self._path.iterdir():
            if path.name.endswith(_PART) or not is_known(path.name):
                _remove_unless_locked(path)


def _remove_unless_locked(path: Path) -> None:
    try:
        fd = open_regular(path)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)


def _guarded(work: Callable[[], T], path: Path) -> T:
    try:
        return work()
    except OSError as error:
        raise storage_error(error, f"{path} cannot be written") from error
