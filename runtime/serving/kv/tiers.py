"""KV tiers: full KV blocks as files, in the host's memory and on disk, that outlive the worker that computed them.

```
a worker's blocks ──write: between passes, and before an eviction──▶ host tier, disk tier    (`[kv]`)
       ▲                                                                  │
       └──────── load: block by block, as a hand-over is pulled ◀─────────┘
```
A block's name is its hash over the model and all tokens up to its end (`blocks.py`), so whoever comes to the same
prefix finds it: another worker, or the one that starts in a dead one's place. The files are `file_tier`.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import DecodeMetrics, KvMetrics, PrefillMetrics
from runtime.node.metrics.worker_metrics import Tier as TierName
from runtime.node.placement.plan import NodePlan
from runtime.serving.kv.blocks import BlockManager, BlockTable
from runtime.serving.kv.file_tier import FileTier, Tier
from runtime.serving.kv.transport import KvArray, Transfer

WRITERS = 16  # prefill and decode workers that a node can have, those added later too
LOAD_NS = 20_000_000  # of a prompt's KV prefill loads, before others' next pass
BUSY_SHARE = 30  # of the time of a pass or a step, at most, blocks are written, or copied, beside it
_DEBT_NS = 20_000_000  # of writing more than that, to make room, before blocks are given up unwritten
_LATELY = 8  # blocks or passes that a mean is mostly of
_FORGETS = 0.98  # of what a block took to load, with each that was computed instead: so it is tried again


class Tiers:
    """The tiers of one worker, the fastest first; without any, nothing is written or found.

    They cost a busy worker a share of its time at most: a block whose room is needed is given up unwritten while
    writing has taken more than that. And where the model computes a block sooner than one is loaded, nothing is found
    in them.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        blocks: BlockManager,
        kv: KvArray | None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`kv`: what the blocks are of; None where there is nothing to copy (the simulator)."""
        self._tiers, self._blocks, self._kv, self._clock = tuple(tiers), blocks, kv, clock
        self._block: KvArray | None = None
        self._bytes = memoryview(b"")
        if kv is not None:
            self._block, self._bytes = _one_block(kv)
        self._credit_ns = 0
        self._load_ns = self._compute_ns = 0.0  # of a block, lately; 0: not known
        if self._tiers:
            blocks.before_eviction = self._evict

    @classmethod
    def of_plan(cls, plan: NodePlan, blocks: BlockManager, kv: KvArray) -> "Tiers":
        """Those that are configured. Raises `ConfigError`."""
        config, block_bytes = plan.config, kv.nbytes // kv.shape[2]
        kept: tuple[tuple[TierName, Path, int], ...] = (
            ("host", plan.kv_directory, config.kv.host_mib),
            ("disk", Path(config.kv.disk_path), config.kv.disk_mib),
        )
        return cls([FileTier(name, at, mib << 20, block_bytes, WRITERS) for name, at, mib in kept if mib], blocks, kv)

    def cached_tokens(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """How many leading tokens are in blocks here or in a tier that is worth it, the last token left out."""
        count = self._blocks.cached_tokens(tokens, salt=salt) // self._blocks.block_tokens
        if not self._loading_pays:
            return count * self._blocks.block_tokens
        for key in islice(self._blocks.keys(tokens, salt=salt), count, None):
            if not any(tier.has(key) for tier in self._tiers):
                break
            count += 1
        return count * self._blocks.block_tokens

    def load(self, table: BlockTable, tokens: Sequence[int]) -> "Load | None":
        """A copy of what is there beyond `table.reused_tokens` into the table's blocks; None if nothing is, or it is
        computed sooner."""
        keys = list(self._blocks.keys(tokens, root=table.root))[table.reused_tokens // self._blocks.block_tokens :]
        if not keys or not any(tier.has(keys[0]) for tier in self._tiers):
            return None
        if not self._loading_pays:
            self._load_ns *= _FORGETS
            return None
        return Load(self, self._blocks, table, tokens, keys)

    def record_compute(self, tokens: float, took_ns: float) -> None:
        """The model has computed so many tokens of prompts in that time."""
        if tokens > 0:
            self._compute_ns = _lately(self._compute_ns, took_ns * self._blocks.block_tokens / tokens)

    @property
    def _loading_pays(self) -> bool:
        return not self._compute_ns or self._load_ns < self._compute_ns

    def load_block(self, key: bytes, block: int) -> bool:
        """Copy one block in; False if no tier has it whole. What only a slower tier has goes to the faster ones."""
        begin_ns = self._clock()
        for number, tier in enumerate(self._tiers):
            if tier.load(key, self._bytes):
                if self._kv is not None and self._block is not None:
                    Transfer(self._block, [0], self._kv, [block]).step()
                self._load_ns = _lately(self._load_ns, self._clock() - begin_ns)
                for faster in self._tiers[:number]:
                    faster.store(key, self._bytes)
                return True
        return False

    def write(self, for_ns: int | None = None) -> bool:
        """Write blocks that no tier has had yet, for about `for_ns` a call over many calls; or one, by a worker that
        has nothing else to do (None). Whether any was written."""
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
        """Write a block whose room is needed now, if writing has had no more than its share."""
        if self._credit_ns > -_DEBT_NS:
            begin_ns = self._clock()
            self._store(key, block)
            self._credit_ns -= self._clock() - begin_ns

    def _store(self, key: bytes, block: int) -> None:
        missing = [tier for tier in self._tiers if not tier.has(key)]
        if missing and self._kv is not None and self._block is not None:
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


def _lately(mean: float, value: float) -> float:
    """A mean of the last values, with the next one; 0: there is none yet."""
    return mean + (value - mean) / _LATELY if mean else value


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
