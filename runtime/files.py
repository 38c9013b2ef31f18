"""Opening files that somebody may have replaced: by a pipe that blocks, a device without end, or a file without a
reasonable size.

Files are checked after they were opened, so that no other file can take their place in between. Links are followed.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path

MAX_SETTINGS_BYTES = 4 << 20  # of a file that people write, or that describes others
_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o600, *, max_bytes: int | None = None) -> int:
    """Return a descriptor of a regular file of at most `max_bytes`; `flags` and `mode` as of `os.open`.

    Raises `OSError`, whose `strerror` says what the file is instead, or its size and the limit.
    """
    # O_NONBLOCK: opening a pipe without a peer would block; it has no effect on a regular file.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode)
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "of another kind")
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        if max_bytes is not None and status.st_size > max_bytes:
            raise _too_large(path, f"{status.st_size:,}", max_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path | str, max_bytes: int = MAX_SETTINGS_BYTES) -> bytes:
    """Return the content of a regular file of at most `max_bytes`. Raises `OSError` as `open_regular`."""
    with open(open_regular(path, max_bytes=max_bytes), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:  # it grew, or is one of /proc, whose sizes are 0
        raise _too_large(path, f"more than {max_bytes:,}", max_bytes)
    return content


def check_regular(path: Path | str, max_bytes: int | None = None) -> Path:
    """Return the path of a regular file of at most `max_bytes`, for a library that opens files itself.

    Raises `OSError` as `open_regular`.
    """
    os.close(open_regular(path, max_bytes=max_bytes))
    return Path(path)


def set_modes(directory: Path, mode: int = 0o700) -> None:
    """Give a directory and all that it contains the permissions of `mode`; files are not executable."""
    with contextlib.suppress(OSError):  # a file system without permissions
        for path in directory.rglob("*"):
            if not path.is_symlink():
                path.chmod(mode if path.is_dir() else mode & 0o666)
        directory.chmod(mode)


def _too_large(path: Path | str, size: str, limit: int) -> OSError:
    return OSError(errno.EINVAL, f"it has {size} bytes, the limit is {limit:,}", str(path))
