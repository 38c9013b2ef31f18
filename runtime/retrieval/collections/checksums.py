"""Reading a collection's files to the end and comparing their checksums: those that are open, whatever their names mean
by now."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from runtime.errors import CollectionError
from runtime.retrieval.collections.manifest import FileChecksum, Manifest, checksum_file, read_manifest

Throttle = Callable[[int], None]
"""Told how many bytes were read just now, and in no hurry to return."""

_CHUNK_BYTES = 1 << 18  # 0.15 ms: a pool's loop on the same core waits that long


def unthrottled(read_bytes: int) -> None:
    """The pace of who waits for the result."""


class Checksums:
    """Open files of a collection and what their content must be. `total_bytes` of them, `read_bytes` so far.

    Files that are replaced, moved or removed meanwhile are read all the same.
    """

    def __init__(self, files: Mapping[Path, FileChecksum]) -> None:
        """Raises `CollectionError` for a file that cannot be opened."""
        self._facts = dict(files)
        self._open: dict[Path, int] = {}
        self.total_bytes = sum(checksum.bytes for checksum in files.values())
        self.read_bytes = 0
        try:
            for path in files:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            raise CollectionError(f"{path} cannot be read: {error.strerror}") from error

    @property
    def pending(self) -> bool:
        """Whether there is something to compare."""
        return bool(self._open)

    def verify(self, pace: Throttle = unthrottled) -> None:
        """Read every file and close it. Raises `CollectionError` that names the first that is not as it was built."""
        try:
            for path, fd in self._open.items():
                checksum = self._facts[path]
                if _digest(path, fd, checksum.bytes, self._count(pace)) != checksum.sha256:
                    raise CollectionError(f"{path} is damaged: its checksum is not the one it was built with")
        finally:
            self.close()

    def _count(self, pace: Throttle) -> Throttle:
        def counted(read_bytes: int) -> None:
            self.read_bytes += read_bytes
            pace(read_bytes)

        return counted

    def close(self) -> None:
        """Close the files, read or not. Idempotent."""
        while self._open:
            os.close(self._open.popitem()[1])


def _digest(path: Path, fd: int, size: int, pace: Throttle) -> str:
    digest, offset = hashlib.sha256(), 0
    try:
        while chunk := os.pread(fd, _CHUNK_BYTES, offset):
            digest.update(chunk)
            offset += len(chunk)
            if offset > size:
                break
            pace(len(chunk))
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest() if offset == size else f"{offset} bytes"


# ---- opening several files of a collection as those of one build, though another may take its place at any moment


_ATTEMPTS = 3
_T = TypeVar("_T")


def open_consistent(directory: Path, opened: Callable[[Manifest], _T], close: Callable[[_T], None]) -> _T:
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
    for name, checksum in manifest.files.items():
        if name.endswith(".json") and checksum_file(directory / name) != checksum and _place(directory) == place:
            return directory / name
    return None


def _place(directory: Path) -> tuple[int, int]:
    """Which directory has this name now."""
    try:
        found = os.stat(directory)
    except OSError:  # whoever reads in it will say so
        return 0, 0
    return found.st_dev, found.st_ino
