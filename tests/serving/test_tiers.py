"""Tests of KV tiers: blocks outlive their worker, are loaded intact or not at all, and stay within the size limit."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model needs the extra [llm]")

import torch

from runtime.errors import ConfigError
from runtime.node.metrics.worker_metrics import DecodeMetrics, PrefillMetrics
from runtime.serving.kv.blocks import BlockManager
from runtime.serving.kv.file_tier import FileTier
from runtime.serving.kv.tiers import Tiers
from runtime.testing.reference import Reference
from tests.serving.replays import Operations
from tests.serving.workers import Workers

SIZE = 4096
FILE = SIZE + 40
Opens = Callable[..., FileTier]


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SIZE)


@pytest.fixture
def opens(tmp_path: Path) -> Iterator[Opens]:
    opened: list[FileTier] = []

    def opening(limit: int = 64 * FILE, writers: int = 1, directory: str = "kv") -> FileTier:
        opened.append(FileTier("host", tmp_path / directory, limit, SIZE, writers))
        return opened[-1]

    yield opening
    for tier in opened:
        tier.close()


def read(tier: FileTier, number: int) -> bytes | None:
    into = bytearray(SIZE)
    return bytes(into) if tier.load(key(number), memoryview(into)) else None


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_blocks_of_both_types_round_trip(tmp_path: Path, kind: str) -> None:
    kv = torch.randn(2, 2, 3, 2, 8, 16).to(getattr(torch, kind))
    tier = FileTier("host", tmp_path / "kv", 1 << 20, kv.nbytes // 3, 1)
    blocks = BlockManager(3, 8, b"model")
    tiers, table, tokens = Tiers([tier], blocks, kv), blocks.open(range(8)), range(8)
    blocks.grow(table, 8)
    blocks.fill(table, tokens, 8)
    with Operations() as operations:
        assert tiers.write()
        assert operations.names["copy_"] == 1, "all layers at once"
        stored = kv[:, :, table.blocks[0]].clone()
        kv.zero_()
        assert tiers.load_block(next(blocks.keys(range(9))), 1)
        assert operations.names["copy_"] == 2
    assert torch.equal(kv[:, :, 1], stored)
    assert not kv[:, :, [0, 2]].any()
    tiers.close()


def _flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _elsewhere(file: Path) -> None:
    file.rename(file.parent.parent / "moved")
    file.symlink_to(file.parent.parent / "moved")


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("damage", "counted"),
    [
        (_flipped, 1),
        (lambda file: os.truncate(file, 100), 1),
        (lambda file: os.truncate(file, 0), 1),
        (lambda file: file.write_bytes((file.parent / key(2).hex()).read_bytes()), 1),
        (_pipe, 1),
        (_elsewhere, 0),  # links are not followed
    ],
    ids=["a bit flipped", "cut short", "empty", "another block's", "a pipe", "a link"],
)
def test_a_damaged_or_foreign_file_is_a_miss_and_can_be_replaced(
    opens: Opens, tmp_path: Path, damage: Callable[[Path], Any], counted: int
) -> None:
    tier = opens()
    for number in (1, 2):
        tier.store(key(number), memoryview(block(number)))
    damage(tmp_path / "kv" / key(1).hex())
    assert read(tier, 1) is None
    assert tier.counts["damaged"] == counted
    if counted:
        tier.store(key(1), memoryview(block(1)))
        assert read(tier, 1) == block(1)
    assert read(tier, 2) == block(2)


def test_two_writers_stay_within_the_limit_and_evict_the_least_recently_used(opens: Opens, tmp_path: Path) -> None:
    tiers = [opens(limit=64 * FILE, writers=2) for _ in range(2)]
    for number in range(400):
        tiers[number % 3 % 2].store(key(number), memoryview(block(number)))
        for file in (tmp_path / "kv").iterdir():  # distinct times even with a coarse file system clock
            if file.name == key(number).hex():
                os.utime(file, ns=(number, number))
        if number >= 5:
            assert read(tiers[0], 5) == block(5), "used blocks stay"
        assert sum(file.stat().st_size for file in (tmp_path / "kv").iterdir()) <= 64 * FILE
    left = {int(file.name, 16) for file in (tmp_path / "kv").iterdir()}
    assert len(left) > 40
    assert min(left - {5}) > 300
    assert tiers[0].counts["evicted"] + tiers[1].counts["evicted"] == 400 - len(left)


def test_a_full_disk_evicts_the_oldest_blocks_without_an_error(
    opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opens()
    for number in range(20):
        tier.store(key(number), memoryview(block(number)))

    def full(fd: int, buffers: Any) -> int:
        os.write(fd, b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.writev", full)
        tier.store(key(20), memoryview(block(20)))
        tier.store(key(21), memoryview(block(21)))
    assert tier.counts["failed"] == 2
    assert caplog.text.count("No space left on device") == 1, "logged once"
    assert tier.counts["evicted"] > 0
    assert {file.stat().st_size for file in (tmp_path / "kv").iterdir()} == {FILE}, "no partial file is left"
    tier.store(key(20), memoryview(block(20)))
    assert read(tier, 20) == block(20)


def test_a_tier_too_small_for_its_workers_is_disabled(opens: Opens, caplog: pytest.LogCaptureFixture) -> None:
    tier = opens(limit=2 * FILE, writers=2)
    tier.store(key(1), memoryview(block(1)))
    assert not tier.has(key(1))
    assert "too few for blocks of 4096" in caplog.text


def test_a_directory_readable_by_others_is_rejected(opens: Opens, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ConfigError, match=r"has mode 755 .* mode 700"):
        opens(directory="open")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the host KV tier cannot use"):
        opens(directory="file")


def test_a_used_block_of_the_disk_tier_is_promoted_to_the_host_tier(tmp_path: Path) -> None:
    kv = np.random.default_rng(0).normal(size=(2, 2, 8, 1, 4, 64)).astype(np.float32)
    before = kv.copy()
    host, disk = (FileTier("host", tmp_path / name, 1 << 20, kv[:, :, 0].nbytes, 1) for name in ("host", "disk"))
    blocks = BlockManager(8, 4, b"a model")
    tiers = Tiers((host, disk), blocks, kv)
    table = blocks.open(range(9))
    blocks.grow(table, 9)
    blocks.fill(table, range(9), 9)
    while tiers.write():
        pass
    assert (host.counts["stored"], disk.counts["stored"]) == (2, 2)
    for file in (tmp_path / "host").iterdir():
        file.unlink()
    kv[:] = 0
    other = BlockManager(8, 4, b"a model")
    tiers = Tiers((host, disk), other, kv)
    assert tiers.cached_tokens(range(9)) == 8
    table = other.open(range(9))
    other.grow(table, 9)
    load = tiers.load(table, range(9))
    assert load is not None
    assert not load.step(0), "one block, because there is no time for more"
    assert load.step(0)
    assert table.reused_tokens == 8
    assert np.array_equal(kv[:, :, table.blocks[:2]], before[:, :, [0, 1]])
    assert (disk.counts["loaded"], host.counts["stored"]) == (2, 4)
    for tier in (host, disk):
        tier.close()


KV = np.zeros((1, 2, 8, 1, 4, 1), np.float32)


class TimedTier(FileTier):
    """A tier that stores only blocks' names, or has every block; a write takes 5 ms, a read 4 ms."""

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.name, self.used_bytes, self.held_bytes = full, "host", 0, 0
        self.now_ns, self.kept, self.held = 0, set[bytes](), set[bytes]()
        self.counts: dict[str, int] = {}

    def clock(self) -> int:
        return self.now_ns

    def has(self, key: bytes) -> bool:
        return self.full or key in self.kept

    def load(self, key: bytes, into: memoryview) -> bool:
        self.now_ns += 4_000_000
        return self.has(key)

    def store(self, key: bytes, block: memoryview, *, hold: bool = False) -> bool:
        self.now_ns += 5_000_000
        self.kept.add(key)
        return not hold or self.hold(key)

    def may_hold(self, blocks: int) -> bool:
        return True

    def hold(self, key: bytes) -> bool:
        self.held |= self.kept & {key}
        return key in self.kept

    def release(self, key: bytes) -> None:
        self.held.discard(key)

    def drop(self, key: bytes) -> None:
        self.kept.discard(key)
        self.held.discard(key)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("compute_ms", "loaded"), [(5, [*range(40)]), (3, [0, 16, 27, 38])])
