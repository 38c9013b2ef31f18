"""KV tiers on the virtual clock: production decides what is written, found, loaded and given up (`serving.kv.tiers`).

What a tier holds are names here, and copies take the time that the service times say. A block of a trace counts as the
node's blocks that it is made of.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from runtime.node.config import KvSection
from runtime.node.metrics.worker_metrics import Tier as TierName
from runtime.serving.kv.blocks import BlockManager
from runtime.serving.kv.file_tier import Budget
from runtime.serving.kv.tiers import WRITERS, Tiers
from runtime.simulator.events import ns
from runtime.simulator.times.service import ServiceTimes


class Shelf:
    """A tier of the node: the names of its blocks, the longest unused first, and the bytes that they take."""

    def __init__(self, name: TierName, limit_bytes: int, block_bytes: int) -> None:
        self.name, self.limit_bytes, self.block_bytes = name, limit_bytes, block_bytes
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        self.used_bytes = 0

    def keep(self, key: bytes, nbytes: int) -> None:
        self.blocks[key] = nbytes
        self.used_bytes += nbytes

    def trim(self, most_bytes: int) -> int:
        """Give up the longest unused until at most so many bytes are left; how many blocks."""
        given_up = 0
        while self.used_bytes > most_bytes and self.blocks:
            self.used_bytes -= self.blocks.popitem(last=False)[1]
            given_up += 1
        return given_up


class Costs(NamedTuple):
    """Of one block of the node, in ns."""

    write_ns: int
    load_ns: int

    @classmethod
    def of(cls, times: ServiceTimes, block_tokens: int) -> "Costs":
        nbytes = times.kv_token_bytes * block_tokens
        return cls(
            ns(times.tier_block_s + nbytes / times.tier_write_bytes_s),
            ns(times.tier_block_s + nbytes / times.tier_load_bytes_s),
        )


class Watch:
    """The time that a worker's copies from and to tiers have taken together."""

    def __init__(self) -> None:
        self.spent_ns = 0

    def __call__(self) -> int:
        return self.spent_ns


class SimTier:
    """A shelf as one worker uses it, for blocks that are `files` of the node's each."""

    def __init__(self, shelf: Shelf, watch: Watch, costs: Costs, files: int) -> None:
        self._shelf, self._watch, self._costs, self._files = shelf, watch, costs, files
        self._budget = Budget(shelf.limit_bytes, shelf.block_bytes, WRITERS)
        self.counts = dict.fromkeys(("loaded", "stored", "evicted", "damaged", "failed"), 0)

    @property
    def name(self) -> TierName:
        return self._shelf.name

    @property
    def used_bytes(self) -> int:
        return self._shelf.used_bytes

    def has(self, key: bytes) -> bool:
        return key in self._shelf.blocks

    def load(self, key: bytes, into: memoryview) -> bool:
        if key not in self._shelf.blocks:
            return False
        self._shelf.blocks.move_to_end(key)
        self._watch.spent_ns += self._files * self._costs.load_ns
        self.counts["loaded"] += self._files
        return True

    def store(self, key: bytes, block: memoryview) -> None:
        nbytes = self._files * self._shelf.block_bytes
        if self._budget.too_small or key in self._shelf.blocks:
            return
        if not self._budget.has_room(nbytes):
            self.counts["evicted"] += self._files * self._shelf.trim(self._budget.keep)
            self._budget.reset()
        self._shelf.keep(key, nbytes)
        self._budget.add(nbytes)
        self._watch.spent_ns += self._files * self._costs.write_ns
        self.counts["stored"] += self._files

    def close(self) -> None:
        """Nothing is open."""


class NodeTiers:
    """The tiers of a simulated node, the fastest first, which its workers share; there may be none."""

    def __init__(self, config: KvSection, times: ServiceTimes, block_tokens: int) -> None:
        """block_tokens: of the node's own blocks."""
        nbytes = round(times.kv_token_bytes * block_tokens)
        limits: dict[TierName, int] = {"host": config.host_mib << 20, "disk": config.disk_mib << 20}
        self.shelves = [Shelf(name, limit, nbytes) for name, limit in limits.items() if limit]
        self._block_tokens, self._costs = block_tokens, Costs.of(times, block_tokens)

    def of_worker(self, blocks: BlockManager, block_tokens: int) -> "WorkerTiers":
        """Those of a worker whose blocks have so many tokens each."""
        return WorkerTiers(self.shelves, blocks, self._costs, max(1, block_tokens // self._block_tokens))


class WorkerTiers(Tiers):
    """Production's rules for one worker, whose copies are on a watch of its own."""

    def __init__(self, shelves: list[Shelf], blocks: BlockManager, costs: Costs, files: int) -> None:
        self.watch, self.costs, self.files = Watch(), costs, files
        super().__init__([SimTier(shelf, self.watch, costs, files) for shelf in shelves], blocks, None, self.watch)

    def evict(self, key: bytes) -> None:
        """The room of a block is needed that is not one of the block manager's: a row's."""
        self._evict(key, 0)

    def load_all(self, keys: Iterable[bytes]) -> int:
        """Load such blocks, up to the first that is not there, if that is sooner than to compute them; how many."""
        loaded = 0
        for key in keys:
            if not self._loading_pays or not self.load_block(key, 0):
                break
            loaded += 1
        return loaded

    def take_time_ns(self) -> int:
        """What copies have taken since it was asked last."""
        spent, self.watch.spent_ns = self.watch.spent_ns, 0
        return spent

    def counted(self, what: str) -> int:
        """Of all tiers: blocks of the node that were "loaded", "stored" or "evicted"."""
        return sum(tier.counts[what] for tier in self._tiers)
