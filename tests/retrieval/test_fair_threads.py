"""Threads shared between API keys take turns, and what waits is bounded and can be cancelled."""

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from runtime.errors import Overloaded, Unavailable
from runtime.retrieval.fair_threads import FairThreads, Threads
from runtime.serving.http.server import run_process
from runtime.testing.waiting import until
from tests.thread_limit import permit_threads

SOON_S = 60.0


class Harness:
    """One thread on a clock of its own, with jobs that hold it until they are released."""

    def __init__(self) -> None:
        self.now = 0.0
        self.threads = FairThreads(1, "tests", limit=6, clock=lambda: self.now)
        self.began: list[str] = []
        self._releases: dict[str, threading.Event] = {}
        self._begins: dict[str, threading.Event] = {}

    def start(self, name: str, flow: int) -> Future[str]:
        release, begin = self._releases[name], self._begins[name] = threading.Event(), threading.Event()

        def hold() -> str:
            self.began.append(name)
            begin.set()
            assert release.wait(SOON_S)
            return name

        return self.threads.submit(flow, hold)

    def start_now(self, name: str, flow: int) -> Future[str]:
        """Start a job while the thread is free; return once it holds it."""
        job = self.start(name, flow)
        assert self._begins[name].wait(SOON_S)
        return job

    def run(self, name: str, used: float) -> None:
        """Let a job run for some time, once it has begun."""
        assert self._begins[name].wait(SOON_S)
        self.now += used
        self._releases[name].set()

    def end(self) -> None:
        for release in self._releases.values():
            release.set()
        assert self.threads.close(SOON_S)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.end()


def test_a_key_with_many_waiting_goes_after_one_that_has_used_less(harness: Harness) -> None:
    jobs = [harness.start_now("storm 0", 1), harness.start("storm 1", 1), harness.start("storm 2", 1)]
    jobs += [harness.start(f"other {n}", 2) for n in range(2)]
    order = [("storm 0", 10.0), ("other 0", 1.0), ("other 1", 1.0), ("storm 1", 10.0), ("storm 2", 10.0)]
    for name, used in order:
        harness.run(name, used)
    assert [job.result(SOON_S) for job in jobs] == ["storm 0", "storm 1", "storm 2", "other 0", "other 1"]
    assert harness.began == [name for name, _ in order]


def test_a_cancelled_job_does_not_run_and_one_that_runs_is_not_cancelled(harness: Harness) -> None:
    first = harness.start_now("first", 1)
    second, third = harness.start("second", 1), harness.start("third", 1)
    assert (first.cancel(), second.cancel()) == (False, True)
    harness.run("first", 1.0)
    harness.run("third", 1.0)
    assert (first.result(SOON_S), third.result(SOON_S)) == ("first", "third")
    assert harness.began == ["first", "third"]


def test_what_waits_is_bounded_and_dropped_at_the_end(harness: Harness) -> None:
    harness.start_now("holds", 1)
    waiting = [harness.start(f"waits {n}", 1) for n in range(6)]
    with pytest.raises(Overloaded, match="6 requests wait for tests, the limit"):
        harness.start("too many", 1)
    assert not harness.threads.close(0.0)
    assert all(job.cancelled() for job in waiting)
    with pytest.raises(Unavailable, match="the node is stopping"):
        harness.start("later", 1)


def test_a_job_for_which_no_thread_can_be_started_is_refused_and_a_later_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, permitted, refused = FairThreads(2, "tests"), permit_threads(monkeypatch), list[int]()
    with pytest.raises(Overloaded, match="tests_0: can't start new thread: the limit of processes and threads"):
        threads.submit(0, lambda: refused.append(1))
    for more in (1, 0, 1):
        permitted += [None] * more
        assert threads.submit(0, threading.active_count).result(SOON_S)
    assert threads.close(SOON_S)
    assert not refused


def test_an_executors_jobs_wait_for_the_threads_that_there_are_and_a_refused_one_is_not_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, permitted = Threads(2, "tests"), permit_threads(monkeypatch)
    done, go_on = list[str](), threading.Event()
    with pytest.raises(Overloaded, match="the limit of processes and threads"):
        threads.submit(done.append, "refused")
    permitted.append(None)
    first = threads.submit(go_on.wait, SOON_S)
    until(first.running)
    second = threads.submit(done.append, "second")  # no thread is idle, and none can be started
    go_on.set()
    second.result(SOON_S)
    assert done == ["second"]
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(SOON_S)
    go_on.clear()
    third = threads.submit(go_on.wait, SOON_S)
    until(third.running)
    dropped = threads.submit(done.append, "dropped")
    threads.shutdown(wait=False, cancel_futures=True)
    assert dropped.cancelled()
    go_on.set()
    assert third.result(SOON_S)


def test_what_blocks_in_a_process_of_http_waits_for_the_threads_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    async def serve() -> None:
        await asyncio.to_thread(int)
        permit_threads(monkeypatch)
        first = asyncio.create_task(asyncio.to_thread(go_on.wait, SOON_S))
        await asyncio.sleep(0)
        second = asyncio.create_task(asyncio.to_thread(int, "7"))
        await asyncio.sleep(0)
        go_on.set()
        assert await first
        assert await second == 7
        monkeypatch.undo()

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    try:
        run_process(serve())
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