def test_blocks_that_are_computed_faster_are_not_loaded_except_for_occasional_probes(
    compute_ms: int, loaded: list[int]
) -> None:
    """A load takes 4 ms; the estimate decays by a fiftieth with each prompt that is computed instead."""
    tier, blocks = TimedTier(full=True), BlockManager(8, 4, b"a model")
    tiers = Tiers((tier,), blocks, KV, tier.clock)
    found = []
    for number in range(40):
        prompt = [number] * 33
        tokens = tiers.cached_tokens(prompt)
        table = blocks.open(prompt)
        blocks.grow(table, 32)
        load = tiers.load(table, prompt)
        assert (load is None) == (tokens == 0)
        if load is not None:
            load.step()
            found.append(number)
        tiers.record_compute(8, compute_ms * 2_000_000)
        blocks.close(table)
    assert found == loaded


# ---- workers


@pytest.fixture
def start(tiny_directory: Path, tmp_path: Path) -> Iterator[Callable[..., Workers]]:
    """Return a factory of workers of one node or, with its files, of the restarted node."""
    started: list[Workers] = []

    def starting(**options: Any) -> Workers:
        sections: dict[str, Any] = {"kv": {"host_mib": 64}, "node": {"run_dir": str(tmp_path)}} | options
        started.append(Workers(tiny_directory, **sections))
        return started[-1]

    yield starting
    for workers in started:
        workers.close()


