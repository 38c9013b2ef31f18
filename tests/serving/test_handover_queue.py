"""Tests of hand-overs in decode: admission and its order, pulls, early pulls, evictions, cancellations."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ipc import MemoryRefused, Offer
from runtime.serving.decode.handover_queue import HandoverQueue
from runtime.serving.kv.blocks import BlockManager
from runtime.serving.kv.tiers import Tiers
from runtime.serving.kv.transport import KvArray, Transfer
from runtime.serving.messages import Decode, Reserve, Sampling, encode
from tests.serving.test_tiers import TimedTier

EPOCH, MODEL, B = 5, b"model", 4
FOREVER = 1 << 62


class Sink:
    """Fake of decode's end of a hand-over: the test makes offers, and all answers are recorded."""

    def __init__(self, source: KvArray) -> None:
        self.source = source
        self.offers: list[Offer] = []
        self.answers: dict[int, str] = {}
        self.withdrawn: set[int] = set()
        self.transfer: type[Transfer] = Transfer
        self.has_written = 0
        self._number = 0

    def offer(self, request: Decode | Reserve, generation: int = 0) -> int:
        self._number += 1
        made = Offer(self._number, "p", "r", 1, 0, generation, None, encode(request))  # type: ignore[arg-type]
        self.offers.append(made)
        return self._number

    def receive(self) -> list[Offer]:
        taken, self.offers = self.offers, []
        return taken

    def pull(self, offer: Offer, taken: Sequence[int], kv: KvArray, given: Sequence[int]) -> Transfer:
        self.last = self.transfer(self.source, taken, kv, given)
        return self.last

    def written(self, offer: Offer) -> int:
        return self.has_written

    def is_current(self, offer: Offer) -> bool:
        return offer.offer_id not in self.withdrawn

    def acknowledge(self, offer: Offer) -> bool:
        self.answers[offer.offer_id] = "taken"
        return True

    def reject(self, offer: Offer, reason: str) -> bool:
        self.answers[offer.offer_id] = reason
        return True


