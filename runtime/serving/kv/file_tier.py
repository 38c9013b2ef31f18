"""A KV tier as files: a block each, in a private directory of bounded size that processes share.

A file is written under another name and renamed, and has a checksum; one that is damaged is removed, and its block
computed. Nothing here raises for a file: a tier that cannot be read or written has no blocks.
"""

import errno
import logging
import os
import stat
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from runtime.errors import ConfigError
from runtime.node.metrics.worker_metrics import Tier as TierName

_HEADER = struct.Struct("<8s16sQI4x")  # what it is, the block's hash, bytes that follow, their CRC-32
_MAGIC = b"TRKVBLK1"
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # not to wait for a pipe that somebody put there
_SHARE = 4  # of the limit: what all writers add at most before they look how much there is

log = logging.getLogger("kv")


class Budget:
    """How much there may be in a tier of at most `limit_bytes`, whose `writers` do not talk to each other: each looks
    how much there is before it adds more than its share, and then leaves `keep` bytes. The simulator's tiers too."""

    def __init__(self, limit_bytes: int, file_bytes: int, writers: int) -> None:
        self._share = max(limit_bytes // _SHARE // writers, file_bytes)
        self.keep = limit_bytes - writers * self._share
        self.too_small = self.keep < file_bytes
        self._added = self._share  # unknown: look before the first is added

    def has_room(self, more_bytes: int) -> bool:
        """Whether it may add that without a look."""
        return self._added + more_bytes <= self._share

    def add(self, more_bytes: int) -> None:
        self._added += more_bytes

    def reset(self) -> None:
        """Nothing is added since the last look."""
        self._added = 0


class Tier(Protocol):
    """Where blocks are kept beside the workers' own memory. `counts`: what this process did, by metric."""

    @property
    def name(self) -> TierName: ...

    @property
    def counts(self) -> dict[str, int]: ...

    @property
    def used_bytes(self) -> int: ...

    def has(self, key: bytes) -> bool:
        """Whether it has that block."""
        ...

    def load(self, key: bytes, into: memoryview) -> bool:
        """Read a block, which counts as its use; False if there is none that is whole."""
        ...

    def store(self, key: bytes, block: memoryview) -> None:
        """Keep a block, unless it is there."""
        ...

    def close(self) -> None:
        """What it has stays."""
        ...


class FileTier:
    """A private directory of blocks of `block_bytes`, at most `limit_bytes` with all that its `writers` add at once.

    The longest unused blocks go first. Processes share it without a word to each other: names are content, and each
    looks what is there before it has added its share of the limit. `counts`: what this process did, by metric.
    """

    def __init__(self, name: TierName, directory: Path, limit_bytes: int, block_bytes: int, writers: int) -> None:
        """Raises `ConfigError` for a directory that cannot be used, or is not this user's alone."""
        self.name, self.counts = name, dict.fromkeys(("loaded", "stored", "evicted", "damaged", "failed"), 0)
        self.used_bytes = 0  # as of the last look, and what was added since
        self._file_bytes = _HEADER.size + block_bytes
        self._budget = Budget(limit_bytes, self._file_bytes, writers)
        if self._budget.too_small:
            log.warning(
                "the %s tier of KV is off: %d bytes are too few for blocks of %d", name, limit_bytes, block_bytes
            )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"the {name} tier of KV cannot use {directory}: {error.strerror}") from error
        found = os.fstat(self._fd)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(self._fd)
            raise ConfigError(
                f"{directory}, for the {name} tier of KV, has mode {stat.S_IMODE(found.st_mode):o} and belongs to uid "
                f"{found.st_uid}: it must be yours (uid {os.getuid()}) alone, mode 700"
            )

    def has(self, key: bytes) -> bool:
        """Whether there is a file of that block."""
        try:
            os.stat(key.hex(), dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def load(self, key: bytes, into: memoryview) -> bool:
        """Read a block of `block_bytes` bytes, which counts as its use; False if there is none that is whole."""
        try:
            fd = os.open(key.hex(), os.O_RDONLY | _FLAGS, dir_fd=self._fd)
        except OSError:
            return False
        try:
            found, header = os.fstat(fd), bytearray(_HEADER.size)
            mine = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_size == self._file_bytes
            whole = mine and os.preadv(fd, [header, into], 0) == self._file_bytes
            if whole and header == _header(key, into):
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

    def store(self, key: bytes, block: memoryview) -> None:
        """Write a block, unless it is there. What cannot be written is left out; a full disk makes room for others."""
        if self._budget.too_small or self.has(key):
            return
        if not self._budget.has_room(self._file_bytes):
            self._trim(self._budget.keep)
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
                log.warning("the %s tier of KV cannot be written to: %s", self.name, error.strerror)
            self.counts["failed"] += 1
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._trim(self.used_bytes * 7 // 8)
            return
        self.counts["stored"] += 1
        self._budget.add(self._file_bytes)
        self.used_bytes += self._file_bytes

    def _trim(self, keep: int) -> None:
        """Remove the longest unused files, unfinished ones of dead writers too, until at most `keep` bytes are left."""
        found: list[tuple[int, int, str]] = []
        with suppress(OSError), os.scandir(self._fd) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, entry.name))
        used = sum(size for _, size, _ in found)
        for _, size, name in sorted(found):
            if used <= keep:
                break
            if self._remove(name):
                self.counts["evicted"] += 1
            used -= size
        self.used_bytes = used
        self._budget.reset()

    def _remove(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self._fd)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """The files stay. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _header(key: bytes, block: memoryview) -> bytes:
    return _HEADER.pack(_MAGIC, key, block.nbytes, zlib.crc32(block))
