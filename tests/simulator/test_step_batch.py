"""Batches that advance in steps: jumping over many steps at once gives what going step by step gives."""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime.simulator.node import Simulation
from runtime.simulator.stages import decode_tables as at
from runtime.simulator.stages import step_batch as batch
from runtime.simulator.traces import Arrival
from tests.simulator.nodes import config, setup

STEP = 10
_ROWS = 32
Between = Callable[["Stand", int, list[int], int], tuple[int, int, int]]


class Stand:
    """One batch by itself. `between` is called between two runs with the moment, the rows whose steps are over, and the
    steps that the run took; it says the most steps of the next, the time of each, and what the first costs beside."""

    def __init__(self, between: Between) -> None:
        self._between = between
        self.now = 0
        self.state = at.State(
            clock=np.array([0, 1 << 62]),
            words=np.zeros(at.WORDS, np.int64),
            costs=np.zeros(7),
            workers=np.zeros((1, at.WORKER_WORDS), np.int64),
            extra_s=np.zeros(1),
            lists=np.zeros((5, _ROWS), np.int64),
            rows=np.full((_ROWS, at.ROW_WORDS), -1),
            free=np.zeros(_ROWS, np.int64),
            drawn=np.zeros((1, 1)),
            events=np.zeros((256, at.EVENT_WORDS), np.int64),
        )
        self.state.workers[0, at.IDLE] = 1

    def join(self, row: int, steps: int) -> None:
        batch.join(self.state, 0, row, steps)

    def run(self, others: Sequence[tuple[int, Callable[[], None]]] = ()) -> None:
        """Let the batch run, and what else is planned, which comes first at the same moment."""
        waiting = sorted(others, key=lambda other: other[0])
        batch.interrupt(self.state, 0, 0)
        while waiting or self.state.words[at.EVENTS]:
            if waiting and not (self.state.words[at.EVENTS] and self.state.events[0, at.WHEN] < waiting[0][0]):
                self.now, action = waiting.pop(0)
                action()
                continue
            self.now = int(self.state.events[0, at.WHEN])
            at.pop(self.state)
            if self.state.workers[0, at.END] == self.now:
                self._run_ends()

    def interrupt(self) -> None:
        batch.interrupt(self.state, 0, self.now)

    def boundary_ns(self) -> int:
        return int(batch.boundary_ns(self.state, 0, self.now))

    def _run_ends(self) -> None:
        steps, done = batch.end_run(self.state, 0, self.now), []
        while (row := batch.next_done(self.state, 0)) >= 0:
            done.append(row)
        batch.begin_run(self.state, 0, self.now, *self._between(self, self.now, done, steps))

    def __len__(self) -> int:
        return int(self.state.workers[0, at.LISTS + at.MEMBERS])


def ends_of(joins: list[tuple[int, int]], most: int) -> dict[int, int]:
    """When the steps of rows that come at (ns, steps) are over. A step takes 10 ns + 3 ns a row."""
    waiting: list[tuple[int, int]] = []
    ends: dict[int, int] = {}

    def between(stand: Stand, now: int, done: list[int], steps: int) -> tuple[int, int, int]:
        ends.update(dict.fromkeys(done, now))
        for row, count in waiting:
            stand.join(row, count)
        waiting.clear()
        return most, STEP + 3 * len(stand), 0

    stand = Stand(between)

    def come(row: int, count: int) -> Callable[[], None]:
        def action() -> None:
            waiting.append((row, count))
            stand.interrupt()

        return action

    stand.run([(moment, come(row, count)) for row, (moment, count) in enumerate(joins)])
    return ends


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 20)), max_size=20))
def test_one_run_of_many_steps_ends_when_as_many_single_steps_do(joins: list[tuple[int, int]]) -> None:
    assert ends_of(joins, most=1 << 30) == ends_of(joins, most=1)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([2.0, 8.0, 40.0]),
    every=st.sampled_from([0, 5, 32]),
    device=st.sampled_from(["cpu", "cuda:0"]),
)
def test_a_whole_node_gives_the_same_to_the_nanosecond_however_many_steps_are_one_event(
    seed: int, rate: float, every: int, device: str
) -> None:
    """Where contexts cost nothing, so that a step's time does not change while rows stay, and blocks are not counted:
    they are taken for as many steps as one event has."""
    random, at_s, arrivals = Random(seed), 0.0, []
    for _ in range(40):
        at_s += random.expovariate(rate)
        arrivals.append(Arrival(at_s, random.randint(1, 400), random.randint(1, 120)))
    node = config()
    node = replace(node, decode=replace(node.decode, devices=(device,)))
    made = setup(slot_s=1e-5, node=node, seed=seed)
    made = replace(
        made,
        times=replace(made.times, decode_context_s=0.0),
        workload=replace(made.workload, probe_every_tokens=every, probe_hit=0.5),
    )
    found = []
    for most_steps in (64, 1):
        simulation = Simulation(made, arrivals, most_steps)
        simulation.run()
        found.append([(r.first_token_ns, r.end_ns, r.stalled_ns, r.outcome) for r in simulation.requests])
    assert found[0] == found[1]