PROMPT = list(range(3, 203))


def answer(workers: Workers, name: str, prompt: list[int], **more: Any) -> list[int]:
    workers.submit(name, prompt, 20, **more)
    workers.run()
    for _ in range(100):  # idle: blocks that are not in a tier yet are written
        workers.round()
    return workers.outputs[name].tokens


@pytest.mark.parametrize("disaggregate", ["always", "never"])
def test_after_a_restart_a_prefix_is_loaded_instead_of_computed(
    start: Callable[..., Workers], reference: Reference, disaggregate: str
) -> None:
    by, loaded = (
        ("prefill-0", PrefillMetrics.TIER_LOADED)
        if disaggregate == "always"
        else ("decode-0", DecodeMetrics.TIER_LOADED)
    )
    expected = reference.generate(PROMPT, 20)
    first = start(handover={"disaggregate": disaggregate})
    assert answer(first, "a", PROMPT) == expected
    assert first.metric(by, loaded["host"]) == 0
    first.close()
    again = start(handover={"disaggregate": disaggregate})
    assert answer(again, "b", PROMPT) == expected
    assert again.metric(by, loaded["host"]) == 24, "of 200 tokens, in blocks of 8, all but the block of the last one"
    longer = [*PROMPT, *expected, 7, 8, 9]
    assert answer(again, "c", longer) == reference.generate(longer, 20)
    again.close()
    turn = start(handover={"disaggregate": disaggregate})
    assert answer(turn, "d", longer) == reference.generate(longer, 20)
    assert turn.metric(by, loaded["host"]) == 27, "the previous answer is found too"


@pytest.mark.parametrize("disaggregate", ["always", "never"])
def test_answers_equal_generate_despite_damaged_files(
    start: Callable[..., Workers], reference: Reference, tmp_path: Path, disaggregate: str
) -> None:
    expected = reference.generate(PROMPT, 20)
    first = start(handover={"disaggregate": disaggregate})
    assert answer(first, "a", PROMPT) == expected
    first.close()
    for number, file in enumerate(sorted((tmp_path / "kv").iterdir())):
        if number % 3:
            _flipped(file)
    again = start(handover={"disaggregate": disaggregate})
    assert answer(again, "b", PROMPT) == expected
    by, damaged = ("prefill-0", PrefillMetrics.TIER_DAMAGED)
    if disaggregate == "never":
        by, damaged = ("decode-0", DecodeMetrics.TIER_DAMAGED)
    assert again.metric(by, damaged["host"]) == 1, "loading ends there; the computed block replaces it"


def test_prompts_with_another_salt_share_nothing(start: Callable[..., Workers], reference: Reference) -> None:
    workers = start(handover={"disaggregate": "always"})
    expected = reference.generate(PROMPT, 20)
    for number, salt in enumerate((b"", b"one", b"two")):
        assert answer(workers, f"r{number}", PROMPT, salt=salt) == expected
    for name, metrics in (("prefill-0", PrefillMetrics), ("decode-0", DecodeMetrics)):
        assert workers.metric(name, metrics.PREFIX_HIT_TOKENS) == 0
        assert workers.metric(name, metrics.TIER_LOADED["host"]) == 0
    assert answer(workers, "again", PROMPT, salt=b"two") == expected
    assert workers.metric("prefill-0", PrefillMetrics.PREFIX_HIT_TOKENS) == 192
