"""Prefix reuse of simulated workers, for traces that contain the shared blocks of their prompts.

A block is a block of the trace, which production's block manager allocates and caches. As in production, only full
blocks are shared and a prompt's last token is always computed.
"""

from collections.abc import Sequence

from runtime.serving.kv.blocks import BlockManager, BlockTable
from runtime.simulator.stages.request import SimRequest
from runtime.simulator.traces import Arrival

_LAST = (0,)  # stands for the tokens after a prompt's last shareable block


class PromptBlocks:
    """Prompt blocks of a worker: held by its prompts, then cached until eviction. Answers' tokens are not counted."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens, self.blocks = block_tokens, blocks
        self.manager = BlockManager(blocks, 1, b"")  # one token of the manager is a block of the trace
        self._tables: dict[SimRequest, BlockTable] = {}

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated: free and cached ones."""
        return self.manager.available

    def cached_tokens(self, arrival: Arrival) -> int:
        """Return how many leading tokens of a prompt are cached here."""
        return self.manager.cached_tokens(self._lookup_keys(arrival)) * self.block_tokens

    def has_room(self, arrival: Arrival) -> bool:
        known = self._lookup_keys(arrival)
        others = -(-arrival.prompt_tokens // self.block_tokens) - len(known)
        return self.manager.blocks_needed(known) + others <= self.available

    def take(self, request: SimRequest) -> int:
        """Allocate blocks for a prompt. Return how many leading tokens are cached. Raises `OutOfBlocks`."""
        arrival = request.arrival
        table = self.manager.open(self._lookup_keys(arrival))
        self._tables[request] = table
        self.manager.grow(table, -(-arrival.prompt_tokens // self.block_tokens))
        return table.reused_tokens * self.block_tokens

    def fill(self, request: SimRequest, tokens: int) -> None:
        """Register the KV of a prompt's first `tokens` tokens for reuse, unless it was preempted meanwhile."""
        table = self._tables.get(request)
        if table is not None:
            full = min(tokens // self.block_tokens, len(request.arrival.prefix))
            self.manager.fill(table, request.arrival.prefix, full)

    def release(self, request: SimRequest) -> None:
        """Release a prompt's blocks; full ones stay cached. Idempotent."""
        table = self._tables.pop(request, None)
        if table is not None:
            self.manager.close(table)

    def _lookup_keys(self, arrival: Arrival) -> Sequence[int]:
        """Return the shareable blocks of a prompt, and a stand-in for the rest with its last token."""
        return (*arrival.prefix[: (arrival.prompt_tokens - 1) // self.block_tokens], *_LAST)


def prompt_blocks(arrivals: Sequence[Arrival], slots: int, kv_tokens: int) -> PromptBlocks | None:
    """Return the prompt blocks of a worker with room for `kv_tokens` tokens (0: for `slots` of the longest prompts).
    None if the trace contains no shared blocks."""
    block_tokens = arrivals[0].block_tokens if arrivals else 0
    if not block_tokens:
        return None
    longest = max(-(-arrival.prompt_tokens // block_tokens) for arrival in arrivals)
    return PromptBlocks(-(-kv_tokens // block_tokens) or slots * longest, block_tokens)
