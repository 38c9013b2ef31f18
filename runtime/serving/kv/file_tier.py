"""KV tier in files: one block per file, in a private directory of bounded size that processes share.

A file is written under a temporary name and renamed, and has a checksum. A damaged file is removed and its block is
recomputed. File errors are never raised: a tier that cannot be read or written behaves like an empty one.

A block can be *held* for a sequence that returns to it: its file is read-only and evicted last. A hold ends when it is
released or after a time limit, so nothing is left of a dead worker.
"""

import errno
import logging
import os
import stat
import struct
import time
import zlib
from contextlib import suppress
from pathlib import Path

from runtime.errors import ConfigError
from runtime.node.metrics.worker_metrics import Tier as TierName

_HEADER = struct.Struct("<8s16sQI4x")  # magic, the block's hash, payload bytes, their CRC-32
_MAGIC = b"TRKVBLK1"
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # never block on a FIFO placed in the directory
_SHARE = 4  # all writers together add at most 1/4 of the limit between two scans of the directory
_HELD_SHARE = 2  # held blocks are at most 1/2 of what a scan keeps
HOLD_S = 600.0

log = logging.getLogger("kv")


def has_block(directory: Path, key: bytes) -> bool:
    """Return whether a tier's directory has a file of that block."""
    return (directory / key.hex()).exists()


