"""Tests of preempted rows: each is written to a tier whole, and held there until it returns, or is recomputed."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model needs the extra [llm]")

from runtime.node.metrics.worker_metrics import DecodeMetrics
from runtime.serving.decode.batch import Batch, Row
from runtime.serving.decode.handover_queue import HandoverQueue
from runtime.serving.kv.blocks import BlockManager
from runtime.serving.kv.file_tier import FileTier
from runtime.serving.kv.tiers import SavedRow, Tiers
from runtime.serving.messages import Decode, Sampling
from runtime.serving.model.model_info import ModelInfo
from runtime.testing.reference import Reference
from tests.serving.test_tiers import KV, TimedTier
from tests.serving.workers import Start

SIZE, BLOCKS = 8, 16
FILE = 2 * 2 * 1 * SIZE * 16 * 4 + 40
TOKENS = list(range(100))


class Memory:
    """A worker's KV blocks and its tier, which holds `files` blocks for `writers` workers."""

    def __init__(self, directory: Path, files: int = 64, writers: int = 1) -> None:
        self.blocks = BlockManager(BLOCKS, SIZE, b"a model")
        self.kv = np.random.default_rng(0).normal(size=(2, 2, BLOCKS, 1, SIZE, 16)).astype(np.float32)
        self.tier = FileTier("host", directory, files * FILE, FILE - 40, writers)
        self.tiers = Tiers((self.tier,), self.blocks, self.kv)

    def save(self, tokens: list[int]) -> tuple[SavedRow | None, list[int]]:
        """Write out a row of these tokens. Return it, and its blocks, which are free again."""
        table = self.blocks.open(tokens)
        self.blocks.grow(table, len(tokens))
        keys, blocks = self.blocks.row_keys(tokens, b""), list(table.blocks)
        saved = self.tiers.save(keys, blocks)
        self.blocks.close(table, save=False)
        return SavedRow(keys, len(tokens)) if saved else None, blocks


@pytest.fixture
def opens(tmp_path: Path) -> Iterator[Callable[..., Memory]]:
    opened: list[Memory] = []

    def opening(**options: Any) -> Memory:
        opened.append(Memory(tmp_path / "kv", **options))
        return opened[-1]

    yield opening
    for memory in opened:
        memory.tier.close()


def test_a_row_is_written_whole_with_its_partial_block_and_restored_by_any_worker(
    opens: Callable[..., Memory], tmp_path: Path
) -> None:
    memory, other = opens(), opens()
    row, blocks = memory.save(TOKENS[:19])
    assert row is not None
    assert memory.tier.held_bytes == 3 * FILE
    other.kv[:] = 0
    table = other.blocks.open(TOKENS[:20])
    other.blocks.grow(table, 20)
    assert other.tiers.restore(row, table, TOKENS[:20]).step()
    assert table.reused_tokens == 19
    assert np.array_equal(other.kv[:, :, table.blocks], memory.kv[:, :, blocks])
    other.tiers.release(row)
    assert other.blocks.cached_tokens(TOKENS) == 16, "others find its full blocks"
    assert {file.name for file in (tmp_path / "kv").iterdir()} == {key.hex() for key in row.keys[:2]}


