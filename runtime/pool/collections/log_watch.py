"""Notifications of writes to the logs of collections, by inotify: readers learn of a write when it is made."""

import ctypes
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE, _IN_ONLYDIR = 0x2, 0x80, 0x100, 0x01000000  # sys/inotify.h
_EVENTS_BYTES = 1 << 16


class LogWatch:
    """Watches logs; `fileno` is readable when one was written to, until `poll`.

    Where inotify is not available, or the limit of its instances is reached, `fileno` is None and nothing is reported:
    readers poll the logs in any case.
    """

    def __init__(self) -> None:
        fd = int(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        self._fd: int | None = None if fd < 0 else fd
        self._without_log: set[Path] = set()

    def fileno(self) -> int | None:
        return self._fd

    def add(self, directory: Path) -> None:
        """Watch the collection in a directory: its log, or until it has one the manifest with which it begins."""
        if self._fd is not None:
            for path, events in ((directory, _IN_MOVED_TO), (directory / "log", _IN_MODIFY | _IN_CREATE)):
                if _libc.inotify_add_watch(self._fd, os.fsencode(path), ctypes.c_uint32(events | _IN_ONLYDIR)) < 0:
                    self._without_log.add(directory)

    def poll(self) -> bool:
        """Return whether a log was written to since the last call."""
        written = False
        while self._fd is not None:
            try:
                os.read(self._fd, _EVENTS_BYTES)
                written = True
            except BlockingIOError:
                break
        if written:
            directories, self._without_log = self._without_log, set()
            for directory in directories:
                self.add(directory)
        return written

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
