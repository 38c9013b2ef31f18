"""The KV blocks of a simulated decode worker's rows, held by production's block manager (no prefix is shared)."""

from collections.abc import Iterator, Sequence

from runtime.serving.kv.blocks import BlockManager, BlockTable
from runtime.simulator.stages.request import SimRequest


class KvRows:
    """Rows in the order in which they came. A row that has made room for others has no blocks, and keeps its place."""

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
        """Whether a row of `tokens` tokens can come, with one block left for each running row (as `decode.bridge`)."""
        return self._blocks.blocks_for(tokens) + running <= self.available

    def missing(self, wanted: Sequence[tuple[SimRequest, int]]) -> int:
        """Blocks to take until each of these rows holds so many tokens."""
        return sum(self._blocks.blocks_for(tokens) - len(self._held(row).blocks) for row, tokens in wanted)

    def holds(self, row: SimRequest) -> bool:
        return self._tables[row] is not None

    def take(self, row: SimRequest, tokens: int) -> None:
        """Blocks for a row that has none, a new one or one that comes back. Raises `OutOfBlocks`."""
        table = BlockTable()
        self._blocks.grow(table, tokens)
        self._tables[row] = table

    def grow(self, row: SimRequest, tokens: int) -> None:
        """Raises `OutOfBlocks`."""
        self._blocks.grow(self._held(row), tokens)

    def youngest(self) -> SimRequest:
        """The row that makes room next."""
        return next(row for row in reversed(self._tables) if self._tables[row] is not None)

    def give_up(self, row: SimRequest) -> None:
        """The row makes room."""
        self._blocks.close(self._held(row))
        self._tables[row] = None

    def end(self, row: SimRequest) -> None:
        """The row is over."""
        table = self._tables.pop(row)
        if table is not None:
            self._blocks.close(table)

    def _held(self, row: SimRequest) -> BlockTable:
        table = self._tables[row]
        assert table is not None, "it holds blocks"
        return table