class MemoryTier(TimedTier):
    """A tier in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[bytes, bytes] = {}

    def load(self, key: bytes, into: memoryview) -> bool:
        if key in self.kept:
            into[:] = self.contents[key]
        return key in self.kept

    def store(self, key: bytes, block: memoryview, *, hold: bool = False) -> bool:
        self.contents[key] = bytes(block)
        return super().store(key, block, hold=hold)


class QueueHarness:
    """A queue over 20 blocks of 4 tokens. With `pool`, prompts are handed over through `tier`."""

    def __init__(self, waiting_share: float = 0.5, *, pool: bool = False) -> None:
        random = np.random.default_rng(0)
        self.sink = Sink(random.normal(size=(2, 2, 30, 1, B, 2)).astype(np.float32))
        self.kv: KvArray = np.zeros((2, 2, 20, 1, B, 2), np.float32)
        self.blocks = BlockManager(20, B, MODEL)
        self.tier, self.pool = MemoryTier(), pool
        tiers = Tiers([self.tier] if pool else (), self.blocks, self.kv)
        self.handovers = HandoverQueue(self.sink, self.blocks, self.kv, tiers, MODEL, waiting_share=waiting_share)  # type: ignore[arg-type]

    def decode(self, name: str, tokens: Sequence[int], **more: Any) -> int:
        blocks = tuple(range(-(-len(tokens) // B)))
        made = Decode(name, EPOCH, Sampling(5), tuple(tokens), 1, None, (), {}, blocks, MODEL, len(tokens))
        if self.pool:
            made = replace(made, blocks=(), saved=True)
            for block, key in zip(blocks, self.blocks.row_keys(tokens, b""), strict=True):
                content = np.ascontiguousarray(self.sink.source[:, :, block : block + 1])
                self.tier.store(key, content.view(np.uint8).reshape(-1).data, hold=True)
        return self.sink.offer(replace(made, **more))

    def ahead(self, name: str, tokens: Sequence[int], *, deadline_ns: int = FOREVER, generation: int = 0) -> int:
        """Announce a prompt that prefill is computing."""
        blocks = tuple(range(-(-len(tokens) // B)))
        return self.sink.offer(Reserve(name, EPOCH, tuple(tokens), deadline_ns, blocks=blocks, model=MODEL), generation)

    def step(self, *, running: int = 0, waiting_blocks: int = 0, now_ns: int = 0, pull: bool = True) -> list[str]:
        """Run one round. Return the ids of completed hand-overs."""
        self.handovers.receive(EPOCH)
        self.handovers.admit(now_ns, running=running, waiting_blocks=waiting_blocks)
        return [request.request_id for request, _ in self.handovers.pull(None)] if pull else []


class SlowTransfer(Transfer):
    """A device copy that runs until the test, or a waiting caller, completes it."""

    writing = True

    @property
    def done(self) -> bool:
        return super().done and not self.writing

    @property
    def settled(self) -> bool:
        return not self.writing

    def settle(self) -> None:
        self.writing = False


class BrokenTransfer(Transfer):
    def step(self, *_: Any) -> bool:
        raise MemoryRefused("cuMemcpyDtoDAsync failed")


through = pytest.mark.parametrize("pool", [False, True], ids=["p2p", "pool"])


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


@through
def test_an_offer_is_pulled_into_its_own_blocks_and_acknowledged(pool: bool) -> None:
    harness = QueueHarness(pool=pool)
    number = harness.decode("a", tokens(0, 10))
    harness.handovers.receive(EPOCH)
    harness.handovers.admit(0, running=0, waiting_blocks=0)
    ((_, table),) = harness.handovers.pull(None)
    assert np.array_equal(harness.kv[:, :, table.blocks], harness.sink.source[:, :, :3])
    assert harness.sink.answers == {number: "taken"}
    assert harness.handovers.pulled_bytes == harness.kv[:, :, :3].nbytes


@through
def test_admission_stops_when_waiting_rows_have_their_share_of_the_blocks(pool: bool) -> None:
    harness = QueueHarness(waiting_share=0.5, pool=pool)
    for number in range(3):
        harness.decode(f"r{number}", tokens(100 * number, 20))
    assert harness.step(waiting_blocks=10) == []
    assert harness.step(waiting_blocks=9) == ["r0"]


@through
def test_one_block_per_running_row_stays_free(pool: bool) -> None:
    harness = QueueHarness(waiting_share=1.0, pool=pool)
    harness.decode("a", tokens(0, 64))
    assert harness.step(running=5) == []
    assert harness.step(running=4) == ["a"]


@through
def test_a_small_prompt_does_not_overtake_a_large_one_that_waits_for_room(pool: bool) -> None:
    harness = QueueHarness(waiting_share=1.0, pool=pool)
    held = harness.blocks.open([])
    harness.blocks.grow(held, 10 * B)
    harness.decode("large", tokens(0, 48))
    harness.decode("small", tokens(100, 4))
    assert harness.step() == []
    harness.blocks.close(held)
    assert harness.step() == ["large"]
    assert harness.step() == ["small"]


@through
def test_a_cached_prefix_is_not_pulled(pool: bool) -> None:
    harness = QueueHarness(pool=pool)
    harness.decode("a", tokens(0, 12))
    harness.step()
    before = harness.handovers.pulled_bytes
    harness.decode("b", [*tokens(0, 12), 50, 51])
    assert harness.step() == ["b"]
    assert harness.handovers.pulled_bytes - before == harness.kv[:, :, :1].nbytes


def test_an_evicted_hand_over_releases_its_blocks_and_waits_again() -> None:
    harness = QueueHarness(waiting_share=1.0)
    harness.decode("a", tokens(0, 16))
    harness.step(pull=False)
    harness.ahead("b", tokens(100, 16))
    harness.step(pull=False)
    assert harness.blocks.held == 8
    assert harness.handovers.evict_latest()
    assert harness.handovers.evict_latest()
    assert not harness.handovers.evict_latest()
    assert harness.blocks.held == 0
    assert harness.step() == ["a"]
    harness.decode("b", tokens(100, 16))
    assert harness.step() == ["b"], "it is an ordinary offer"


def test_a_saved_prompt_waits_again_after_its_eviction_whatever_becomes_of_prefill() -> None:
    harness = QueueHarness(waiting_share=1.0, pool=True)
    number = harness.decode("a", tokens(0, 10))
    harness.step(pull=False)
    assert harness.handovers.taken == ["a"]
    assert harness.sink.answers == {number: "taken"}, "when it arrives"
    harness.sink.withdrawn.add(number)
    assert harness.handovers.evict_latest()
    assert (harness.blocks.held, len(harness.tier.held)) == (0, 3)
    assert harness.step() == ["a"]
    assert harness.tier.held == set()
    assert len(harness.tier.kept) == 2, "its partial block is removed"


def test_what_the_pool_has_lost_is_computed() -> None:
    harness = QueueHarness(pool=True)
    harness.decode("a", tokens(0, 10))
    harness.tier.drop(harness.blocks.row_keys(tokens(0, 10), b"")[1])
    harness.handovers.receive(EPOCH)
    harness.handovers.admit(0, running=0, waiting_blocks=0)
    ((_, table),) = harness.handovers.pull(None)
    assert table.reused_tokens == B


@pytest.mark.parametrize("when", ["before it has room", "while it is loaded", "with its frontend"])
def test_a_cancelled_prompt_is_not_held_in_the_pool(when: str) -> None:
    harness = QueueHarness(pool=True)
    harness.decode("a", tokens(0, 10))
    harness.step(pull=False, waiting_blocks=20 if when == "before it has room" else 0)
    if when == "with its frontend":
        harness.handovers.clear()
    else:
        harness.handovers.cancel("a")
    assert (len(harness.handovers), harness.blocks.held, harness.tier.held) == (0, 0, set())
    assert harness.step() == []


@pytest.mark.parametrize("early", [False, True])
def test_an_offer_that_arrives_after_its_cancellation_is_rejected(early: bool) -> None:
    harness = QueueHarness()
    harness.handovers.cancel("a")
    number = harness.ahead("a", tokens(0, 8)) if early else harness.decode("a", tokens(0, 8))
    assert harness.step() == []
    assert harness.sink.answers == {number: "cancelled"}
    assert (len(harness.handovers), harness.blocks.held) == (0, 0)


def test_a_withdrawn_offer_is_dropped_before_and_after_its_copy() -> None:
    harness = QueueHarness(waiting_share=1.0)
    first, second = harness.decode("a", tokens(0, 8)), harness.decode("b", tokens(50, 8))
    harness.sink.withdrawn.add(first)
    harness.step(pull=False)
    assert harness.blocks.held == 2
    assert harness.sink.answers == {first: "prefill has withdrawn its KV"}, "nothing stays open"
    harness.sink.withdrawn.add(second)
    assert harness.step() == []
    assert (len(harness.handovers), harness.blocks.held) == (0, 0)


def test_offers_of_another_frontend_or_model_are_rejected() -> None:
    harness = QueueHarness()
    old, foreign = harness.decode("a", [1], frontend_epoch=4), harness.decode("b", [1], model=b"another")
    assert harness.step() == []
    assert harness.sink.answers[old] == "its frontend (epoch 4) is gone"
    assert "another model" in harness.sink.answers[foreign]


def test_an_unfinished_device_copy_blocks_neither_the_queue_nor_the_batch() -> None:
    harness = QueueHarness()
    harness.sink.transfer = SlowTransfer
    harness.decode("a", tokens(0, 8))
    assert harness.step() == []
    assert harness.handovers.pulling
    harness.sink.last.settle()
    assert harness.step() == ["a"]


@pytest.mark.parametrize("cause", ["cancelled", "another frontend"])
def test_blocks_are_not_freed_while_a_device_writes_to_them(cause: str) -> None:
    harness = QueueHarness()
    harness.sink.transfer = SlowTransfer
    number = harness.decode("a", tokens(0, 8))
    harness.step()
    if cause == "cancelled":
        harness.handovers.cancel("a")
    else:
        harness.handovers.clear()
    assert number in harness.sink.answers
    assert (harness.blocks.held, len(harness.handovers)) == (2, 1), "they are held, and the worker is not idle"
    harness.sink.last.settle()
    harness.step()
    assert (harness.blocks.held, len(harness.handovers)) == (0, 0)


def test_a_failed_copy_is_rejected_with_the_reason_and_the_next_one_continues() -> None:
    harness = QueueHarness(waiting_share=1.0)
    harness.sink.transfer = BrokenTransfer
    failed = harness.decode("a", tokens(0, 8))
    harness.step(pull=False)
    harness.sink.transfer = Transfer
    harness.decode("b", tokens(50, 8))
    assert harness.step() == ["b"]
    assert harness.sink.answers[failed] == "cuMemcpyDtoDAsync failed"


def test_early_pulls_copy_finished_blocks_while_the_rest_is_computed() -> None:
    harness = QueueHarness()
    ahead = harness.ahead("a", tokens(0, 22))
    for written, blocks in ((0, 0), (9, 2), (11, 2), (20, 5), (22, 5)):
        harness.sink.has_written = written
        assert harness.step() == []
        assert harness.handovers.pulled_bytes == harness.kv[:, :, :blocks].nbytes, "whole blocks, each once"
        assert not harness.handovers.pulling
    assert harness.sink.answers == {}, "nothing is admitted before it is complete"
    number = harness.decode("a", tokens(0, 22))
    harness.handovers.receive(EPOCH)
    harness.handovers.admit(0, running=0, waiting_blocks=0)
    ((_, table),) = harness.handovers.pull(None)
    assert harness.sink.answers == {ahead: "taken", number: "taken"}
    assert np.array_equal(harness.kv[:, :, table.blocks], harness.sink.source[:, :, :6])
    assert harness.handovers.pulled_bytes == harness.kv[:, :, :6].nbytes
    assert len(harness.handovers) == 0


def test_data_pulled_from_a_previous_generation_of_the_slot_is_pulled_again() -> None:
    harness = QueueHarness()
    harness.ahead("a", tokens(0, 16), generation=3)
    harness.sink.has_written = 12
    harness.step()
    harness.sink.source[:] = 7.0
    made = Decode("a", EPOCH, Sampling(5), tuple(tokens(0, 16)), 1, None, (), {}, (0, 1, 2, 3), MODEL, 16)
    harness.sink.offer(made, generation=4)
    harness.handovers.receive(EPOCH)
    ((_, table),) = harness.handovers.pull(None)
    assert (harness.kv[:, :, table.blocks] == 7.0).all()


def test_early_pulls_yield_blocks_to_complete_prompts_and_rows() -> None:
    harness = QueueHarness(waiting_share=1.0)
    ahead = harness.ahead("long", tokens(0, 60))
    harness.sink.has_written = 30
    harness.step()
    assert harness.blocks.held == 15
    harness.decode("whole", tokens(100, 32))
    assert harness.step() == ["whole"]
    assert ahead in harness.sink.answers
    harness.ahead("other", tokens(200, 16))
    harness.step()
    held = harness.blocks.held
    assert harness.handovers.evict_latest()
    assert harness.blocks.held == held - 4
    harness.decode("other", tokens(200, 16))
    assert harness.step() == ["other"], "it is an ordinary offer"


@pytest.mark.parametrize("cause", ["cancelled", "another frontend", "withdrawn", "late", "a broken copy"])
def test_a_prompt_that_ends_without_an_offer_holds_no_blocks(cause: str) -> None:
    harness = QueueHarness()
    number = harness.ahead("a", tokens(0, 16), deadline_ns=100)
    harness.step()
    assert harness.blocks.held == 4
    if cause == "cancelled":
        harness.handovers.cancel("a")
    elif cause == "another frontend":
        harness.handovers.clear()
    elif cause == "withdrawn":
        harness.sink.withdrawn.add(number)
    elif cause == "a broken copy":
        harness.sink.transfer, harness.sink.has_written = BrokenTransfer, 8
    harness.step(now_ns=100 if cause == "late" else 0)
    assert (harness.blocks.held, len(harness.handovers)) == (0, 0)
    assert harness.sink.answers[number] == "taken", "nothing stays open"