class FileTier:
    """A private directory with blocks of `block_bytes` bytes and at most `limit_bytes`, including concurrent writes of
    `writers` processes.

    The least recently used blocks are evicted first. Processes share it without communication: names are content
    hashes, and each process scans the directory before it adds more than its share of the limit, and trims it then.
    `counts`: this process's operations, by metric.
    """

    def __init__(
        self,
        name: TierName,
        directory: Path,
        limit_bytes: int,
        block_bytes: int,
        writers: int,
        hold_s: float = HOLD_S,
    ) -> None:
        """`hold_s`: how long a block is held at most. Raises `ConfigError` for a directory that cannot be used or that
        other users can access."""
        self.name, self.counts = name, dict.fromkeys(("loaded", "stored", "evicted", "damaged", "failed"), 0)
        self.used_bytes = self.held_bytes = 0  # as of the last scan, plus those of this process since
        self._hold_ns = round(hold_s * 1e9)
        self._file_bytes = _HEADER.size + block_bytes
        self._share = max(limit_bytes // _SHARE // writers, self._file_bytes)
        self._keep = limit_bytes - writers * self._share  # bytes that a scan leaves
        self._added = self._share  # since the last scan; unknown: scan before the first write
        if self._too_small:
            log.warning(
                "the %s KV tier is disabled: %d bytes are too few for blocks of %d", name, limit_bytes, block_bytes
            )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"the {name} KV tier cannot use {directory}: {error.strerror}") from error
        status = os.fstat(self._fd)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(self._fd)
            raise ConfigError(
                f"{directory}, for the {name} KV tier, has mode {stat.S_IMODE(status.st_mode):o} and belongs to uid "
                f"{status.st_uid}: it must belong to uid {os.getuid()} and have mode 700"
            )

    @property
    def _too_small(self) -> bool:
        return self._keep < self._file_bytes

    def _has_room(self, more_bytes: int) -> bool:
        """Return whether this process may add so many bytes without a scan."""
        return self._added + more_bytes <= self._share

    def has(self, key: bytes) -> bool:
        """Return whether the block has a file."""
        try:
            os.stat(key.hex(), dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def load(self, key: bytes, into: memoryview) -> bool:
        """Read a block of `block_bytes` bytes and mark it as used. Return False if it is missing or damaged."""
        try:
            fd = os.open(key.hex(), os.O_RDONLY | _FLAGS, dir_fd=self._fd)
        except OSError:
            return False
        try:
            status, header = os.fstat(fd), bytearray(_HEADER.size)
            valid = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and status.st_size == self._file_bytes
            complete = valid and os.preadv(fd, [header, into], 0) == self._file_bytes
            if complete and header == _header(key, into):
                os.utime(fd)
                self.counts["loaded"] += 1
                return True
        except OSError:
            pass
        finally:
            os.close(fd)
        self.counts["damaged"] += 1
        self._remove(key.hex())
        return False

    def store(self, key: bytes, block: memoryview, *, hold: bool = False) -> bool:
        """Write a block, unless it exists. Return whether it exists. On a full disk the tier shrinks by 1/8."""
        if self._too_small:
            return False
        if self.has(key):
            return not hold or self.hold(key)
        if not self._has_room(self._file_bytes):
            self._trim(self._keep)
        temporary = f".{key.hex()}.{os.getpid()}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS, 0o600, dir_fd=self._fd)
            try:
                if os.writev(fd, [_header(key, block), block]) != self._file_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(fd)
            os.rename(temporary, key.hex(), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as error:
            self._remove(temporary)
            if not self.counts["failed"]:
                log.warning("the %s KV tier cannot be written: %s", self.name, error.strerror)
            self.counts["failed"] += 1
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._trim(self.used_bytes * 7 // 8)
            return False
        self.counts["stored"] += 1
        self._added += self._file_bytes
        self.used_bytes += self._file_bytes
        return not hold or self.hold(key)

    def may_hold(self, blocks: int) -> bool:
        """Return whether so many more blocks can be held: those of all workers are at most half of the tier."""
        more_bytes = blocks * self._file_bytes
        if not self._has_room(more_bytes):
            self._trim(self._keep)
        return not self._too_small and self.held_bytes + more_bytes <= self._keep // _HELD_SHARE

    def hold(self, key: bytes) -> bool:
        """Evict a block last, until it is released or the hold's time is over. Return False if it has no file."""
        was_held = self._touch(key, 0o400)
        if was_held is False:
            self.held_bytes += self._file_bytes
            self._added += self._file_bytes  # other writers count it with their next scan
        return was_held is not None

    def release(self, key: bytes) -> None:
        """Let a held block be evicted like others. If several rows share it, the first that returns releases it."""
        if self._touch(key, 0o600):
            self.held_bytes = max(self.held_bytes - self._file_bytes, 0)

    def _touch(self, key: bytes, mode: int) -> bool | None:
        """Mark a block as used and set its file's mode. Return whether it was held; None if it has no file."""
        try:
            fd = os.open(key.hex(), os.O_RDONLY | _FLAGS, dir_fd=self._fd)
        except OSError:
            return None
        try:
            was_held = self._is_held(os.fstat(fd))
            os.fchmod(fd, mode)
            os.utime(fd)
        except OSError:
            return None
        finally:
            os.close(fd)
        return was_held

    def _is_held(self, status: os.stat_result) -> bool:
        return not status.st_mode & stat.S_IWUSR and time.time_ns() - status.st_mtime_ns < self._hold_ns

    def drop(self, key: bytes) -> None:
        """Remove a held block."""
        if self._remove(key.hex()):
            self.used_bytes = max(self.used_bytes - self._file_bytes, 0)
            self.held_bytes = max(self.held_bytes - self._file_bytes, 0)

    def _trim(self, keep: int) -> None:
        """Remove the least recently used files, including temporary ones of dead writers, down to `keep` bytes. Held
        ones are the last."""
        files: list[tuple[bool, int, int, str]] = []
        with suppress(OSError), os.scandir(self._fd) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    files.append((self._is_held(status), status.st_mtime_ns, status.st_size, entry.name))
        used = sum(size for *_, size, _ in files)
        for *_, size, name in sorted(files):
            if used <= keep:
                break
            if self._remove(name):
                self.counts["evicted"] += 1
            used -= size
        self.used_bytes, self.held_bytes = used, min(used, sum(size for held, _, size, _ in files if held))
        self._added = 0

    def _remove(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self._fd)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the directory; the files stay. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _header(key: bytes, block: memoryview) -> bytes:
    return _HEADER.pack(_MAGIC, key, block.nbytes, zlib.crc32(block))
