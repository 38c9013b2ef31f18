"""Merged reading of a node's log files by time, from the oldest file on, optionally following them."""

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from os import fstat
from pathlib import Path
from typing import BinaryIO

from runtime.files import open_regular
from runtime.node.logs.log import LogLine, parse, rotated


class Tail:
    """Reader of one process's log through its rotated files and later rotations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def read(self) -> Iterator[LogLine]:
        """Yield the lines written since the last call. Malformed lines are skipped."""
        if self._file is None:
            self._file = self._open(self._oldest())
        while self._file is not None:
            while (raw := self._file.readline()).endswith(b"\n"):
                if (line := parse(raw)) is not None:
                    yield line
            self._file.seek(-len(raw), 1)  # a partial line
            newer = self._newer(self._file)
            if newer is None:
                return
            self._file.close()
            self._file = newer

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _oldest(self) -> int:
        """Return the rotation number of the oldest file."""
        return next(number for number in count() if not rotated(self._path, number + 1).exists())

    def _open(self, number: int) -> BinaryIO | None:
        try:
            return open(open_regular(rotated(self._path, number)), "rb")
        except FileNotFoundError:
            return None

    def _newer(self, file: BinaryIO) -> BinaryIO | None:
        """Return the file that followed this one; None if it is the current one, or was removed with its node."""
        inode = fstat(file.fileno()).st_ino
        for number in count():
            try:
                found = rotated(self._path, number).stat().st_ino
            except FileNotFoundError:
                return self._open(number - 1) if number else None  # deleted by rotation: continue with the oldest
            if found == inode:
                return self._open(number - 1) if number else None
        raise AssertionError("count() has no end")


def read_logs(directory: Path, follow: Callable[[], bool] | None = None) -> Iterator[LogLine]:
    """Yield all lines of a node's log directory. With `follow`, keep reading until `follow` returns False.

    `follow` is called when there is nothing more to read, and does the waiting.
    """
    tails: dict[Path, Tail] = {}
    going = True
    try:
        while True:
            for path in directory.glob("*.log"):
                if path.is_file():  # a device may be endless
                    tails.setdefault(path, Tail(path))
            yield from heapq.merge(*(tail.read() for tail in tails.values()), key=lambda line: line.time)
            if not going or follow is None:
                return
            going = follow()
    finally:
        for tail in tails.values():
            tail.close()
