"""Batches that advance in steps: jumping over many steps at once gives what going step by step gives."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.simulator.events import Events
from runtime.simulator.stages.step_batch import StepBatch

STEP = 10


def ends_of(joins: list[tuple[int, int]], most: int) -> dict[int, int]:
    """When the steps of members that come at (ns, steps) are over. A step takes 10 ns + 3 ns a member."""
    events = Events()
    waiting: list[tuple[int, int]] = []
    ends: dict[int, int] = {}

    def between(done: list[int], steps: int) -> tuple[int, int, int]:
        ends.update(dict.fromkeys(done, events.now_ns))
        for name, count in waiting:
            batch.join(name, count)
        waiting.clear()
        return most, STEP + 3 * len(batch), 0

    batch: StepBatch[int] = StepBatch(events, between)
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

    def between(done: list[str], steps: int) -> tuple[int, int, int]:
        if events.now_ns == 0:
            batch.join("a", 10)
            return 4, STEP, 0
        if "a" in batch:
            left.append(batch.leave("a"))
        return 1, STEP, 0

    batch: StepBatch[str] = StepBatch(events, between)
    batch.poke()
    events.run()
    assert left == [6]
    assert not batch


def told_of(
    members: dict[str, int], most: int = 1 << 30, pokes: tuple[int, ...] = (), ends: str = "", extra_ns: int = 0
) -> list[tuple[int, list[str], int]]:
    """When `between` is called, with whom and how many steps, in a batch whose runs end for the members of `ends`."""
    events = Events()
    told: list[tuple[int, list[str], int]] = []

    def between(done: list[str], steps: int) -> tuple[int, int, int]:
        if not told:
            for name, count in members.items():
                batch.join(name, count)
        told.append((events.now_ns, sorted(done), steps))
        return most, STEP, extra_ns

    batch: StepBatch[str] = StepBatch(events, between)
    batch.poke()
    for at in pokes:
        events.at(at, batch.poke)
    events.run()
    return told[1:]


def test_a_run_ends_with_a_members_last_step_and_with_the_most_steps_it_may_have() -> None:
    assert told_of({"a": 1, "b": 3}) == [(10, ["a"], 1), (30, ["b"], 2)]
    assert told_of({"a": 1, "b": 4}, most=2) == [(10, ["a"], 1), (30, [], 2), (40, ["b"], 1)]


def test_a_poke_ends_a_run_with_the_step_under_way() -> None:
    assert told_of({"a": 4, "b": 9}, pokes=(35,))[0] == (40, ["a"], 4)
    assert told_of({"a": 2, "b": 9}, pokes=(15,))[0] == (20, ["a"], 2)  # in the very step that is a's last
    assert told_of({"a": 9, "b": 9}, pokes=(5, 6)) == [(10, [], 1), (90, ["a", "b"], 8)]  # and no later run


def test_what_a_run_costs_beside_its_steps_is_paid_once() -> None:
    assert told_of({"a": 3, "b": 3}, extra_ns=7) == [(37, ["a", "b"], 3)]
    assert told_of({"a": 1, "b": 3}, extra_ns=7) == [(17, ["a"], 1), (44, ["b"], 2)]


def test_an_empty_batch_notices_a_poke_only_after_its_time_to_wake_and_a_running_one_at_once() -> None:
    events = Events()
    called: list[int] = []

    def between(done: list[str], steps: int) -> tuple[int, int, int]:
        called.append(events.now_ns)
        if len(called) == 1:
            batch.join("a", 3)
        return 1 << 30, STEP, 0

    batch: StepBatch[str] = StepBatch(events, between, wake_ns=4)
    for at in (100, 102, 115, 200):
        events.at(at, batch.poke)
    events.run()
    assert called == [104, 124, 134, 204]
    assert (batch.busy_ns, batch.member_steps) == (30, 3)  # sleep is no work


def test_the_step_under_way_ends_where_a_poke_would_end_the_run() -> None:
    events = Events()
    batch: StepBatch[str] = StepBatch(events, lambda done, steps: (1 << 30, STEP, 7))
    assert batch.boundary_ns() == 0  # nothing is under way
    batch.join("a", 3)
    batch.poke()
    seen: list[tuple[int, int]] = []
    for at in (1, 16, 17, 18, 30):
        events.at(at, lambda: seen.append((events.now_ns, batch.boundary_ns())))
    events.run()
    assert seen == [(1, 17), (16, 17), (17, 17), (18, 27), (30, 37)]
