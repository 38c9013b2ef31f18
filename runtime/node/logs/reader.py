"""Merged reading of a node's log files by time, from the oldest line on."""

import heapq
from collections.abc import Iterator
from pathlib import Path

from runtime.files import open_regular
from runtime.node.logs.log import LogLine, parse, previous


def read_logs(directory: Path) -> Iterator[LogLine]:
    """Yield all lines of a node's log directory. Malformed lines, and the one that is being written, are skipped."""
    paths = [path for path in directory.glob("*.log") if path.is_file()]  # a device may be endless
    yield from heapq.merge(*map(_lines, paths), key=lambda line: line.time)


def _lines(path: Path) -> Iterator[LogLine]:
    """Yield the lines of one process."""
    for part in (previous(path), path):
        try:
            fd = open_regular(part)
        except FileNotFoundError:
            continue
        with open(fd, "rb") as file:
            for raw in file:
                if raw.endswith(b"\n") and (line := parse(raw)) is not None:
                    yield line
