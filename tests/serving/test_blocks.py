"""Tests of the block manager: prefix hits, LRU eviction, and consistent accounting."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from runtime.serving.kv.blocks import BlockManager, BlockTable, OutOfBlocks

B = 4


def manager(blocks: int = 8) -> BlockManager:
    return BlockManager(blocks, B, b"a model")


def written(made: BlockManager, tokens: list[int]) -> BlockTable:
    """Return a sequence whose KV is marked as computed, as by a worker."""
    table = made.open(tokens)
    made.grow(table, len(tokens))
    made.fill(table, tokens, len(tokens))
    return table


def test_a_prefix_of_another_sequence_is_shared_in_whole_blocks() -> None:
    made = manager()
    first = written(made, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = made.open([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert second.blocks == first.blocks[:2]
    assert second.reused_tokens == 8
    third = made.open([1, 2, 3, 4, 5, 6, 7, 99])
    assert third.blocks == first.blocks[:1]
    assert made.hit_tokens == 12


def test_a_prefix_is_reused_after_its_sequence_has_ended() -> None:
    made = manager()
    first = written(made, [*range(8), 9])
    blocks = list(first.blocks)
    made.close(first)
    assert made.held == 0
    assert made.cached_tokens([*range(8), 7]) == 8
    assert made.open([*range(8), 7]).blocks == blocks[:2]
    assert made.held == 2


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    made = manager()
    written(made, [1, 2, 3, 4, 5, 6, 7, 8])
    assert made.cached_tokens([9, 9, 9, 9, 5, 6, 7, 8, 1]) == 0


def test_at_least_one_token_is_left_to_compute_unless_all_are_requested() -> None:
    made = manager()
    written(made, [1] * 8)
    assert made.cached_tokens([1] * 8) == 4
    assert made.cached_tokens([1] * 8, compute=0) == 8


def test_the_least_recently_used_prefix_is_evicted_first_from_its_end() -> None:
    made = manager(6)
    old, young = [1] * 8, [2] * 8
    made.close(written(made, old))
    made.close(written(made, young))
    made.close(made.open(old, compute=0))  # used again: now the other one is the least recently used
    table = made.open([])
    made.grow(table, 3 * B)
    assert made.evictions == 1
    assert made.cached_tokens(old, compute=0) == 8
    assert made.cached_tokens(young, compute=0) == 4


def test_without_room_nothing_is_allocated_and_the_error_has_both_numbers() -> None:
    made = manager(3)
    table = made.open([1] * 5)
    made.grow(table, 5)
    with pytest.raises(OutOfBlocks, match="2 KV blocks are needed, 1 are available"):
        made.grow(table, 13)
    assert len(table.blocks) == 2
    assert made.available == 1


class BlockMachine(RuleBasedStateMachine):
    """Sequences over few tokens open, grow, fill and close in any order; the test keeps its own accounts."""

    tables = Bundle("tables")
    BLOCKS = 10

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(self.BLOCKS, 2, b"m")
        self.live: dict[BlockTable, tuple[list[int], int]] = {}  # table → its tokens, number written
        self.content: dict[int, tuple[int, ...]] = {}  # block → all tokens up to its end, as last written

    @rule(target=tables, tokens=st.lists(st.integers(0, 1), max_size=12), compute=st.integers(0, 1))
    def open(self, tokens: list[int], compute: int) -> BlockTable:
        foreseen, available = self.manager.blocks_needed(tokens, compute), self.manager.available
        table = self.manager.open(tokens, compute)
        for number, block in enumerate(table.blocks):
            assert self.content[block] == tuple(tokens[: 2 * number + 2]), "a prefix hit holds exactly this prefix"
        assert table.reused_tokens <= max(0, len(tokens) - compute)
        self.live[table] = (tokens, table.reused_tokens)
        taken = available - self.manager.available
        assert foreseen == taken + self.manager.blocks_for(len(tokens)) - len(table.blocks)
        return table

    @rule(table=tables, more=st.lists(st.integers(0, 1), max_size=4))
    def grow(self, table: BlockTable, more: list[int]) -> None:
        if table not in self.live:
            return
        tokens, done = self.live[table]
        tokens = tokens + more
        wanted = self.manager.blocks_for(len(tokens)) - len(table.blocks)
        before, available = list(table.blocks), self.manager.available
        try:
            self.manager.grow(table, len(tokens))
        except OutOfBlocks:
            assert wanted > available
            assert table.blocks == before
            return
        assert wanted <= available
        assert len(table.blocks) >= self.manager.blocks_for(len(tokens)) == -(-len(tokens) // 2)
        held = {block for other in self.live if other is not table for block in other.blocks}
        assert not held & set(table.blocks[len(before) :]), "a block belongs to one table only"
        self.live[table] = (tokens, done)

    @rule(table=tables, share=st.floats(0, 1))
    def write(self, table: BlockTable, share: float) -> None:
        if table not in self.live:
            return
        tokens, done = self.live[table]
        written = done + int((min(len(tokens), 2 * len(table.blocks)) - done) * share)
        for position in range(done, written):
            block = table.blocks[position // 2]
            others = sum(block in other.blocks for other in self.live)
            assert others == 1, "a shared block is never written"
            if position % 2:
                self.content[block] = tuple(tokens[: position + 1])
        self.manager.fill(table, tokens, written)
        self.live[table] = (tokens, max(done, written))

    @rule(table=consumes(tables))
    def close(self, table: BlockTable) -> None:
        self.live.pop(table, None)
        self.manager.close(table)
        self.manager.close(table)

    @invariant()
    def the_books_balance(self) -> None:
        held = {block for table in self.live for block in table.blocks}
        assert self.manager.held == len(held), "blocks are neither leaked nor freed twice"
        assert self.manager.available == self.BLOCKS - len(held)
        assert 0 <= self.manager.hit_tokens <= self.manager.lookup_tokens

    def teardown(self) -> None:
        for table in list(self.live):
            self.manager.close(table)
        assert self.manager.held == 0
        assert self.manager.available == self.BLOCKS


BlockMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBlockMachine = BlockMachine.TestCase