def test_a_row_that_comes_during_a_step_joins_the_next_one() -> None:
    assert ends_of([(1, 3), (21, 1)], most=1 << 30) == {0: 1 + 13 + 13 + 16, 1: 1 + 13 + 13 + 16}


def test_a_row_that_leaves_has_taken_the_steps_until_then() -> None:
    taken = []

    def between(stand: Stand, now: int, done: list[int], steps: int) -> tuple[int, int, int]:
        if now == 0:
            stand.join(0, 10)
            return 4, STEP, 0
        if len(stand):
            taken.append(batch.remove(stand.state, 0, 0))
        return 1, STEP, 0

    stand = Stand(between)
    stand.run()
    assert taken == [4]
    assert not len(stand)


def told_of(
    rows: dict[int, int], most: int = 1 << 30, interrupts: tuple[int, ...] = (), extra_ns: int = 0
) -> list[tuple[int, list[int], int]]:
    """When `between` is called, with whom and how many steps."""
    told: list[tuple[int, list[int], int]] = []

    def between(stand: Stand, now: int, done: list[int], steps: int) -> tuple[int, int, int]:
        if not told:
            for row, count in rows.items():
                stand.join(row, count)
        told.append((now, done, steps))
        return most, STEP, extra_ns

    stand = Stand(between)
    stand.run([(moment, stand.interrupt) for moment in interrupts])
    return told[1:]


A, B = 0, 1


def test_a_run_ends_with_a_rows_last_step_and_with_the_most_steps_it_may_have() -> None:
    assert told_of({A: 1, B: 3}) == [(10, [A], 1), (30, [B], 2)]
    assert told_of({A: 1, B: 4}, most=2) == [(10, [A], 1), (30, [], 2), (40, [B], 1)]


def test_an_interrupt_ends_a_run_with_the_step_under_way() -> None:
    assert told_of({A: 4, B: 9}, interrupts=(35,))[0] == (40, [A], 4)
    assert told_of({A: 2, B: 9}, interrupts=(15,))[0] == (20, [A], 2)  # in the very step that is A's last
    assert told_of({A: 9, B: 9}, interrupts=(5, 6)) == [(10, [], 1), (90, [A, B], 8)]  # and no later run


def test_rows_that_end_together_do_so_in_the_order_in_which_they_joined() -> None:
    assert told_of({B: 3, A: 3}) == [(30, [B, A], 3)]


def test_what_a_run_costs_beside_its_steps_is_paid_once() -> None:
    assert told_of({A: 3, B: 3}, extra_ns=7) == [(37, [A, B], 3)]
    assert told_of({A: 1, B: 3}, extra_ns=7) == [(17, [A], 1), (44, [B], 2)]


@pytest.mark.parametrize(("moment", "boundary"), [(1, 17), (16, 17), (17, 17), (18, 27), (30, 37)])
def test_the_step_under_way_ends_where_an_interrupt_would_end_the_run(moment: int, boundary: int) -> None:
    seen = []

    def between(stand: Stand, now: int, done: list[int], steps: int) -> tuple[int, int, int]:
        if now == 0:
            assert stand.boundary_ns() == 0  # nothing is under way
            stand.join(0, 3)
        return 1 << 30, STEP, 7

    stand = Stand(between)
    stand.run([(moment, lambda: seen.append(stand.boundary_ns()))])
    assert seen == [boundary]


@given(st.lists(st.integers(0, 50), max_size=60))
def test_events_happen_by_time_and_those_of_one_moment_in_the_order_in_which_they_were_planned(
    moments: list[int],
) -> None:
    state = Stand(lambda *_: (1, 1, 0)).state
    for number, moment in enumerate(moments):
        at.plan(state, moment, at.VECTOR, number, 0)
    found = [int(at.pop(state)[1]) for _ in moments]
    assert found == sorted(range(len(moments)), key=lambda number: moments[number])
