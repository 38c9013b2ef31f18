"""KV tiers: full KV blocks in files, in host memory and on disk, which outlive the worker that computed them.

```
a worker's blocks ──write: between passes, and before an eviction──▶ host tier, disk tier    (`[kv]`)
       ▲          ──save: a whole row, held until it returns───────▶      │
       └──────── load: block by block, as a hand-over is pulled ◀─────────┘
```
A block's name is its hash over the model and all tokens up to its end (`blocks.py`), so any worker with the same
prefix finds it, including the replacement of a dead worker. `file_tier` implements the files.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import DecodeMetrics, KvMetrics, PrefillMetrics
from runtime.node.metrics.worker_metrics import Tier as TierName
from runtime.node.placement.plan import NodePlan
from runtime.serving.kv.blocks import BlockManager, BlockTable
from runtime.serving.kv.file_tier import FileTier
from runtime.serving.kv.transport import KvArray

WRITERS = 16  # most prefill and decode workers of a node, including those added later
LOAD_NS = 20_000_000  # time that prefill loads a prompt's KV between two passes
BUSY_SHARE = 30  # blocks are written or copied for at most 1/30 of the time of a pass or step
_MAX_DEBT_NS = 20_000_000  # writing time beyond that share after which blocks are evicted unwritten
_MEAN_WINDOW = 8  # blocks or passes in a moving average
_LOAD_DECAY = 0.98  # of the average load time, for each prompt computed instead: loading is tried again eventually


@dataclass(frozen=True, slots=True)
class SavedRow:
    """The KV of a row's first `tokens` tokens in a tier: the hashes of its blocks, of which the last may be partial."""

    keys: Sequence[bytes]
    tokens: int


