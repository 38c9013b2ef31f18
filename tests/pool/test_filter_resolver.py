"""Resolution of filters beside the pool's loop: order, fairness, and filters that nobody waits for any more."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from runtime.errors import DeadlineExceeded, InternalError, InvalidFilter, Overloaded
from runtime.pool.collections.resolver import FilterResolver, Resolution
from runtime.pool.collections.scopes import FilterableCollection
from runtime.retrieval.attributes.filters import filter_bytes
from runtime.retrieval.attributes.schema import AttributeType
from runtime.retrieval.fair_queue import FairQueue
from tests.thread_limit import permit_threads

MS = 1_000_000


class Harness:
    """A resolver without a thread, and a collection whose filters `n = m` take m passes of 10 ms each."""

    def __init__(self) -> None:
        self.now, self.wakes, self.steps = 0, 0, list[int]()
        self.resolver: FilterResolver[str] = FilterResolver(self.wake, lambda: self.now, start=False)
        self.collection = FilterableCollection(lambda: {"n": AttributeType.INTEGER}, self.passing)
        self.between: Callable[[int], None] = lambda step: None

    def wake(self) -> None:
        self.wakes += 1

    def passing(self, condition: Any, work: Any) -> Any:
        for step in range(condition.values[0]):
            work.check()
            self.steps.append(condition.values[0])
            self.between(step)
            self.now += 10 * MS
        return list

    def wait(self, number: object, flow: str, *waiting: str, deadline_ns: int = 1 << 62) -> None:
        content = filter_bytes({"type": "eq", "key": "n", "value": number})
        self.resolver.wait_for(7, content, self.collection, flow, waiting or (f"{flow}-{number}",), deadline_ns)

    def run(self) -> list[Resolution[str]]:
        while self.resolver.run_next():
            pass
        return self.resolver.take_done()


def test_the_flow_that_has_used_least_goes_first() -> None:
    harness = Harness()
    for number in (5, 6, 8):
        harness.wait(number, "storm")
    harness.resolver.run_next()
    harness.wait(1, "other")
    harness.wait(2, "other")
    assert [one.waiting for one in harness.run()] == [["storm-5"], ["other-1"], ["other-2"], ["storm-6"], ["storm-8"]]


def test_a_long_evaluation_is_interrupted_between_two_passes_for_a_flow_that_has_used_less() -> None:
    harness = Harness()
    harness.wait(5, "storm")

    def arrive(step: int) -> None:
        if step == 1 and harness.steps == [5, 5]:
            harness.wait(2, "other")

    harness.between = arrive
    done = harness.run()
    assert harness.steps == [5, 5, 2, 2, 5, 5, 5]
    assert [one.waiting for one in done] == [["other-2"], ["storm-5"]]
    assert harness.wakes == 2


def test_a_pause_earns_a_flow_nothing() -> None:
    queue: FairQueue[str, int] = FairQueue()
    for job in range(4):
        queue.push("steady", job)
        found = queue.pop()
        assert found == ("steady", job)
        queue.charge("steady", 10.0)
    queue.push("steady", 4)
    queue.push("late", 5)
    queue.push("late", 6)
    assert queue.pop() == ("late", 5)
    queue.charge("late", 11.0)
    assert queue.pop() == ("steady", 4)
    assert queue.pop(below=0.0) is None
    assert queue.pop() == ("late", 6)
    assert queue.pop() is None


@pytest.mark.parametrize(("now_ms", "passes"), [(26, 0), (0, 3)])
def test_an_evaluation_does_not_begin_or_ends_between_two_passes_once_its_requests_have_expired(
    now_ms: int, passes: int
) -> None:
    harness = Harness()
    harness.wait(9, "a", deadline_ns=25 * MS)
    harness.now = now_ms * MS
    (late,) = harness.run()
    assert isinstance(late.outcome, DeadlineExceeded)
    assert len(harness.steps) == passes


def test_a_filter_that_nobody_waits_for_is_not_evaluated_and_one_in_evaluation_ends() -> None:
    harness = Harness()
    harness.wait(2, "a")
    harness.resolver.abandon(harness.resolver.unfinished[0])
    assert not harness.resolver.unfinished
    assert harness.run() == []
    harness.wait(9, "a")
    harness.between = lambda step: harness.resolver.abandon(harness.resolver.unfinished[0])
    (ended,) = harness.run()
    assert isinstance(ended.outcome, DeadlineExceeded)
    assert len(harness.steps) == 1


def test_requests_with_one_filter_share_its_evaluation_until_the_collection_changes() -> None:
    harness = Harness()
    harness.wait(3, "a", "first")
    harness.wait(3, "b", "second")
    harness.resolver.changed(7)  # not begun: the evaluation will see the change

    def change(step: int) -> None:
        if step == 1 and len(harness.steps) == 2:
            harness.wait(3, "b", "third")
            harness.resolver.changed(7)
            harness.wait(3, "a", "fourth")

    harness.between = change
    before, after = harness.run()
    assert (before.waiting, before.shared) == (["first", "second", "third"], False)
    assert (after.waiting, after.shared) == (["fourth"], True)


def test_an_evaluation_that_is_done_is_not_given_to_requests_after_a_change() -> None:
    harness = Harness()
    harness.wait(1, "a", "first")
    harness.resolver.run_next()
    harness.resolver.changed(7)
    harness.wait(1, "a", "second")
    assert [one.waiting for one in harness.run()] == [["first"], ["second"]]


def test_errors_are_outcomes_and_the_next_filter_is_evaluated(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    harness.wait("text", "a")
    harness.wait(1, "b")
    harness.wait(2, "c")

    def fail(step: int) -> None:
        if harness.steps == [1]:
            raise ZeroDivisionError

    harness.between = fail
    outcomes = {one.waiting[0]: one.outcome for one in harness.run()}
    assert isinstance(outcomes["a-text"], InvalidFilter)
    assert isinstance(outcomes["b-1"], InternalError)
    assert callable(outcomes["c-2"])
    assert "could not be evaluated" in caplog.text


def test_the_thread_ends_with_its_resolver() -> None:
    harness = Harness()
    resolver: FilterResolver[str] = FilterResolver(harness.wake)
    content = filter_bytes({"type": "eq", "key": "n", "value": 2})
    resolver.wait_for(7, content, harness.collection, "a", ["one"], 1 << 62)
    resolver.close()
    resolver.close()
    assert len(resolver.take_done()) <= 1


def test_a_filter_for_which_no_thread_can_be_started_is_refused_and_the_next_one_is_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, done = Harness(), threading.Event()
    resolver: FilterResolver[str] = FilterResolver(done.set)
    first, second = (filter_bytes({"type": "eq", "key": "n", "value": number}) for number in (1, 2))
    with monkeypatch.context() as limited:
        permit_threads(limited)
        resolver.wait_for(7, first, harness.collection, "a", ["one"], 1 << 62)
        refused = resolver.take_done()
    assert [(one.waiting, type(one.outcome)) for one in refused] == [(["one"], Overloaded)]
    assert (done.is_set(), resolver.unfinished) == (True, ())
    done.clear()
    resolver.wait_for(7, second, harness.collection, "a", ["two"], 1 << 62)
    assert done.wait(60)
    assert [(one.waiting, one.outcome) for one in resolver.take_done()] == [(["two"], list)]
    assert harness.steps == [2, 2]
    resolver.close()
