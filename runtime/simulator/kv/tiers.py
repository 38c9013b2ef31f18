"""KV tiers on the virtual clock, with production's rules for writes, lookups, loads and evictions (`serving.kv.tiers`).

A tier contains block names only, and copies take the time given by the service times. A block of a trace counts as the
node's blocks that it consists of.
"""

from collections import OrderedDict
from typing import NamedTuple

from runtime.node.config import KvSection
from runtime.node.metrics.worker_metrics import Tier as TierName
from runtime.serving.kv.blocks import BlockManager
from runtime.serving.kv.file_tier import Budget
from runtime.serving.kv.tiers import WRITERS, SavedRow, Tiers
from runtime.simulator.events import ns
from runtime.simulator.times.service import ServiceTimes


class SharedTier:
    """A tier of the node: the names of its blocks, least recently used first, and their size in bytes. Those `held` are
    not evicted."""

    def __init__(self, name: TierName, limit_bytes: int, block_bytes: int) -> None:
        self.name, self.limit_bytes, self.block_bytes = name, limit_bytes, block_bytes
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        self.held: set[bytes] = set()
        self.used_bytes = 0

    @property
    def held_bytes(self) -> int:
        return sum(self.blocks[key] for key in self.held)

    def add(self, key: bytes, nbytes: int) -> None:
        self.blocks[key] = nbytes
        self.used_bytes += nbytes

    def trim(self, most_bytes: int) -> int:
        """Evict least recently used blocks down to `most_bytes`. Return how many."""
        evicted = 0
        for key in [key for key in self.blocks if key not in self.held]:
            if self.used_bytes <= most_bytes:
                break
            self.remove(key)
            evicted += 1
        return evicted

    def remove(self, key: bytes) -> None:
        self.held.discard(key)
        self.used_bytes -= self.blocks.pop(key, 0)


class Costs(NamedTuple):
    """Times of one block of the node, in ns."""

    write_ns: int
    load_ns: int

    @classmethod
    def of(cls, times: ServiceTimes, block_tokens: int) -> "Costs":
        nbytes = times.kv_token_bytes * block_tokens
        return cls(
            ns(times.tier_block_s + nbytes / times.tier_write_bytes_s),
            ns(times.tier_block_s + nbytes / times.tier_load_bytes_s),
        )


class CopyClock:
    """A clock that counts the time of a worker's copies from and to tiers."""

    def __init__(self) -> None:
        self.spent_ns = 0

    def __call__(self) -> int:
        return self.spent_ns


class SimTier:
    """A shared tier as one worker uses it, for blocks that consist of `files` blocks of the node."""

    def __init__(self, shared: SharedTier, clock: CopyClock, costs: Costs, files: int) -> None:
        self._shared, self._clock, self._costs, self._files = shared, clock, costs, files
        self._budget = Budget(shared.limit_bytes, shared.block_bytes, WRITERS)
        self.counts = dict.fromkeys(("loaded", "stored", "evicted", "damaged", "failed"), 0)

    @property
    def name(self) -> TierName:
        return self._shared.name

    @property
    def used_bytes(self) -> int:
        return self._shared.used_bytes

    @property
    def held_bytes(self) -> int:
        return self._shared.held_bytes

    def has(self, key: bytes) -> bool:
        return key in self._shared.blocks

    def load(self, key: bytes, into: memoryview) -> bool:
        if key not in self._shared.blocks:
            return False
        self._shared.blocks.move_to_end(key)
        self._clock.spent_ns += self._files * self._costs.load_ns
        self.counts["loaded"] += self._files
        return True

    def store(self, key: bytes, block: memoryview, *, hold: bool = False) -> bool:
        nbytes = self._files * self._shared.block_bytes
        if self._budget.too_small:
            return False
        if key in self._shared.blocks:
            return not hold or self.hold(key)
        if not self._budget.has_room(nbytes):
            self.counts["evicted"] += self._files * self._shared.trim(self._budget.keep)
            self._budget.reset()
        self._shared.add(key, nbytes)
        self._budget.add(nbytes)
        self._clock.spent_ns += self._files * self._costs.write_ns
        self.counts["stored"] += self._files
        return not hold or self.hold(key)

    def may_hold(self, blocks: int) -> bool:
        return self._budget.may_hold(self.held_bytes + blocks * self._files * self._shared.block_bytes)

    def hold(self, key: bytes) -> bool:
        if key in self._shared.blocks:
            self._shared.held.add(key)
        return key in self._shared.blocks

    def release(self, key: bytes) -> None:
        self._shared.held.discard(key)

    def drop(self, key: bytes) -> None:
        self._shared.remove(key)

    def close(self) -> None:
        """Do nothing: nothing is open."""


class NodeTiers:
    """The tiers of a simulated node, fastest first, which its workers share; possibly none."""

    def __init__(self, config: KvSection, times: ServiceTimes, block_tokens: int) -> None:
        """`block_tokens`: of the node's own blocks."""
        nbytes = round(times.kv_token_bytes * block_tokens)
        limits: dict[TierName, int] = {"host": config.host_mib << 20, "disk": config.disk_mib << 20}
        self.shared_tiers = [SharedTier(name, limit, nbytes) for name, limit in limits.items() if limit]
        self._block_tokens, self._costs = block_tokens, Costs.of(times, block_tokens)

    def of_worker(self, blocks: BlockManager, block_tokens: int) -> "WorkerTiers":
        """Return the tiers of a worker whose blocks have `block_tokens` tokens."""
        return WorkerTiers(self.shared_tiers, blocks, self._costs, max(1, block_tokens // self._block_tokens))


class WorkerTiers(Tiers):
    """Production's tiers for one worker, whose copies are timed by its own clock."""

    def __init__(self, shared_tiers: list[SharedTier], blocks: BlockManager, costs: Costs, files: int) -> None:
        self.clock, self.costs, self.files = CopyClock(), costs, files
        super().__init__(
            [SimTier(shared, self.clock, costs, files) for shared in shared_tiers], blocks, None, self.clock
        )

    def load_row(self, row: SavedRow) -> int:
        """Load a saved row. Return how many of its tokens were loaded."""
        loaded = 0
        for key in row.keys:
            if not self.load_block(key, 0):
                break
            loaded += self._blocks.block_tokens
        self.release(row)
        return min(loaded, row.tokens)

    def take_time_ns(self) -> int:
        """Return, and reset, the time of the copies since the last call."""
        spent, self.clock.spent_ns = self.clock.spent_ns, 0
        return spent

    def count(self, what: str) -> int:
        """Return how many blocks of the node were "loaded", "stored" or "evicted", over all tiers."""
        return sum(tier.counts[what] for tier in self._tiers)