def test_a_write_that_fails_leaves_nothing_of_the_row_behind(
    opens: Callable[..., Memory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = opens()
    before, _ = memory.save(TOKENS[:16])
    assert before is not None
    memory.tiers.release(before)
    left, write = [2], os.writev

    def full(fd: int, buffers: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, buffers)

    monkeypatch.setattr("os.writev", full)
    assert memory.save(TOKENS[:44])[0] is None
    assert left == [-1], "two blocks were there, two were written"
    files = {file.name for file in (tmp_path / "kv").iterdir()}
    assert files <= {key.hex() for key in before.keys}
    assert memory.tier.held_bytes == 0


def test_held_rows_take_half_of_a_tier_and_are_not_evicted(opens: Callable[..., Memory], tmp_path: Path) -> None:
    memory, other = opens(files=80, writers=2), opens(files=80, writers=2)
    rows: list[SavedRow] = []
    while (row := memory.save([len(rows), *TOKENS[:15]])[0]) is not None:
        rows.append(row)
    assert len(rows) == 15, "of two blocks each: half of the 60 blocks that a scan keeps"
    assert other.save([99, *TOKENS[:15]])[0] is None, "those of other workers count"
    block = memoryview(bytes(FILE - 40))
    for number in range(200):
        other.tier.store(number.to_bytes(16, "big"), block)
        assert sum(file.stat().st_size for file in (tmp_path / "kv").iterdir()) <= 80 * FILE
    assert all(memory.tier.has(key) for row in rows for key in row.keys)
    memory.tiers.release(rows.pop())
    assert memory.save([99, *TOKENS[:15]])[0] is not None


def test_what_a_dead_worker_held_is_evicted_when_the_hold_is_over(opens: Callable[..., Memory], tmp_path: Path) -> None:
    dead, other = opens(), opens()
    row, _ = dead.save(TOKENS[:19])
    assert row is not None
    for key in row.keys:
        os.utime(tmp_path / "kv" / key.hex(), (1, 1))
    for number in range(64):
        other.tier.store(number.to_bytes(16, "big"), memoryview(bytes(FILE - 40)))
    assert not any(other.tier.has(key) for key in row.keys)
    assert other.tier.held_bytes == 0


class Rows:
    """A batch of rows of 16 tokens, in blocks of eight, and a tier that writes a block in 5 ms and reads one in 4."""

    def __init__(self, compute_ms: int, blocks: int = 4) -> None:
        self.tier, self.blocks = TimedTier(), BlockManager(blocks, SIZE, b"a model")
        self.tiers = Tiers((self.tier,), self.blocks, KV, self.tier.clock)
        self.tiers.record_compute(SIZE, compute_ms * 1_000_000)
        self.batch = Batch(4, self.blocks, self.tiers, cast("HandoverQueue", NoHandovers()))
        self.order: list[str] = []

    def add(self, name: str, first: int) -> Row:
        tokens = [first, *range(14)]
        request = Decode(name, 1, Sampling(100), tuple(tokens), 1, None, (), {}, (0,), b"", len(tokens))
        table = self.blocks.open(tokens)
        self.blocks.grow(table, len(tokens))
        row = Row(request, [*tokens, 1], 15, cast("Any", None), cast("Any", None), table, 1, 0)
        self.batch.join(row)
        return row

    def step(self) -> list[str]:
        """Run a step of all running rows, each of which gets a token. Return their names."""
        self.batch.load(None)
        self.batch.admit()
        for row, chunk in (ran := self.batch.chunks(100)):
            self.batch.record_computed(row, chunk.start + len(chunk.tokens))
            row.context.append(1)
        return [row.id for row, _ in ran]


class NoHandovers:
    def evict_latest(self) -> bool:
        return False


def test_the_youngest_row_is_preempted_first_and_the_oldest_returns_first() -> None:
    rows = Rows(compute_ms=100, blocks=6)
    a, b, c = (rows.add(name, number) for number, name in enumerate("abc"))
    assert rows.step() == ["a", "b", "c"]
    assert rows.step() == ["a", "b"], "two rows take the blocks of the third"
    assert [row.id for row in rows.batch.preempted] == ["c"]
    while b.table is not None:
        rows.step()
    assert [row.id for row in rows.batch.preempted] == ["b", "c"]
    assert (b.saved, c.saved) != (None, None)
    assert len(rows.tier.held) == len(b.saved.keys) + len(c.saved.keys)  # type: ignore[union-attr]
    rows.batch.remove(a)
    rows.step()
    assert [row.id for row in rows.batch.preempted] == ["c"], "the younger, smaller one does not overtake"
    assert b.cached == len(b.context) - 1 or b.loading is not None
    rows.batch.remove(c)
    rows.step()
    assert (b.saved, c.saved, rows.tier.held) == (None, None, set()), "one was loaded, the other has ended"


@pytest.mark.parametrize(("compute_ms", "swapped"), [(10, True), (8, False)])
def test_a_row_is_swapped_if_two_copies_are_faster_than_computing_it(compute_ms: int, swapped: bool) -> None:
    rows = Rows(compute_ms)
    for number in range(3):  # the first one measures the copies
        first, second = rows.add("first", 2 * number), rows.add("second", 2 * number + 1)
        rows.step()
        rows.step()
        assert (second.saved is not None) == (swapped or number == 0)
        rows.batch.remove(first)
        computed: list[tuple[int, int]] = []
        while not computed:
            rows.batch.load(None)
            rows.batch.admit()
            computed = [(chunk.start, len(chunk.tokens)) for _, chunk in rows.batch.chunks(100)]
        assert computed == [(16, 1) if swapped or number == 0 else (8, 9)], "its first block was not evicted"
        rows.batch.remove(second)
    assert rows.batch.swapped == (3 if swapped else 1)


def test_what_the_tier_has_already_is_not_written_again() -> None:
    rows = Rows(compute_ms=100)
    first, second = rows.add("first", 0), rows.add("second", 1)
    rows.step()
    while rows.tiers.write():
        pass
    before_ns = rows.tier.now_ns
    rows.step()
    assert second.saved is not None
    assert rows.tier.now_ns == before_ns, "its two full blocks were written through"
    rows.batch.remove(first)


@pytest.mark.parametrize("tier", ["ample", "full", "failing"])
def test_tokens_after_a_swap_equal_those_without_whatever_happens_to_the_tier(
    start: Start,
    reference: Reference,
    tiny_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tier: str,
) -> None:
    monkeypatch.setattr(Tiers, "swap_out", Tiers.save)  # whatever this machine measures
    workers = start(
        node={"run_dir": str(tmp_path)},
        kv={"host_mib": 1 if tier == "full" else 64},
        context=320,
        prefill={"slots": 3, "kv_blocks": 60},
        decode={"slots": 3, "kv_blocks": 44},
        waiting_share=0.9,
    )
    if tier == "failing":

        def fail(fd: int, buffers: Any) -> int:
            os.write(fd, b"half")
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr("os.writev", fail)
    block = bytes(ModelInfo.read(tiny_directory).kv_bytes(1, 8, "float32"))
    others = FileTier("host", tmp_path / "kv", 1 << 20, len(block), 16)
    while tier == "full" and others.may_hold(1):  # rows of other workers
        assert others.store(os.urandom(16), memoryview(block), hold=True)
    prompts = [[number, *TOKENS] for number in range(3)]  # with 40 more tokens each: more than 44 blocks
    for number, prompt in enumerate(prompts):
        workers.submit(f"r{number}", prompt, 40)
    workers.offer("r0", "r1", "r2")
    workers.run()
    assert [workers.outputs[f"r{number}"].tokens for number in range(3)] == [
        reference.generate(prompt, 40) for prompt in prompts
    ]
    preempted, swapped = (
        workers.metric("decode-0", metric) for metric in (DecodeMetrics.PREEMPTIONS, DecodeMetrics.SWAPPED)
    )
    assert preempted > 0
    assert (swapped > 0) == (tier == "ample")
    if tier != "full":
        assert workers.metric("decode-0", DecodeMetrics.TIER_HELD["host"]) == 0
    assert not [file for file in (tmp_path / "kv").iterdir() if file.name.startswith(".")]
    workers.assert_nothing_held()
    others.close()
