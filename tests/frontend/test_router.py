"""Request placement by queue depth, free slots and prefix overlap; never on draining or lost workers."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from runtime.errors import ContextLengthExceeded, Overloaded, Unavailable
from runtime.serving.frontend.choice import BLOCK_CHARS, BLOCK_TOKENS, PREFIX_BLOCKS, prefix_blocks
from runtime.serving.frontend.router import Placement, Router
from runtime.serving.messages import DecodeLoad, Hello, Message, Report, Role

TEXT = "The with statement is used to wrap the execution of a block. " * 20


def hello(role: Role, name: str, slots: int = 4, limit: int = 1000) -> Hello:
    return Hello(role, name, 1, 1, slots, limit, f"ipc://@{name}")


def report(name: str, queued: int = 0, running: int = 0, free: int = 4, draining: bool = False) -> Report:
    return Report(name, 1, 1, queued, running, free, draining)


def router(*names: str, max_in_flight: int = 1000, overlap_weight: float = 1.0) -> Router:
    """p… are prefill workers, d… decode workers."""
    made = Router(max_in_flight=max_in_flight, overlap_weight=overlap_weight)
    for name in names:
        made.add(hello("prefill" if name.startswith("p") else "decode", name))
    return made


def test_with_zero_overlap_weight_load_decides_and_ties_rotate() -> None:
    for weight, again in ((1.0, "the same"), (0.0, "another")):
        made = router("p0", "p1", "d0", "d1", overlap_weight=weight)
        first = made.place(prefix_blocks(TEXT))
        made.finished(first, prefilled=False)
        second = made.place(prefix_blocks(TEXT + "and then something else"))
        assert (second.prefill == first.prefill) == (second.decode == first.decode) == (again == "the same")


def test_an_overlap_outweighs_as_many_waiting_requests_as_configured() -> None:
    made = router("p0", "p1", "d0", overlap_weight=3.0)
    knows = made.place(prefix_blocks(TEXT))
    made.finished(knows, prefilled=False)
    for queued, same in ((2, True), (4, False)):
        made.report(report(knows.prefill, queued=queued))
        placement = made.place(prefix_blocks(TEXT))
        assert (placement.prefill == knows.prefill) == same
        made.finished(placement, prefilled=False)


def test_the_least_utilized_decode_worker_with_free_slots_is_selected() -> None:
    made = router("p0", "d1")
    made.add(hello("decode", "d0", slots=100))
    made.report(report("d0", running=10, free=90))
    made.report(report("d1", running=1, free=3))
    assert made.place(()).decode == "d0"


def told(role: Role, name: str, blocks: int, slots: int = 4) -> Hello:
    """A worker that reports its KV blocks, of 32 tokens."""
    return Hello(role, name, 1, 1, slots, 10_000, f"ipc://@{name}", block_tokens=32, blocks=blocks)


def test_a_decode_worker_with_enough_free_blocks_is_preferred() -> None:
    made = router("p0")
    made.add(told("decode", "d0", blocks=100))
    made.add(told("decode", "d1", blocks=100))
    made.report(Report("d0", 1, 1, 0, 0, 4, free_blocks=9))
    made.report(Report("d1", 1, 1, 0, 2, 2, free_blocks=10))
    assert made.place((), tokens=320).decode == "d1"
    assert made.place((), tokens=288).decode == "d0"
    assert made.place((), tokens=1000, expected=288).decode == "d0", "it is not expected to need all of them"


def test_a_prefill_worker_without_free_blocks_counts_one_more_request() -> None:
    made = router("d0")
    made.add(told("prefill", "p0", blocks=100))
    made.add(told("prefill", "p1", blocks=100))
    made.report(Report("p0", 1, 1, 0, 0, 4, free_blocks=1))
    made.report(Report("p1", 1, 1, 1, 0, 4, free_blocks=50))
    assert {made.place((), tokens=64).prefill for _ in range(2)} == {"p0", "p1"}
    made.report(Report("p0", 1, 1, 5, 0, 4, free_blocks=1))
    assert made.place((), tokens=64).prefill == "p1"


def test_a_worker_to_avoid_is_selected_only_if_it_is_the_only_one() -> None:
    made = router("p0", "d0", "d1")
    made.report(report("d1", running=3, free=1))
    assert {made.place((), avoid="d0").decode for _ in range(3)} == {"d1"}
    made.remove("d1")
    assert made.place((), avoid="d0").decode == "d0"


def test_remembered_prefixes_are_bounded_by_the_workers_blocks() -> None:
    made = router("d0")
    made.add(told("prefill", "p0", blocks=3))
    made.place(prefix_blocks(tuple(range(BLOCK_TOKENS * 10))))
    prefill = next(worker for worker in made.workers() if worker.hello.worker == "p0")
    assert prefill.overlap(prefix_blocks(tuple(range(BLOCK_TOKENS * 10)))) == 0.3


def test_the_placement_contains_the_decode_workers_load_before_it() -> None:
    made = router("p0", "d0")
    made.report(Report("d0", 1, 1, queued=1, running=2, free_slots=1, step_ns=7))
    assert made.place(()).decode_load == DecodeLoad(3, 4, 7)
    made.report(Report("d0", 1, 1, queued=0, running=0, free_slots=4, step_ns=7))
    assert made.place(()).decode_load == DecodeLoad(1, 4, 7), "the first one is on its way"


def test_ties_rotate_and_a_new_worker_gets_its_first_request_at_once() -> None:
    made = router("p0", "p1", "d0")

    def taken() -> str:
        placement = made.place(())
        made.finished(placement, prefilled=False)
        return placement.prefill

    assert [taken() for _ in range(4)] == ["p0", "p1", "p0", "p1"]
    made.add(hello("prefill", "p2"))
    assert [taken() for _ in range(4)] == ["p2", "p0", "p1", "p2"]


def test_the_router_refuses_requests_over_its_limit_with_both_numbers() -> None:
    made = router("p0", "d0", max_in_flight=2)
    first, _ = made.place(()), made.place(())
    with pytest.raises(Overloaded, match="2 requests are in flight, the limit is 2"):
        made.place(())
    made.finished(first, prefilled=False)
    made.place(())


def test_a_request_is_placed_on_a_worker_with_enough_context() -> None:
    made = router("p0", "d0")
    made.add(hello("decode", "d1", limit=50))
    assert {made.place((), tokens=51).decode for _ in range(8)} == {"d0"}
    with pytest.raises(ContextLengthExceeded, match="at least 1001 tokens, the model's context holds 1000"):
        made.place((), tokens=1001)


def test_the_prefix_index_of_a_worker_is_bounded() -> None:
    made = Router(max_in_flight=10_000, remembered_blocks=50)
    made.add(hello("prefill", "p0"))
    made.add(hello("decode", "d0"))
    for number in range(100):
        made.place(prefix_blocks(f"{number} " + TEXT))
    (prefill, _) = made.workers()
    assert len(prefill.prefixes) == 50
    assert prefill.overlap(prefix_blocks("99 " + TEXT)) == 1.0


@given(st.text(max_size=2000), st.text(max_size=500), st.text(max_size=500))
@settings(max_examples=50)
def test_prompts_share_as_many_blocks_as_they_have_leading_characters_in_common(base: str, one: str, two: str) -> None:
    first, second = base + one, base + two
    common = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if common is None:
        common = min(len(first), len(second))
    equal = [a == b for a, b in zip(prefix_blocks(first), prefix_blocks(second), strict=False)]
    assert sum(equal) == min(common // BLOCK_CHARS, PREFIX_BLOCKS)
    assert equal == sorted(equal, reverse=True)  # a chain: nothing behind a difference is shared


def test_chats_and_token_ids_are_hashed_into_blocks_too() -> None:
    chat = (Message("system", TEXT), Message("user", "one"))
    other = (Message("system", TEXT), Message("user", "two" * 100))
    shared = len(f"system\0{TEXT}\0user\0") // BLOCK_CHARS
    assert prefix_blocks(chat)[:shared] == prefix_blocks(other)[:shared]
    assert len(prefix_blocks(tuple(range(BLOCK_TOKENS * 3 + 1)))) == 3
    assert prefix_blocks(()) == prefix_blocks("") == ()


@dataclass
class Known:
    """The model state of one worker."""

    role: Role
    draining: bool = False
    assigned: int = 0
    load: int = 0
    slots: int = 4
    free: int = 4


@dataclass(eq=False)
class Held:
    placement: Placement
    prefilled: bool = False


class RouterMachine(RuleBasedStateMachine):
    """State machine: workers join, leave, restart, drain and report; requests start and end. Counts stay consistent."""

    requests = Bundle("requests")
    LIMIT = 12

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(max_in_flight=self.LIMIT, remembered_blocks=64)
        self.known: dict[str, Known] = {}
        self.in_flight = 0

    @rule(number=st.integers(0, 2), role=st.sampled_from(["prefill", "decode"]), slots=st.integers(1, 4))
    def start(self, number: int, role: Role, slots: int) -> None:
        name = f"{role}-{number}"
        self.known[name] = Known(role, slots=slots, free=slots)
        self.router.add(hello(role, name, slots=slots))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        del self.known[name]
        self.router.remove(name)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), queued=st.integers(0, 5), running=st.integers(0, 5), draining=st.booleans())
    def report(self, data: st.DataObject, queued: int, running: int, draining: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[name]
        known.load, known.draining, known.free = queued + running, draining, max(0, known.slots - running)
        self.router.report(report(name, queued, running, known.free, draining))

    @rule(target=requests, prompt=st.integers(0, 3))
    def place(self, prompt: int) -> Held | None:
        ready = {
            role: {name: known for name, known in self.known.items() if known.role == role and not known.draining}
            for role in ("prefill", "decode")
        }
        try:
            placement = self.router.place(prefix_blocks(f"{prompt} {TEXT}"))
        except Overloaded:
            assert self.in_flight == self.LIMIT
            return None
        except Unavailable:
            assert not all(ready.values())
            return None
        self.in_flight += 1
        prefill, decode = ready["prefill"][placement.prefill], ready["decode"][placement.decode]
        shortest = min(max(known.load, known.assigned) for known in ready["prefill"].values())
        assert max(prefill.load, prefill.assigned) <= shortest + 1
        if any(self.has_room(known) for known in ready["decode"].values()):
            assert self.has_room(decode)
        prefill.assigned += 1
        decode.assigned += 1
        return Held(placement)

    @staticmethod
    def has_room(known: Known) -> bool:
        return known.free > 0 and max(known.load, known.assigned) < known.slots

    @rule(held=requests)
    def leave_prefill(self, held: Held | None) -> None:
        if held is not None and not held.prefilled:
            held.prefilled = True
            self.router.prefilled(held.placement)
            self.unassign(held.placement.prefill)

    @rule(held=consumes(requests))
    def finish(self, held: Held | None) -> None:
        if held is not None:
            self.in_flight -= 1
            self.router.finished(held.placement, prefilled=held.prefilled)
            self.unassign(held.placement.decode)
            if not held.prefilled:
                self.unassign(held.placement.prefill)

    def unassign(self, name: str) -> None:
        if name in self.known:
            self.known[name].assigned = max(0, self.known[name].assigned - 1)

    @invariant()
    def the_books_balance(self) -> None:
        assert self.router.in_flight == self.in_flight <= self.LIMIT
        assert {worker.hello.worker: worker.assigned for worker in self.router.workers()} == {
            name: known.assigned for name, known in self.known.items()
        }
        assert all(len(worker.prefixes) <= 64 for worker in self.router.workers())


RouterMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestRouterMachine = RouterMachine.TestCase
