"""The log files of a node read together: in the order of time, from the oldest that is left, and on as they grow."""

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from os import fstat
from pathlib import Path
from typing import BinaryIO

from runtime.node.logs.log import Line, parse, rotated


class Tail:
    """The lines of one process, through its rotated files and over every rotation to come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def read(self) -> Iterator[Line]:
        """The lines that have come since the last time. What is no line is passed over."""
        if self._file is None:
            self._file = self._open(self._oldest())
        while self._file is not None:
            while (raw := self._file.readline()).endswith(b"\n"):
                if (line := parse(raw)) is not None:
                    yield line
            self._file.seek(-len(raw), 1)  # a line that is being written
            newer = self._newer(self._file)
            if newer is None:
                return
            self._file.close()
            self._file = newer

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _oldest(self) -> int:
        """The number of rotations of the oldest file."""
        return next(number for number in count() if not rotated(self._path, number + 1).exists())

    def _open(self, number: int) -> BinaryIO | None:
        try:
            return rotated(self._path, number).open("rb")
        except FileNotFoundError:
            return None

    def _newer(self, file: BinaryIO) -> BinaryIO | None:
        """The file that followed this one; None if it is the one that is written, or was removed with its node."""
        mine = fstat(file.fileno()).st_ino
        for number in count():
            try:
                found = rotated(self._path, number).stat().st_ino
            except FileNotFoundError:
                return self._open(number - 1) if number else None  # it was rotated away: go on with the oldest
            if found == mine:
                return self._open(number - 1) if number else None
        raise AssertionError("count() has no end")


def read(directory: Path, follow: Callable[[], bool] | None = None) -> Iterator[Line]:
    """All lines in a node's log directory. With `follow`, what comes is waited for, until it returns False.

    `follow` is called when there is nothing more to read, and is where the waiting is done.
    """
    tails: dict[Path, Tail] = {}
    going = True
    try:
        while True:
            for path in directory.glob("*.log"):
                if path.is_file():  # a device may have no end
                    tails.setdefault(path, Tail(path))
            yield from heapq.merge(*(tail.read() for tail in tails.values()), key=lambda line: line.time)
            if not going or follow is None:
                return
            going = follow()
    finally:
        for tail in tails.values():
            tail.close()
