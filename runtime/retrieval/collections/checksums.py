"""Checksum verification of a collection's files, and opening several files as those of one build.

Verification reads open file descriptors, so it is independent of files that later replace them.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from runtime.errors import CollectionError
from runtime.files import open_regular
from runtime.retrieval.collections.manifest import FileChecksum, Manifest, has_checksum, read_manifest

Throttle = Callable[[int], None]
"""Called with the number of bytes that were just read; may sleep to limit the read rate."""

_CHUNK_BYTES = 1 << 18  # takes 0.15 ms: the longest delay of a pool loop on the same core


def unthrottled(read_bytes: int) -> None:
    """A `Throttle` that never sleeps: for callers that wait for the result."""


class Checksums:
    """Open files of a collection and their expected checksums: `total_bytes` in all, `read_bytes` verified so far.

    Files that are replaced, moved or removed in the meantime are still read.
    """

    def __init__(self, files: Mapping[Path, FileChecksum]) -> None:
        """Open the files. Raises `CollectionError` for a file that cannot be opened."""
        self._expected = dict(files)
        self._open: dict[Path, int] = {}
        self.total_bytes = sum(checksum.bytes for checksum in files.values())
        self.read_bytes = 0
        try:
            for path in files:
                self._open[path] = open_regular(path)
        except OSError as error:
            self.close()
            raise CollectionError(f"{path} cannot be read: {error.strerror}") from error

    @property
    def pending(self) -> bool:
        """Whether files remain to be verified."""
        return bool(self._open)

    def verify(self, throttle: Throttle = unthrottled) -> None:
        """Read every file and close it. Raises `CollectionError` that names the first damaged file."""
        try:
            for path, fd in self._open.items():
                checksum = self._expected[path]
                if _digest(path, fd, checksum.bytes, self._counted(throttle)) != checksum.sha256:
                    raise CollectionError(f"{path} is damaged: its checksum is not the one it was built with")
        finally:
            self.close()

    def _counted(self, throttle: Throttle) -> Throttle:
        def counted(read_bytes: int) -> None:
            self.read_bytes += read_bytes
            throttle(read_bytes)

        return counted

    def close(self) -> None:
        """Close the files, verified or not. Idempotent."""
        while self._open:
            os.close(self._open.popitem()[1])


def _digest(path: Path, fd: int, size: int, throttle: Throttle) -> str:
    digest, offset = hashlib.sha256(), 0
    try:
        while chunk := os.pread(fd, _CHUNK_BYTES, offset):
            digest.update(chunk)
            offset += len(chunk)
            if offset > size:
                break
            throttle(len(chunk))
    except OSError as error:
        raise CollectionError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest() if offset == size else f"{offset} bytes"


# ---- opening files of one build, although another build may replace it at any moment


_ATTEMPTS = 3
_T = TypeVar("_T")


def open_consistent(directory: Path, open_files: Callable[[Manifest], _T], close: Callable[[_T], None]) -> _T:
    """Return `open_files(manifest)`, whose files all belong to the build that the manifest describes.

    If another build replaces the collection in the meantime, the result is passed to `close`, and opening is retried.

    Raises the errors of `open_files`, and `CollectionError` for a directory without a collection, for an index
    description that differs from its sealed checksum, or if the collection is replaced during every attempt.
    """
    for _ in range(_ATTEMPTS):
        before, manifest = _directory_id(directory), read_manifest(directory)
        try:
            found = open_files(manifest)
        except CollectionError:
            if _directory_id(directory) == before:
                raise
            continue
        try:
            damaged = _damaged_description(directory, manifest, before)
            unchanged = _directory_id(directory) == before and read_manifest(directory).identity == manifest.identity
        except CollectionError:
            close(found)
            raise
        if damaged is None and unchanged:
            return found
        close(found)
        if damaged is not None:
            raise CollectionError(f"{damaged} is damaged: its checksum is not the one it was built with")
    raise CollectionError(f"{directory} was replaced by another collection while it was opened, {_ATTEMPTS} times")


def _damaged_description(directory: Path, manifest: Manifest, directory_id: tuple[int, int]) -> Path | None:
    """Return a description that differs from its sealed checksum although the directory was not replaced."""
    for name, checksum in manifest.files.items():
        damaged = name.endswith(".json") and not has_checksum(directory / name, checksum)
        if damaged and _directory_id(directory) == directory_id:
            return directory / name
    return None


def _directory_id(directory: Path) -> tuple[int, int]:
    """Return the device and inode that the path leads to now."""
    try:
        found = os.stat(directory)
    except OSError:  # the next read in it raises the error
        return 0, 0
    return found.st_dev, found.st_ino
