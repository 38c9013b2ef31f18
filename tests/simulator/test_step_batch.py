"""Batches that advance in steps: jumping over many steps at once gives what going step by step gives."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.simulator.events import Events
from runtime.simulator.step_batch import StepBatch

STEP = 10


def ends_of(joins: list[tuple[int, int]], most: int) -> dict[int, int]:
    """When the steps of members that come at (ns, steps) are over. A step takes 10 ns + 3 ns a member."""
    events = Events()
    waiting: list[tuple[int, int]] = []
    ends: dict[int, int] = {}

    def between(done: list[int], steps: int) -> int:
        ends.update(dict.fromkeys(done, events.now_ns))
        for name, count in waiting:
            batch.join(name, count)
        waiting.clear()
        return most

    batch: StepBatch[int] = StepBatch(events, between, lambda: STEP + 3 * len(batch))
    for name, (at, count) in enumerate(joins):

        def come(name: int = name, count: int = count) -> None:
            waiting.append((name, count))
            batch.poke()

        events.at(at, come)
    events.run()
    return ends


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 20)), max_size=20))
def test_one_run_of_many_steps_ends_when_as_many_single_steps_do(joins: list[tuple[int, int]]) -> None:
    assert ends_of(joins, most=1 << 30) == ends_of(joins, most=1)


def test_a_member_that_comes_during_a_step_joins_the_next_one() -> None:
    assert ends_of([(0, 3), (20, 1)], most=1 << 30) == {0: 13 + 13 + 16, 1: 13 + 13 + 16}


def test_a_member_that_leaves_keeps_the_steps_that_it_had_left() -> None:
    events = Events()
    left = []

    def between(done: list[str], steps: int) -> int:
        if events.now_ns == 0:
            batch.join("a", 10)
            return 4
        if "a" in batch:
            left.append(batch.leave("a"))
        return 1

    batch: StepBatch[str] = StepBatch(events, between, lambda: STEP)
    batch.poke()
    events.run()
    assert left == [6]
    assert not batch
