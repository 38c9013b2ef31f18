"""KV tiers: full KV blocks as files, in the host's memory and on disk, that outlive the worker that computed them.

```
a worker's blocks ──write: between passes, and before an eviction──▶ host tier, disk tier    (`[kv]`)
       ▲                                                                  │
       └──────── load: block by block, as a hand-over is pulled ◀─────────┘
```
A block's name is its hash over the model and all tokens up to its end (`blocks.py`), so whoever comes to the same
prefix finds it: another worker, or the one that starts in a dead one's place. A file is written under another name and
renamed, and has a checksum; one that is damaged is removed, and its block computed. Nothing here raises for a file: a
tier that cannot be read or written has no blocks.
"""

import errno
import logging
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from runtime.errors import ConfigError
from runtime.node.metrics.columns import DecodeMetrics, KvMetrics, PrefillMetrics, Tier
from runtime.node.metrics.table import WorkerTable
from runtime.node.placement.plan import NodePlan
from runtime.serving.kv.blocks import BlockManager, BlockTable
from runtime.serving.kv.transport import KvArray, Transfer

_HEADER = struct.Struct("<8s16sQI4x")  # what it is, the block's hash, bytes that follow, their CRC-32
_MAGIC = b"TRKVBLK1"
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # not to wait for a pipe that somebody put there
_SHARE = 4  # of the limit: what all writers add at most before they look how much there is
_WRITERS = 16  # prefill and decode workers that a node can have, those added later too

log = logging.getLogger("kv")


