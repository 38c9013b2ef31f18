"""KV blocks of the rows of a simulated decode worker, if they are counted."""

from collections.abc import Callable, Iterator, Sequence

from runtime.serving.kv.blocks import BlockManager, BlockTable, OutOfBlocks
from runtime.simulator.stages.decode_batches import Batch
from runtime.simulator.stages.request import SimRequest


class KvRows:
    """KV blocks of a worker's rows, allocated by production's block manager, without prefix sharing.

    Rows are in order of arrival. A preempted row has no blocks, keeps its position, and is recomputed when it resumes.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.most_tokens = blocks * block_tokens
        self._blocks = BlockManager(blocks, block_tokens, b"")
        self._tables: dict[SimRequest, BlockTable | None] = {}

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self._tables)

    @property
    def available(self) -> int:
        return self._blocks.available

    def has_room(self, tokens: int, running: int) -> bool:
        """Return whether a row of `tokens` tokens fits, with one block left for each running row (as in
        `decode.handover_queue`)."""
        return self._blocks.blocks_for(tokens) + running <= self.available

    def blocks_needed(self, needed: Sequence[tuple[SimRequest, int]]) -> int:
        """Return how many blocks these rows need to hold so many tokens."""
        return sum(self._blocks.blocks_for(tokens) - len(self._held(row).blocks) for row, tokens in needed)

    def holds(self, row: SimRequest) -> bool:
        return self._tables[row] is not None

    def take(self, row: SimRequest, tokens: int) -> None:
        """Allocate blocks for a new or resumed row. Raises `OutOfBlocks`."""
        table = BlockTable()
        self._blocks.grow(table, tokens)
        self._tables[row] = table

    def youngest(self) -> SimRequest:
        """Return the row that is preempted next."""
        return next(row for row in reversed(self._tables) if self._tables[row] is not None)

    def preempt(self, row: SimRequest) -> None:
        """Free the blocks of a row."""
        self._blocks.close(self._held(row))
        self._tables[row] = None

    def end(self, row: SimRequest) -> None:
        """Free the blocks of a row that has ended."""
        table = self._tables.pop(row)
        if table is not None:
            self._blocks.close(table)

    def allocate(self, batch: Batch, preempt: Callable[[], None]) -> int:
        """Allocate blocks for the next steps of every row of the batch, oldest first, preempting if necessary. Return
        the number of steps."""
        batch.join_pending()
        steps = min(batch.most_steps, self.block_tokens)
        needed = self._needed(batch, steps)
        if self.blocks_needed(needed) > self.available:
            steps, needed = 1, self._needed(batch, 1)
        for row, tokens in needed:
            while batch.contains(row.row):
                try:
                    self._blocks.grow(self._held(row), tokens)
                    break
                except OutOfBlocks:
                    preempt()
        return steps

    def _needed(self, batch: Batch, steps: int) -> list[tuple[SimRequest, int]]:
        """Return how many tokens each row of the batch will have after `steps` steps."""
        return [(row, batch.context_after(row.row, steps)) for row in self._tables if batch.contains(row.row)]

    def _held(self, row: SimRequest) -> BlockTable:
        table = self._tables[row]
        assert table is not None, "it holds blocks"
        return table
