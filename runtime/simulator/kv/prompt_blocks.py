"""What simulated workers find again of prompts, for traces that say which blocks their prompts share.

A block is one of the trace's; production's block manager holds and caches it, and production's rules write it to KV
tiers and load it from there. Blocks are not shared before they are full, and a prompt's last token is always computed,
as there.
"""

from collections.abc import Sequence

from runtime.serving.kv.blocks import BlockManager, BlockTable
from runtime.serving.kv.tiers import Load
from runtime.simulator.kv.tiers import NodeTiers
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.traces import Arrival

_LAST = (0,)  # stands for the tokens behind a prompt's last block that can be shared


class PromptBlocks:
    """The blocks of one worker, for the prompts that it holds, and cached until their room is needed.

    What answers add is not counted.
    """

    def __init__(self, blocks: int, block_tokens: int, tiers: NodeTiers) -> None:
        self.block_tokens, self.blocks = block_tokens, blocks
        self._manager = BlockManager(blocks, 1, b"")  # a trace's block is what a token is there
        self.tiers = tiers.of_worker(self._manager, block_tokens)
        self._tables: dict[SimRequest, BlockTable] = {}
        self._loads: dict[SimRequest, Load] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken: free ones and cached ones."""
        return self._manager.available

    @property
    def evicted_ns(self) -> int:
        """When the latest request came of whose blocks one was given up."""
        return self._manager.evicted_ns

    def cached_tokens(self, arrival: Arrival) -> int:
        """How many leading tokens of a prompt are there now, or in tiers."""
        return self.tiers.cached_tokens(self._known(arrival)) * self.block_tokens

    def has_room(self, arrival: Arrival) -> bool:
        known = self._known(arrival)
        others = -(-arrival.prompt_tokens // self.block_tokens) - len(known)
        return self._manager.blocks_needed(known) + others <= self.available

    def take(self, request: SimRequest) -> int:
        """Blocks for its prompt; how many leading tokens are there already. Raises `OutOfBlocks`."""
        arrival = request.arrival
        table = self._manager.open(self._known(arrival))
        table.requested_ns = request.received_ns
        self._tables[request] = table
        self._manager.grow(table, -(-arrival.prompt_tokens // self.block_tokens))
        return table.reused_tokens * self.block_tokens

    def begin_load(self, request: SimRequest) -> int:
        """How long loading takes what tiers have of its prompt beyond that, in ns; 0 if they have nothing."""
        table, known = self._tables[request], self._known(request.arrival)
        load = self.tiers.load(table, known)
        if load is None:
            return 0
        self._loads[request] = load
        blocks = self.tiers.cached_tokens(known) - table.reused_tokens
        return max(blocks * self.tiers.files * self.tiers.costs.load_ns, 1)

    def end_load(self, request: SimRequest) -> int:
        """It is loaded, and its time counted elsewhere: how many leading tokens are there now."""
        load, table = self._loads.pop(request, None), self._tables.get(request)
        if table is None:
            return 0  # it has made room, or has ended
        if load is not None:
            before = self.tiers.watch.spent_ns
            load.step()
            self.tiers.watch.spent_ns = before
        return table.reused_tokens * self.block_tokens

    def fill(self, request: SimRequest, tokens: int) -> None:
        """The KV of its first `tokens` tokens is there: others find it, if it has not made room meanwhile."""
        table = self._tables.get(request)
        if table is not None:
            full = min(tokens // self.block_tokens, len(request.arrival.prefix))
            self._manager.fill(table, request.arrival.prefix, full)

    def release(self, request: SimRequest) -> None:
        """It needs its blocks no longer; those that are full stay cached. One that holds none is left alone."""
        self._loads.pop(request, None)
        table = self._tables.pop(request, None)
        if table is not None:
            self._manager.close(table)

    def record_compute(self, tokens: int, took_ns: int) -> None:
        """See `Tiers.computed`."""
        self.tiers.record_compute(tokens / self.block_tokens, took_ns)

    @property
    def unsaved(self) -> bool:
        """Whether there are blocks that no tier has had yet."""
        return bool(self._manager.unsaved)

    def _known(self, arrival: Arrival) -> Sequence[int]:
        """The blocks that may be there already, and what stands for the rest, with the last token."""
        return (*arrival.prefix[: (arrival.prompt_tokens - 1) // self.block_tokens], *_LAST)


def prompt_blocks(arrivals: Sequence[Arrival], slots: int, kv_tokens: int, tiers: NodeTiers) -> PromptBlocks | None:
    """Those of a worker that holds `kv_tokens` tokens; 0: as many as `slots` of the longest prompts have. None if the
    trace does not say what its prompts share."""
    block_tokens = arrivals[0].block_tokens if arrivals else 0
    if not block_tokens:
        return None
    longest = max(-(-arrival.prompt_tokens // block_tokens) for arrival in arrivals)
    return PromptBlocks(-(-kv_tokens // block_tokens) or slots * longest, block_tokens, tiers)