class FileTier:
    """A private directory of blocks of `block_bytes`, at most `limit_bytes` with all that its `writers` add at once.

    The longest unused blocks go first. Processes share it without a word to each other: names are content, and each
    looks what is there before it has added its share of the limit. `counts`: what this process did, by metric.
    """

    def __init__(self, name: Tier, directory: Path, limit_bytes: int, block_bytes: int, writers: int) -> None:
        """Raises `ConfigError` for a directory that cannot be used, or is not this user's alone."""
        self.name, self.counts = name, dict.fromkeys(("loaded", "stored", "evicted", "damaged", "failed"), 0)
        self.used_bytes = 0  # as of the last look, and what was added since
        self._file_bytes = _HEADER.size + block_bytes
        self._share = max(limit_bytes // _SHARE // writers, self._file_bytes)
        self._keep = limit_bytes - writers * self._share
        self._added = self._share  # unknown: look before the first is added
        if self._keep < self._file_bytes:
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
        if self._keep < self._file_bytes or self.has(key):
            return
        if self._added + self._file_bytes > self._share:
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
                log.warning("the %s tier of KV cannot be written to: %s", self.name, error.strerror)
            self.counts["failed"] += 1
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._trim(self.used_bytes * 7 // 8)
            return
        self.counts["stored"] += 1
        self._added += self._file_bytes
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
        self.used_bytes, self._added = used, 0

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


class Tiers:
    """The tiers of one worker, the fastest first; without any, nothing is written or found."""

    def __init__(self, tiers: Sequence[FileTier], blocks: BlockManager, kv: KvArray) -> None:
        self._tiers, self._blocks, self._kv = tuple(tiers), blocks, kv
        self._block, self._bytes = _one_block(kv)
        self._credit_ns = 0
        if self._tiers:
            blocks.before_eviction = self._store

    @classmethod
    def of_plan(cls, plan: NodePlan, blocks: BlockManager, kv: KvArray) -> "Tiers":
        """Those that are configured. Raises `ConfigError`."""
        config, block_bytes = plan.config, kv.nbytes // kv.shape[2]
        directories: dict[Tier, Path] = {"host": plan.kv_directory, "disk": Path(config.kv.disk_path)}
        limits: dict[Tier, int] = {"host": config.kv.host_mib << 20, "disk": config.kv.disk_mib << 20}
        tiers = [
            FileTier(name, directory, limits[name], block_bytes, _WRITERS)
            for name, directory in directories.items()
            if limits[name]
        ]
        return cls(tiers, blocks, kv)

    def found(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """How many leading tokens are in blocks here or in a tier, the last token left out."""
        count = self._blocks.reusable(tokens, salt=salt) // self._blocks.block_tokens
        for key in islice(self._blocks.keys(tokens, salt=salt), count, None):
            if not any(tier.has(key) for tier in self._tiers):
                break
            count += 1
        return count * self._blocks.block_tokens

    def load(self, table: BlockTable, tokens: Sequence[int]) -> "Load | None":
        """A copy of what is there beyond `table.reused_tokens` into the table's blocks; None if nothing is."""
        keys = list(self._blocks.keys(tokens, root=table.root))[table.reused_tokens // self._blocks.block_tokens :]
        if not keys or not any(tier.has(keys[0]) for tier in self._tiers):
            return None
        return Load(self, self._blocks, table, tokens, keys)

    def load_block(self, key: bytes, block: int) -> bool:
        """Copy one block in; False if no tier has it whole. What only a slower tier has goes to the faster ones."""
        for number, tier in enumerate(self._tiers):
            if tier.load(key, self._bytes):
                Transfer(self._block, [0], self._kv, [block]).step()
                for faster in self._tiers[:number]:
                    faster.store(key, self._bytes)
                return True
        return False

    def write(self, for_ns: int | None = None, clock: Callable[[], int] = time.monotonic_ns) -> bool:
        """Write blocks that no tier has had yet, for about `for_ns` a call over many calls (None: one); whether any."""
        if for_ns is not None:
            self._credit_ns = min(self._credit_ns, 0) + for_ns
        wrote = False
        while self._blocks.unsaved and (for_ns is None or self._credit_ns > 0):
            begin_ns = clock()
            self._store(*self._blocks.unsaved.popitem(last=False))
            self._credit_ns -= clock() - begin_ns
            wrote = True
            if for_ns is None:
                break
        return wrote

    def _store(self, key: bytes, block: int) -> None:
        missing = [tier for tier in self._tiers if not tier.has(key)]
        if missing:
            Transfer(self._kv, [block], self._block, [0]).step()
        for tier in missing:
            tier.store(key, self._bytes)

    def publish(self, table: WorkerTable, metrics: type[PrefillMetrics] | type[DecodeMetrics]) -> None:
        """Write the state of the blocks, and the tiers' counters, into a worker's table."""
        found = self._blocks.statistics()
        table.set(metrics.KV_BLOCKS, found.total)
        table.set(metrics.KV_BLOCKS_HELD, found.held)
        table.set(metrics.KV_BLOCKS_CACHED, found.cached)
        table.total(metrics.PREFIX_QUERY_TOKENS, found.lookup_tokens)
        table.total(metrics.PREFIX_HIT_TOKENS, found.hit_tokens)
        table.total(metrics.KV_EVICTIONS, found.evictions)
        for tier in self._tiers:
            for metric, what in KvMetrics.TIER_BLOCKS.items():
                table.total(what[tier.name], tier.counts[metric])
            table.set(KvMetrics.TIER_BYTES[tier.name], tier.used_bytes)

    def close(self) -> None:
        """The tiers stay as they are, for others."""
        for tier in self._tiers:
            tier.close()


class Load:
    """What tiers have of a prompt, copied into its table's blocks. `step` until that is True, as a `Transfer`.

    It ends at the first block that is not there, or damaged. At its end the table's `reused_tokens` are what it has.
    """

    settled = True  # a step returns when its blocks are copied

    def __init__(
        self, tiers: Tiers, blocks: BlockManager, table: BlockTable, tokens: Sequence[int], keys: Sequence[bytes]
    ) -> None:
        self._tiers, self._blocks, self._table, self._tokens, self._keys = tiers, blocks, table, tokens, keys

    def settle(self) -> None:
        """See `Transfer.settle`."""

    def step(self, for_ns: int | None = None, clock: Callable[[], int] = time.monotonic_ns) -> bool:
        """Copy for about `for_ns`, at least a block (None: all); whether it is over."""
        begin_ns, size = clock(), self._blocks.block_tokens
        while self._keys:
            here = self._table.reused_tokens // size
            if not self._tiers.load_block(self._keys[0], self._table.blocks[here]):
                self._keys = ()
                break
            self._keys = self._keys[1:]
            self._table.reused_tokens += size
            if for_ns is not None and clock() - begin_ns >= for_ns:
                break
        if self._keys:
            return False
        self._blocks.fill(self._table, self._tokens, self._table.reused_tokens)
        return True


def _one_block(kv: KvArray) -> tuple[KvArray, memoryview]:
    """An array like `kv` of one block, and its bytes."""
    shape = (*kv.shape[:2], 1, *kv.shape[3:])
    if isinstance(kv, np.ndarray):
        block = np.empty(shape, kv.dtype)
        return block, block.reshape(-1).view(np.uint8).data
    import torch

    assert isinstance(kv, torch.Tensor)
    # Page-locked, so that a GPU copies by itself. torch waits for each copy, in the order of the model's own work.
    there = torch.empty(shape, dtype=kv.dtype, pin_memory=torch.cuda.is_available())
    return there, there.view(-1).view(torch.uint8).numpy().data