class Tiers:
    """The tiers of one worker, fastest first. Without tiers nothing is written or found.

    Their cost is bounded by a share of a busy worker's time: while writing exceeds it, blocks are evicted unwritten.
    While the model computes a block faster than a tier loads it, the tiers are not searched.
    """

    def __init__(
        self,
        tiers: Sequence[FileTier],
        blocks: BlockManager,
        kv: KvArray,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`kv`: the tensor that holds the blocks."""
        self._tiers, self._blocks, self._kv, self._clock = tuple(tiers), blocks, kv, clock
        self._block, self._bytes = _one_block(kv)
        self._credit_ns = 0
        self._write_ns = self._load_ns = self._compute_ns = 0.0  # moving averages per block; 0: not measured
        if self._tiers:
            blocks.before_eviction = self._evict

    @classmethod
    def of_plan(cls, plan: NodePlan, blocks: BlockManager, kv: KvArray) -> "Tiers":
        """Open the configured tiers. Raises `ConfigError`."""
        config, block_bytes = plan.config, kv.nbytes // kv.shape[2]
        sections: tuple[tuple[TierName, Path, int], ...] = (
            ("host", plan.kv_directory, config.kv.host_mib),
            ("disk", Path(config.kv.disk_path), config.kv.disk_mib),
        )
        return cls(
            [
                FileTier(name, at, mib << 20, block_bytes, WRITERS, config.http.request_timeout_s)
                for name, at, mib in sections
                if mib
            ],
            blocks,
            kv,
        )

    def cached_tokens(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Return how many leading tokens, except the last, are cached here or in a tier worth loading from."""
        count = self._blocks.cached_tokens(tokens, salt=salt) // self._blocks.block_tokens
        if not self._loading_pays:
            return count * self._blocks.block_tokens
        for key in islice(self._blocks.keys(tokens, salt=salt), count, None):
            if not any(tier.has(key) for tier in self._tiers):
                break
            count += 1
        return count * self._blocks.block_tokens

    def load(self, table: BlockTable, tokens: Sequence[int]) -> "Load | None":
        """Return the load of tokens beyond `table.reused_tokens` into the table's blocks; None if no tier has them or
        computing them is faster."""
        keys = list(self._blocks.keys(tokens, root=table.root))[table.reused_tokens // self._blocks.block_tokens :]
        if not keys or not any(tier.has(keys[0]) for tier in self._tiers):
            return None
        if not self._loading_pays:
            self._load_ns *= _LOAD_DECAY
            return None
        return Load(self, self._blocks, table, tokens, keys)

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """Write a row's blocks to the fastest tier and hold them there: all of them, or none (then False)."""
        if not self._tiers or not self._tiers[0].may_hold(len(keys)):
            return False
        tier, written, held = self._tiers[0], list[bytes](), list[bytes]()
        for key, block in zip(keys, blocks, strict=True):
            if tier.hold(key):
                held.append(key)
                continue
            begin_ns = self._clock()
            self._copy_out(block)
            if not tier.store(key, self._bytes, hold=True):
                for undone in written:
                    tier.drop(undone)
                for undone in held:
                    tier.release(undone)
                return False
            self._write_ns = _moving_average(self._write_ns, self._clock() - begin_ns)
            written.append(key)
        return True

    def swap_out(self, keys: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """`save` the blocks of a preempted row, if writing those that the tier lacks and loading all of them is
        measured cheaper than computing all. False: the row is to be recomputed.

        The first row is recomputed, which measures computing, and the next one is saved, which measures copies.
        """
        if not keys or not self._tiers or not self._compute_ns:
            return False
        missing = sum(not self._tiers[0].has(key) for key in keys)
        if missing * self._write_ns + len(keys) * self._load_ns >= len(keys) * self._compute_ns:
            self._write_ns *= _LOAD_DECAY
            self._load_ns *= _LOAD_DECAY
            return False
        return self.save(keys, blocks)

    def restore(self, row: SavedRow, table: BlockTable, tokens: Sequence[int]) -> "Load":
        """Return the load of a saved row's blocks beyond `table.reused_tokens` into the table's blocks."""
        keys = row.keys[table.reused_tokens // self._blocks.block_tokens :]
        return Load(self, self._blocks, table, tokens[: row.tokens], keys)

    def release(self, row: SavedRow) -> None:
        """End the hold of a row that has been restored or has ended. Full blocks stay for others."""
        full = row.tokens // self._blocks.block_tokens
        for key in row.keys[:full]:
            self._tiers[0].release(key)
        for key in row.keys[full:]:
            self._tiers[0].drop(key)

    def record_compute(self, tokens: float, took_ns: float) -> None:
        """Record that the model computed `tokens` prompt tokens in `took_ns`."""
        if tokens > 0:
            self._compute_ns = _moving_average(self._compute_ns, took_ns * self._blocks.block_tokens / tokens)

    @property
    def load_saves(self) -> float:
        """Share of a block's computing time that loading it from a tier saves, 0..1; 0 until both are measured."""
        return max(0.0, 1.0 - self._load_ns / self._compute_ns) if self._load_ns and self._compute_ns else 0.0

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        return self._bytes.nbytes

    @property
    def _loading_pays(self) -> bool:
        return not self._compute_ns or self._load_ns < self._compute_ns

    def load_block(self, key: bytes, block: int) -> bool:
        """Load one block, and store it in the faster tiers that lack it. Return False if no tier has it intact."""
        begin_ns = self._clock()
        for number, tier in enumerate(self._tiers):
            if tier.load(key, self._bytes):
                self._kv[:, :, block : block + 1] = self._block
                self._load_ns = _moving_average(self._load_ns, self._clock() - begin_ns)
                for faster in self._tiers[:number]:
                    faster.store(key, self._bytes)
                return True
        return False

    def write(self, for_ns: int | None = None) -> bool:
        """Write blocks that no tier has stored yet, for `for_ns` per call on average (None, for an idle worker: one
        block). Return whether any was written."""
        if for_ns is None:
            self._credit_ns = 1
        else:
            self._credit_ns = min(self._credit_ns, 0) + for_ns
        wrote = False
        while self._blocks.unsaved and self._credit_ns > 0:
            begin_ns = self._clock()
            self._store(*self._blocks.unsaved.popitem(last=False))
            self._credit_ns -= self._clock() - begin_ns
            wrote = True
            if for_ns is None:
                self._credit_ns = 0
        return wrote

    def _evict(self, key: bytes, block: int) -> None:
        """Write a block that is being evicted, if writing has not exceeded its share of time."""
        if self._credit_ns > -_MAX_DEBT_NS:
            begin_ns = self._clock()
            self._store(key, block)
            self._credit_ns -= self._clock() - begin_ns

    def _store(self, key: bytes, block: int) -> None:
        missing = [tier for tier in self._tiers if not tier.has(key)]
        if missing:
            self._copy_out(block)
        for tier in missing:
            tier.store(key, self._bytes)

    def _copy_out(self, block: int) -> None:
        self._block[:] = self._kv[:, :, block : block + 1]

    def publish(self, table: WorkerTable, metrics: type[PrefillMetrics] | type[DecodeMetrics]) -> None:
        """Write the state of the blocks and the tiers' counters to a worker's metrics table."""
        table.total(metrics.PREFIX_QUERY_TOKENS, self._blocks.lookup_tokens)
        table.total(metrics.PREFIX_HIT_TOKENS, self._blocks.hit_tokens)
        table.total(metrics.KV_EVICTIONS, self._blocks.evictions)
        for tier in self._tiers:
            for metric, counters in KvMetrics.TIER_BLOCKS.items():
                table.total(counters[tier.name], tier.counts[metric])
            table.set(KvMetrics.TIER_BYTES[tier.name], tier.used_bytes)
            table.set(KvMetrics.TIER_HELD[tier.name], tier.held_bytes)

    def close(self) -> None:
        """Close the tiers; their blocks stay for other workers."""
        for tier in self._tiers:
            tier.close()


class Load:
    """Copy of a prompt's blocks from the tiers into its table. Like a `Transfer`: call `step` until it returns True.

    It ends at the first block that is missing or damaged. Then `table.reused_tokens` counts the tokens loaded.
    """

    settled = True  # a step returns when its blocks are copied

    def __init__(
        self, tiers: Tiers, blocks: BlockManager, table: BlockTable, tokens: Sequence[int], keys: Sequence[bytes]
    ) -> None:
        self._tiers, self._blocks, self._table, self._tokens, self._keys = tiers, blocks, table, tokens, keys
        self.busy_ns = self.bytes = 0

    def settle(self) -> None:
        """See `Transfer.settle`."""

    def step(self, for_ns: int | None = None, clock: Callable[[], int] = time.monotonic_ns) -> bool:
        """Copy for about `for_ns`, at least one block (None: all). Return whether it is done."""
        begin_ns, size = clock(), self._blocks.block_tokens
        while self._keys:
            index = self._table.reused_tokens // size
            if not self._tiers.load_block(self._keys[0], self._table.blocks[index]):
                self._keys = ()
                break
            self._keys = self._keys[1:]
            self.bytes += self._tiers.block_bytes
            self._table.reused_tokens = min((index + 1) * size, len(self._tokens))
            if for_ns is not None and clock() - begin_ns >= for_ns:
                break
        self.busy_ns += clock() - begin_ns
        if self._keys:
            return False
        self._blocks.fill(self._table, self._tokens, self._table.reused_tokens)
        return True


def _moving_average(mean: float, value: float) -> float:
    """Return the exponential moving average after `value`; a `mean` of 0 means no value yet."""
    return mean + (value - mean) / _MEAN_WINDOW if mean else value


def _one_block(kv: KvArray) -> tuple[KvArray, memoryview]:
    """Return an array for one block of `kv`, and a view of its bytes."""
    shape = (*kv.shape[:2], 1, *kv.shape[3:])
    if isinstance(kv, np.ndarray):
        block = np.empty(shape, kv.dtype)
        return block, block.reshape(-1).view(np.uint8).data
    import torch

    assert isinstance(kv, torch.Tensor)
    # Page-locked, so that the GPU copies by DMA. A block is contiguous here and not in `kv`: torch gathers or scatters
    # its layers on the GPU, so that it is one copy. torch waits for it, in stream order with the model's work.
    pinned = torch.empty(shape, dtype=kv.dtype, pin_memory=torch.cuda.is_available())
    return pinned, pinned.view(-1).view(torch.uint8).numpy().data
