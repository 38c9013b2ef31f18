"""Tests of step batches: one event for many steps gives the same result as single steps."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ipc.native.records import address_of, array_from, new_array
from runtime.simulator.node import Simulation
from runtime.simulator.stages import decode_core as core
from runtime.simulator.stages import decode_tables as at
from runtime.simulator.stages import step_batch as batch
from runtime.simulator.stages.pool_tables import compiled
from runtime.simulator.traces import Arrival
from tests.simulator.nodes import config, setup

STEP = 10
_ROWS = 32
Between = Callable[["BatchHarness", int, list[int], int], tuple[int, int, int]]


@compiled
def _join(address: int, row: int, steps: int) -> None:
    s = at.state_at(address)
    batch.join(s, s.workers[0], row, steps)


@compiled
def _remove(address: int, row: int) -> int:
    s = at.state_at(address)
    return batch.remove(s, s.workers[0], row)


@compiled
def _end_run(address: int, now: int) -> int:
    return batch.end_run(at.state_at(address).workers[0], now)


@compiled
def _next_done(address: int) -> int:
    s = at.state_at(address)
    return batch.next_done(s, s.workers[0])


@compiled
def _begin_run(address: int, now: int, most: int, each_ns: int, extra_ns: int) -> None:
    s = at.state_at(address)
    batch.begin_run(s, s.workers[0], now, most, each_ns, extra_ns)


@compiled
def _plan(address: int, when_ns: int, kind: int, subject: int) -> None:
    at.plan(at.state_at(address), when_ns, kind, subject, 0)


@compiled
def _pop(address: int) -> tuple[int, int, int]:
    return at.pop(at.state_at(address))


class BatchHarness:
    """A single batch. `between` is called between two runs with the time, the rows that have ended, and the steps of
    the run; it returns the maximum steps of the next run, the time of each, and an extra cost of the first."""

    def __init__(self, between: Between) -> None:
        self._between = between
        self.now = 0
        self.clock = new_array(at.Clock, 1)
        self.worker = at.Worker(idle=True, members=at.RowList(rows=new_array(int, _ROWS)))
        self.state = at.State(
            clock=self.clock,
            workers=array_from(at.Worker, address_of(self.worker)),
            rows=new_array(at.Row, _ROWS),
            events=new_array(at.Event, 256),
        )
        self._address = address_of(self.state)

    def join(self, row: int, steps: int) -> None:
        _join(self._address, row, steps)

    def remove(self, row: int) -> int:
        return _remove(self._address, row)

    def plan(self, when_ns: int, kind: int, subject: int) -> None:
        _plan(self._address, when_ns, kind, subject)

    def pop(self) -> tuple[int, int, int]:
        """Pop the next event: (kind, subject, probe)."""
        return _pop(self._address)

    def run(self, others: Sequence[tuple[int, Callable[[], None]]] = ()) -> None:
        """Run the batch and the other planned events, which come first at equal times."""
        waiting = sorted(others, key=lambda other: other[0])
        core.interrupt(self._address, 0, 0)
        while waiting or self.state.event_count:
            if waiting and not (self.state.event_count and self.state.events[0].when_ns < waiting[0][0]):
                self.now, action = waiting.pop(0)
                action()
                continue
            self.now = self.state.events[0].when_ns
            self.pop()
            if self.worker.end_ns == self.now:
                self._run_ends()

    def interrupt(self) -> None:
        core.interrupt(self._address, 0, self.now)

    def boundary_ns(self) -> int:
        return core.boundary_ns(self._address, 0, self.now)

    def _run_ends(self) -> None:
        steps, done = _end_run(self._address, self.now), []
        while (row := _next_done(self._address)) >= 0:
            done.append(row)
        _begin_run(self._address, self.now, *self._between(self, self.now, done, steps))

    def __len__(self) -> int:
        return self.worker.members.count


def ends_of(joins: list[tuple[int, int]], most: int) -> dict[int, int]:
    """Return when rows that join at (ns, steps) end. A step takes 10 ns plus 3 ns per row."""
    waiting: list[tuple[int, int]] = []
    ends: dict[int, int] = {}

    def between(harness: BatchHarness, now: int, done: list[int], steps: int) -> tuple[int, int, int]:
        ends.update(dict.fromkeys(done, now))
        for row, count in waiting:
            harness.join(row, count)
        waiting.clear()
        return most, STEP + 3 * len(harness), 0

    harness = BatchHarness(between)

    def come(row: int, count: int) -> Callable[[], None]:
        def action() -> None:
            waiting.append((row, count))
            harness.interrupt()

        return action

    harness.run([(moment, come(row, count)) for row, (moment, count) in enumerate(joins)])
    return ends


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 20)), max_size=20))
def test_a_run_of_many_steps_takes_as_long_as_single_steps(joins: list[tuple[int, int]]) -> None:
    assert ends_of(joins, most=1 << 30) == ends_of(joins, most=1)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([2.0, 8.0, 40.0]),
    every=st.sampled_from([0, 5, 32]),
    device=st.sampled_from(["cpu", "cuda:0"]),
)
def test_a_node_run_is_equal_to_the_nanosecond_for_any_number_of_steps_per_event(
    seed: int, rate: float, every: int, device: str
) -> None:
    """With free contexts, so that a step's time is constant while rows stay, and without block accounting, which
    allocates for as many steps as one event has."""
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


def test_a_row_that_arrives_during_a_step_joins_the_next_one() -> None:
    assert ends_of([(1, 3), (21, 1)], most=1 << 30) == {0: 1 + 13 + 13 + 16, 1: 1 + 13 + 13 + 16}


def test_a_row_that_leaves_has_taken_all_steps_until_then() -> None:
    taken = []

    def between(harness: BatchHarness, now: int, done: list[int], steps: int) -> tuple[int, int, int]:
        if now == 0:
            harness.join(0, 10)
            return 4, STEP, 0
        if len(harness):
            taken.append(harness.remove(0))
        return 1, STEP, 0

    harness = BatchHarness(between)
    harness.run()
    assert taken == [4]
    assert not len(harness)


def calls_of(
    rows: dict[int, int], most: int = 1 << 30, interrupts: tuple[int, ...] = (), extra_ns: int = 0
) -> list[tuple[int, list[int], int]]:
    """Return the calls of `between`: time, rows and steps."""
    calls: list[tuple[int, list[int], int]] = []

    def between(harness: BatchHarness, now: int, done: list[int], steps: int) -> tuple[int, int, int]:
        if not calls:
            for row, count in rows.items():
                harness.join(row, count)
        calls.append((now, done, steps))
        return most, STEP, extra_ns

    harness = BatchHarness(between)
    harness.run([(moment, harness.interrupt) for moment in interrupts])
    return calls[1:]


A, B = 0, 1


def test_a_run_ends_with_a_rows_last_step_or_at_its_maximum() -> None:
    assert calls_of({A: 1, B: 3}) == [(10, [A], 1), (30, [B], 2)]
    assert calls_of({A: 1, B: 4}, most=2) == [(10, [A], 1), (30, [], 2), (40, [B], 1)]


def test_an_interrupt_ends_a_run_with_the_current_step() -> None:
    assert calls_of({A: 4, B: 9}, interrupts=(35,))[0] == (40, [A], 4)
    assert calls_of({A: 2, B: 9}, interrupts=(15,))[0] == (20, [A], 2)  # during A's last step
    assert calls_of({A: 9, B: 9}, interrupts=(5, 6)) == [(10, [], 1), (90, [A, B], 8)]  # and no run after that


def test_rows_that_end_together_are_reported_in_join_order() -> None:
    assert calls_of({B: 3, A: 3}) == [(30, [B, A], 3)]


def test_the_extra_cost_of_a_run_is_paid_once() -> None:
    assert calls_of({A: 3, B: 3}, extra_ns=7) == [(37, [A, B], 3)]
    assert calls_of({A: 1, B: 3}, extra_ns=7) == [(17, [A], 1), (44, [B], 2)]


@pytest.mark.parametrize(("moment", "boundary"), [(1, 17), (16, 17), (17, 17), (18, 27), (30, 37)])
def test_the_current_steps_end_is_where_an_interrupt_ends_the_run(moment: int, boundary: int) -> None:
    seen = []

    def between(harness: BatchHarness, now: int, done: list[int], steps: int) -> tuple[int, int, int]:
        if now == 0:
            assert harness.boundary_ns() == 0  # no step is running
            harness.join(0, 3)
        return 1 << 30, STEP, 7

    harness = BatchHarness(between)
    harness.run([(moment, lambda: seen.append(harness.boundary_ns()))])
    assert seen == [boundary]


@given(st.lists(st.integers(0, 50), max_size=60))
def test_events_are_ordered_by_time_and_then_by_insertion(
    moments: list[int],
) -> None:
    harness = BatchHarness(lambda *_: (1, 1, 0))
    for number, moment in enumerate(moments):
        harness.plan(moment, at.VECTOR, number)
    popped = [harness.pop()[1] for _ in moments]
    assert popped == sorted(range(len(moments)), key=lambda number: moments[number])
