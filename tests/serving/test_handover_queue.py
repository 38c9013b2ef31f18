"""Hand-overs in decode: admission and its order, pulls, early pulls, evictions, cancellations."""

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

EPOCH, MODEL, B = 5, b"model", 4
FOREVER = 1 << 62


class Sink:
    """Decode's end of a hand-over, played: offers come from the test, and all that is answered is kept."""

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


class Stand:
    """A queue over 20 blocks of 4 tokens."""

    def __init__(self, waiting_share: float = 0.5) -> None:
        random = np.random.default_rng(0)
        self.sink = Sink(random.normal(size=(2, 2, 30, 1, B, 2)).astype(np.float32))
        self.kv: KvArray = np.zeros((2, 2, 20, 1, B, 2), np.float32)
        self.blocks = BlockManager(20, B, MODEL)
        tiers = Tiers((), self.blocks, self.kv)
        self.handovers = HandoverQueue(self.sink, self.blocks, self.kv, tiers, MODEL, waiting_share=waiting_share)  # type: ignore[arg-type]

    def decode(self, name: str, tokens: Sequence[int], **more: Any) -> int:
        blocks = tuple(range(-(-len(tokens) // B)))
        made = Decode(name, EPOCH, Sampling(5), tuple(tokens), 1, None, (), {}, blocks, MODEL, len(tokens))
        return self.sink.offer(replace(made, **more))

    def reserve(self, name: str, tokens: Sequence[int], deadline_ns: int = FOREVER) -> int:
        return self.sink.offer(Reserve(name, EPOCH, tuple(tokens), deadline_ns))

    def ahead(self, name: str, tokens: Sequence[int], *, deadline_ns: int = FOREVER, generation: int = 0) -> int:
        """A prompt that prefill computes."""
        blocks = tuple(range(-(-len(tokens) // B)))
        return self.sink.offer(Reserve(name, EPOCH, tuple(tokens), deadline_ns, blocks=blocks, model=MODEL), generation)

    def step(self, *, running: int = 0, waiting_blocks: int = 0, now_ns: int = 0, pull: bool = True) -> list[str]:
        """One round; the ids of what is whole now."""
        self.handovers.receive(EPOCH)
        self.handovers.admit(now_ns, running=running, waiting_blocks=waiting_blocks)
        return [request.request_id for request, _ in self.handovers.pull(None)] if pull else []


class SlowTransfer(Transfer):
    """A copy that a device is at until the test, or who waits for it, lets it end."""

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


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_what_was_offered_is_pulled_into_blocks_of_its_own_and_acknowledged() -> None:
    stand = Stand()
    number = stand.decode("a", tokens(0, 10))
    stand.handovers.receive(EPOCH)
    stand.handovers.admit(0, running=0, waiting_blocks=0)
    ((_, table),) = stand.handovers.pull(None)
    assert np.array_equal(stand.kv[:, :, table.blocks], stand.sink.source[:, :, :3])
    assert stand.sink.answers == {number: "taken"}
    assert stand.handovers.pulled_bytes == stand.kv[:, :, :3].nbytes


def test_no_more_is_taken_in_once_what_waits_has_its_share_of_the_blocks() -> None:
    stand = Stand(waiting_share=0.5)
    for number in range(3):
        stand.decode(f"r{number}", tokens(100 * number, 20))
    assert stand.step(waiting_blocks=10) == []
    assert stand.step(waiting_blocks=9) == ["r0"]


def test_room_is_left_for_a_block_of_every_running_row() -> None:
    stand = Stand(waiting_share=1.0)
    stand.decode("a", tokens(0, 64))
    assert stand.step(running=5) == []
    assert stand.step(running=4) == ["a"]


def test_a_small_prompt_does_not_overtake_a_large_one_that_waits_for_room() -> None:
    stand = Stand(waiting_share=1.0)
    held = stand.blocks.open([])
    stand.blocks.grow(held, 10 * B)
    stand.decode("large", tokens(0, 48))
    stand.decode("small", tokens(100, 4))
    assert stand.step() == []
    stand.blocks.close(held)
    assert stand.step() == ["large"]
    assert stand.step() == ["small"]


def test_of_a_prefix_that_is_here_only_the_rest_is_pulled() -> None:
    stand = Stand()
    stand.decode("a", tokens(0, 12))
    stand.step()
    before = stand.handovers.pulled_bytes
    stand.decode("b", [*tokens(0, 12), 50, 51])
    assert stand.step() == ["b"]
    assert stand.handovers.pulled_bytes - before == stand.kv[:, :, :1].nbytes


def test_room_that_was_reserved_is_there_when_the_offer_comes_however_full_it_is_then() -> None:
    stand = Stand(waiting_share=1.0)
    announced = stand.reserve("a", tokens(0, 16))
    assert stand.step() == []
    assert stand.sink.answers == {announced: "taken"}
    assert stand.blocks.held == 4
    other = stand.blocks.open([])
    stand.blocks.grow(other, stand.blocks.available * B)
    stand.decode("a", tokens(0, 16))
    assert stand.step() == ["a"]


def test_a_reservation_that_nobody_comes_for_lapses_at_its_deadline() -> None:
    stand = Stand()
    stand.reserve("a", tokens(0, 16), deadline_ns=100)
    stand.step(now_ns=99)
    assert stand.blocks.held == 4
    stand.step(now_ns=100)
    assert stand.blocks.held == 0


def test_who_is_asked_to_make_room_gives_it_and_waits_again() -> None:
    stand = Stand(waiting_share=1.0)
    stand.decode("a", tokens(0, 16))
    stand.reserve("b", tokens(100, 16))
    stand.step(pull=False)
    assert stand.blocks.held == 8
    assert stand.handovers.evict_latest()
    assert stand.handovers.evict_latest()
    assert not stand.handovers.evict_latest()
    assert stand.blocks.held == 0
    assert stand.step() == ["a"]
    stand.decode("b", tokens(100, 16))
    assert stand.step() == ["b"], "without its reservation it is an offer like any other"


@pytest.mark.parametrize("announced", [False, True])
def test_a_cancelled_request_is_refused_also_when_it_comes_after_the_word_to_forget_it(announced: bool) -> None:
    stand = Stand()
    stand.handovers.cancel("a")
    number = stand.reserve("a", tokens(0, 8)) if announced else stand.decode("a", tokens(0, 8))
    assert stand.step() == []
    assert stand.sink.answers == {number: "cancelled"}
    assert (len(stand.handovers), stand.blocks.held) == (0, 0)


def test_an_offer_that_was_withdrawn_is_forgotten_before_and_after_its_copy() -> None:
    stand = Stand(waiting_share=1.0)
    first, second = stand.decode("a", tokens(0, 8)), stand.decode("b", tokens(50, 8))
    stand.sink.withdrawn.add(first)
    stand.step(pull=False)
    assert stand.blocks.held == 2
    assert stand.sink.answers == {first: "prefill has withdrawn its KV"}, "nothing stays open"
    stand.sink.withdrawn.add(second)
    assert stand.step() == []
    assert (len(stand.handovers), stand.blocks.held) == (0, 0)


def test_what_is_of_another_frontend_or_another_model_is_refused() -> None:
    stand = Stand()
    old, foreign = stand.decode("a", [1], frontend_epoch=4), stand.decode("b", [1], model=b"another")
    assert stand.step() == []
    assert stand.sink.answers[old] == "its frontend (epoch 4) is gone"
    assert "another model" in stand.sink.answers[foreign]


def test_a_copy_that_a_device_has_not_ended_holds_up_neither_the_queue_nor_the_batch() -> None:
    stand = Stand()
    stand.sink.transfer = SlowTransfer
    stand.decode("a", tokens(0, 8))
    assert stand.step() == []
    assert stand.handovers.pulling
    stand.sink.last.settle()
    assert stand.step() == ["a"]


@pytest.mark.parametrize("why", ["cancelled", "another frontend"])
def test_blocks_that_a_device_still_writes_to_are_not_free_before_it_has_ended(why: str) -> None:
    stand = Stand()
    stand.sink.transfer = SlowTransfer
    number = stand.decode("a", tokens(0, 8))
    stand.step()
    if why == "cancelled":
        stand.handovers.cancel("a")
    else:
        stand.handovers.clear()
    assert number in stand.sink.answers
    assert (stand.blocks.held, len(stand.handovers)) == (2, 1), "they are held, and the worker is not done"
    stand.sink.last.settle()
    stand.step()
    assert (stand.blocks.held, len(stand.handovers)) == (0, 0)


def test_room_that_a_device_still_writes_to_is_waited_for_by_who_needs_it() -> None:
    stand = Stand()
    stand.sink.transfer = SlowTransfer
    stand.decode("a", tokens(0, 8))
    stand.step()
    assert stand.handovers.evict_latest()
    assert stand.blocks.held == 0
    assert not stand.handovers.evict_latest()
    assert stand.handovers.waiting == 1, "it is pulled again when there is room"


def test_a_copy_that_fails_is_refused_with_the_reason_and_the_next_one_goes_on() -> None:
    stand = Stand(waiting_share=1.0)
    stand.sink.transfer = BrokenTransfer
    failed = stand.decode("a", tokens(0, 8))
    stand.step(pull=False)
    stand.sink.transfer = Transfer
    stand.decode("b", tokens(50, 8))
    assert stand.step() == ["b"]
    assert stand.sink.answers[failed] == "cuMemcpyDtoDAsync failed"


def test_what_is_written_of_a_prompt_is_pulled_while_the_rest_is_computed() -> None:
    stand = Stand()
    ahead = stand.ahead("a", tokens(0, 22))
    for written, blocks in ((0, 0), (9, 2), (11, 2), (20, 5), (22, 5)):
        stand.sink.has_written = written
        assert stand.step() == []
        assert stand.handovers.pulled_bytes == stand.kv[:, :, :blocks].nbytes, "whole blocks, each once"
        assert not stand.handovers.pulling
    assert stand.sink.answers == {}, "nothing is taken before it is whole"
    number = stand.decode("a", tokens(0, 22))
    stand.handovers.receive(EPOCH)
    stand.handovers.admit(0, running=0, waiting_blocks=0)
    ((_, table),) = stand.handovers.pull(None)
    assert stand.sink.answers == {ahead: "taken", number: "taken"}
    assert np.array_equal(stand.kv[:, :, table.blocks], stand.sink.source[:, :, :6])
    assert stand.handovers.pulled_bytes == stand.kv[:, :, :6].nbytes
    assert len(stand.handovers) == 0


def test_of_a_prompt_that_is_computed_what_is_here_already_is_not_pulled() -> None:
    stand = Stand()
    stand.decode("a", tokens(0, 8))
    stand.step()
    before = stand.handovers.pulled_bytes
    stand.ahead("b", [*tokens(0, 8), *tokens(50, 8)])
    stand.sink.has_written = 8
    stand.step()
    assert stand.handovers.pulled_bytes == before
    stand.sink.has_written = 12
    stand.step()
    assert stand.handovers.pulled_bytes - before == stand.kv[:, :, :1].nbytes


def test_what_was_pulled_of_another_life_of_its_slot_is_pulled_again() -> None:
    stand = Stand()
    stand.ahead("a", tokens(0, 16), generation=3)
    stand.sink.has_written = 12
    stand.step()
    stand.sink.source[:] = 7.0
    made = Decode("a", EPOCH, Sampling(5), tuple(tokens(0, 16)), 1, None, (), {}, (0, 1, 2, 3), MODEL, 16)
    stand.sink.offer(made, generation=4)
    stand.handovers.receive(EPOCH)
    ((_, table),) = stand.handovers.pull(None)
    assert (stand.kv[:, :, table.blocks] == 7.0).all()


def test_a_prompt_that_is_computed_keeps_no_room_from_one_that_is_whole_nor_from_a_row() -> None:
    stand = Stand(waiting_share=1.0)
    ahead = stand.ahead("long", tokens(0, 60))
    stand.sink.has_written = 30
    stand.step()
    assert stand.blocks.held == 15
    stand.decode("whole", tokens(100, 32))
    assert stand.step() == ["whole"]
    assert ahead in stand.sink.answers
    stand.ahead("other", tokens(200, 16))
    stand.step()
    held = stand.blocks.held
    assert stand.handovers.evict_latest()
    assert stand.blocks.held == held - 4
    stand.decode("other", tokens(200, 16))
    assert stand.step() == ["other"], "it is an offer like any other"


def test_a_prompt_that_is_computed_does_not_count_as_one_that_waits() -> None:
    stand = Stand(waiting_share=0.2)
    stand.ahead("long", tokens(0, 40))
    stand.step()
    stand.decode("whole", tokens(100, 8))
    assert stand.step() == ["whole"]


def test_one_with_a_reservation_keeps_its_room_while_it_is_computed() -> None:
    stand = Stand(waiting_share=1.0)
    stand.reserve("a", tokens(0, 40))
    stand.step()
    stand.ahead("a", tokens(0, 40))
    stand.sink.has_written = 40
    stand.step()
    assert stand.blocks.held == 10
    number = stand.decode("large", tokens(100, 60))
    assert stand.step() == []
    assert number not in stand.sink.answers
    stand.decode("a", tokens(0, 40))
    assert stand.step() == ["a"]
    assert stand.handovers.pulled_bytes == stand.kv[:, :, :10].nbytes


@pytest.mark.parametrize("why", ["cancelled", "another frontend", "withdrawn", "late", "a broken copy"])
@pytest.mark.parametrize("reserved", [False, True])
def test_a_prompt_whose_computation_ends_without_an_offer_holds_nothing(why: str, reserved: bool) -> None:
    stand = Stand()
    if reserved:
        stand.reserve("a", tokens(0, 16), deadline_ns=100)
        stand.step()
    number = stand.ahead("a", tokens(0, 16), deadline_ns=100)
    stand.step()
    assert stand.blocks.held == 4
    if why == "cancelled":
        stand.handovers.cancel("a")
    elif why == "another frontend":
        stand.handovers.clear()
    elif why == "withdrawn":
        stand.sink.withdrawn.add(number)
    elif why == "a broken copy":
        stand.sink.transfer, stand.sink.has_written = BrokenTransfer, 8
    stand.step(now_ns=100 if why == "late" else 0)
    assert (stand.blocks.held, len(stand.handovers)) == (0, 0)
    assert stand.sink.answers[number] == "taken", "nothing stays open"


def test_of_another_model_nothing_is_pulled_ahead() -> None:
    stand = Stand()
    number = stand.sink.offer(Reserve("a", EPOCH, (1, 2, 3, 4), FOREVER, blocks=(0,), model=b"another"))
    stand.sink.has_written = 4
    assert stand.step() == []
    assert "another model" in stand.sink.answers[number]
    assert (len(stand.handovers), stand.blocks.held, stand.handovers.pulled_bytes) == (0, 0, 0)
