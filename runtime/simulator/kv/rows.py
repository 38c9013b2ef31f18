"""The KV blocks of the rows of a simulated decode worker that counts them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from runtime.serving.kv.blocks import BlockManager, BlockTable, OutOfBlocks
from runtime.simulator.kv.tiers import NodeTiers
from runtime.simulator.stages.decode_batches import Batch
from runtime.simulator.stages.request import SimRequest


class KvRows:
    """The KV blocks of a worker's rows, held by production's block manager (no prefix is shared).

    Rows are in the order in which they came. A row that has made room for others has no blocks, and keeps its place.
    Its full blocks are in KV tiers then, where there are any with room: all of them are written at that moment (a real
    worker may have written some before, in idle time), and loaded when it comes back.
    """

    def __init__(self, blocks: int, block_tokens: int, tiers: NodeTiers) -> None:
        self.block_tokens = block_tokens
        self.most_tokens = blocks * block_tokens
        self._blocks = BlockManager(blocks, block_tokens, b"")
        self._tables: dict[SimRequest, BlockTable | None] = {}
        self._names = count()
        self.tiers = tiers.of_worker(self._blocks, block_tokens)
        self._kept: dict[SimRequest, list[bytes]] = {}  # of rows without blocks: the names of what tiers have

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self._tables)

    @property
    def available(self) -> int:
        return self._blocks.available

    def has_room(self, tokens: int, running: int) -> bool:
        """Return whether a row of `tokens` tokens fits, with one block left for each running row (as in
        `decode.handover_queue`)."""
        return self._blocks.blocks_for(tokens) + running <= self.available

    def blocks_needed(self, wanted: Sequence[tuple[SimRequest, int]]) -> int:
        """Blocks to take until each of these rows holds so many tokens."""
        return sum(self._blocks.blocks_for(tokens) - len(self._held(row).blocks) for row, tokens in wanted)

    def holds(self, row: SimRequest) -> bool:
        return self._tables[row] is not None

    def take(self, row: SimRequest, tokens: int) -> None:
        """Blocks for a row that has none, a new one or one that comes back. Raises `OutOfBlocks`."""
        table = BlockTable()
        self._blocks.grow(table, tokens)
        self._tables[row] = table

    def youngest(self) -> SimRequest:
        """The row that makes room next."""
        return next(row for row in reversed(self._tables) if self._tables[row] is not None)

    def give_up(self, row: SimRequest, tokens: int) -> None:
        """The row, which has so many tokens, makes room."""
        self._blocks.close(self._held(row))
        self._tables[row] = None
        self._kept[row] = [next(self._names).to_bytes(16, "big") for _ in range(tokens // self.block_tokens)]
        for name in self._kept[row]:
            self.tiers.evict(name)

    def come_back(self, row: SimRequest) -> int:
        """The row has blocks again: how many of its tokens tiers have had."""
        return self.tiers.load_all(self._kept.pop(row, ())) * self.block_tokens

    def end(self, row: SimRequest) -> None:
        """The row is over."""
        self._kept.pop(row, None)
        table = self._tables.pop(row)
        if table is not None:
            self._blocks.close(table)

    def secure(self, batch: Batch, make_room: Callable[[], None]) -> int:
        """Have blocks for the next steps of every row of the batch, the oldest first, if need be those of others; how
        many steps they are for."""
        batch.take_in()
        steps = min(batch.most_steps, self.block_tokens)
        wanted = self._wanted(batch, steps)
        if self.blocks_needed(wanted) > self.available:
            steps, wanted = 1, self._wanted(batch, 1)
        for row, tokens in wanted:
            while batch.has(row.row):
                try:
                    self._blocks.grow(self._held(row), tokens)
                    break
                except OutOfBlocks:
                    make_room()
        return steps

    def _wanted(self, batch: Batch, steps: int) -> list[tuple[SimRequest, int]]:
        """How many tokens each row of the batch will have so many steps on."""
        return [(row, batch.context_after(row.row, steps)) for row in self._tables if batch.has(row.row)]

    def _held(self, row: SimRequest) -> BlockTable:
        table = self._tables[row]
        assert table is not None, "it holds blocks"
        return table
