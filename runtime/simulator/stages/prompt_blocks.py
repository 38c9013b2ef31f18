"""What simulated workers find again of prompts, for traces that say which blocks their prompts share.

A block is one of the trace's; production's block manager holds and caches it. Blocks are not shared before they are
full, and a prompt's last token is always computed, as there.
"""

from collections.abc import Sequence

from runtime.serving.kv.blocks import BlockManager, BlockTable
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.traces import Arrival


class PromptBlocks:
    """The blocks of one worker, for the prompts that it holds, and cached until their room is needed.

    What answers add is not counted.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens, self.blocks = block_tokens, blocks
        self._manager = BlockManager(blocks, 1, b"")  # a trace's block is what a token is there
        self._tables: dict[SimRequest, BlockTable] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken: free ones and cached ones."""
        return self._manager.available

    @property
    def evicted_ns(self) -> int:
        """When the latest request came of whose blocks one was given up."""
        return self._manager.evicted_ns

    def found(self, arrival: Arrival) -> int:
        """How many leading tokens of a prompt `take` would find now."""
        return self._manager.reusable(self._known(arrival), 0) * self.block_tokens

    def has_room(self, arrival: Arrival) -> bool:
        known = self._known(arrival)
        others = -(-arrival.prompt_tokens // self.block_tokens) - len(known)
        return self._manager.missing(known, 0) + others <= self.available

    def take(self, request: SimRequest) -> int:
        """Blocks for its prompt; how many leading tokens are there already. Raises `OutOfBlocks`."""
        arrival = request.arrival
        table = self._manager.open(self._known(arrival), 0)
        table.asked_ns = request.received_ns
        self._tables[request] = table
        self._manager.grow(table, -(-arrival.prompt_tokens // self.block_tokens))
        return table.reused_tokens * self.block_tokens

    def fill(self, request: SimRequest, tokens: int) -> None:
        """The KV of its first `tokens` tokens is there: others find it, if it has not made room meanwhile."""
        table = self._tables.get(request)
        if table is not None:
            full = min(tokens // self.block_tokens, len(request.arrival.prefix))
            self._manager.fill(table, request.arrival.prefix, full)

    def release(self, request: SimRequest) -> None:
        """It needs its blocks no longer; those that are full stay cached. One that holds none is left alone."""
        table = self._tables.pop(request, None)
        if table is not None:
            self._manager.close(table)

    def _known(self, arrival: Arrival) -> Sequence[int]:
        """The blocks that may be there already: the last token is not in them."""
        return arrival.prefix[: (arrival.prompt_tokens - 1) // self.block_tokens]


def prompt_blocks(arrivals: Sequence[Arrival], slots: int, kv_tokens: int = 0) -> PromptBlocks | None:
    """Those of a worker that holds `kv_tokens` tokens; 0: as many as `slots` of the longest prompts have. None if the
    trace does not say what its prompts share."""
    block_tokens = arrivals[0].block_tokens if arrivals else 0
    if not block_tokens:
        return None
    longest = max(-(-arrival.prompt_tokens // block_tokens) for arrival in arrivals)
    return PromptBlocks(-(-kv_tokens // block_tokens) or slots * longest, block_tokens)
