"""Worker lifecycle: desired and actual state, on a virtual clock without processes."""

import itertools
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest
from msgspec.structs import replace

from runtime.node.config import NodeConfig, SloSection
from runtime.node.metrics.table import State, WorkerTable
from runtime.node.placement.plan import WorkerPlan
from runtime.node.supervisor.backoff import Backoff
from runtime.node.supervisor.forks import Forked
from runtime.node.supervisor.lifecycle import Lifecycle
from runtime.node.supervisor.rolling_restart import RollingRestart
from runtime.node.supervisor.standby import StandbyWorkers
from runtime.node.supervisor.supervised_worker import Desired, Phase, SupervisedWorker
from runtime.node.worker import DRAIN_SIGNAL


@dataclass
class Node:
    """Two pool workers on a machine that cannot start processes."""

    now_s: float = 1000.0
    starts: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lifecycle = Lifecycle(NodeConfig(), self._spawn, lambda: self.now_s)
        self.workers = [self._worker(index) for index in range(2)]
        self.rolling = RollingRestart(self.workers)

    def _worker(self, index: int) -> SupervisedWorker:
        place = WorkerPlan("pool", index, "cpu", (), 1)
        return SupervisedWorker(
            place, WorkerTable.create("pool", place.name, SloSection()), Backoff(random.Random(index))
        )

    def _spawn(self, worker: SupervisedWorker, by_standby: bool) -> None:
        self.starts.append((worker.name, self.now_s))
        raise OSError("no more processes")

    def pass_time(self, seconds: float, step_s: float = 0.25) -> None:
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            self.lifecycle.reap(self.workers)
            self.rolling.step(self.now_s)
            self.lifecycle.reconcile(self.workers)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    for worker in made.workers:
        worker.table.close()


def cannot_run(node: Node) -> SupervisedWorker:
    """A node whose first worker ran before and can no longer start; the second runs."""
    first, second = node.workers
    first.was_ready, second.phase = True, Phase.READY
    node.pass_time(600.0)
    assert first.cannot_run
    return first


def test_a_worker_that_cannot_run_is_retried_with_back_off_up_to_a_minute(node: Node) -> None:
    first = node.workers[0]
    first.was_ready = True
    node.pass_time(3600.0)
    times = [when for name, when in node.starts if name == "pool-0"]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps[:5]) < 4.0
    assert all(29.0 < gap <= 60.25 for gap in gaps[-20:])
    assert first.desired is Desired.RUN


def test_the_workers_note_has_the_reason_and_the_restart_time(node: Node) -> None:
    first = cannot_run(node)
    first.due = node.now_s + 12.0
    assert first.note(node.now_s) == ("cannot run (could not be started: no more processes); restarts in 12 s")


def test_the_workers_note_reports_a_missing_heartbeat(node: Node) -> None:
    first = node.workers[0]
    first.phase = Phase.READY
    first.table.beat()
    first.clock_ns = lambda: 0
    assert first.note(node.now_s) == ""
    now_ns = time.monotonic_ns()
    eight_later = now_ns + int((8.1 - first.table.age_s(now_ns)) * 1e9)
    first.clock_ns = lambda: eight_later
    assert first.note(node.now_s) == "no heartbeat for 8 s"


def test_a_requested_restart_skips_the_back_off(node: Node) -> None:
    first = cannot_run(node)
    first.due = node.now_s + 50.0
    starts = len(node.starts)
    node.pass_time(1.0)
    assert len(node.starts) == starts
    assert node.rolling.request("pool-0") == ""
    node.pass_time(0.25)
    assert len(node.starts) == starts + 1


def test_a_worker_that_cannot_run_does_not_block_restarts_of_others(node: Node) -> None:
    first, second = node.workers
    first.was_ready, second.phase = True, Phase.READY
    node.rolling.request("pool-1")
    node.lifecycle.reconcile(node.workers)
    node.rolling.step(node.now_s)
    assert [second.desired] == [Desired.RUN]  # the first may be back in a moment
    node.pass_time(10.0)
    assert first.cannot_run
    assert [second.desired] == [Desired.RESTART]


@pytest.mark.parametrize(
    ("phase", "failed", "waits"), [("standby", 0, False), ("standby", 1, True), ("starting", 0, True)]
)
def test_a_dead_worker_is_replaced_at_once_by_a_standby(node: Node, phase: str, failed: int, waits: bool) -> None:
    spare, dead = node.workers
    spare.placement, spare.phase = replace(spare.placement, spare=0), Phase(phase)
    dead.due, dead.failed_starts = node.now_s + 50.0, failed
    assert StandbyWorkers([spare], [dead]).step(may_start=True) == ()  # no other is started before that one is
    assert (dead.due > node.now_s) == waits


def test_a_slow_start_is_reported_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    class Loading:
        pid, returncode = 0, None

        def poll(self) -> None:
            return None

    def spawn(worker: SupervisedWorker, by_standby: bool) -> None:
        worker.process = cast("Forked", Loading())

    node.lifecycle = Lifecycle(NodeConfig(), spawn, lambda: node.now_s)
    node.pass_time(10.0)
    assert not caplog.messages
    node.pass_time(100.0)
    assert [message.partition(":")[0] for message in caplog.messages] == ["pool-0 still starts", "pool-1 still starts"]


class Told:
    """A process that ignores signals."""

    pid, returncode = 0, None

    def __init__(self) -> None:
        self.signals: list[int] = []

    def poll(self) -> None:
        return None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.mark.parametrize("restarts", [False, True])
def test_in_a_stopping_node_no_worker_waits_for_an_ended_frontend(node: Node, restarts: bool) -> None:
    """Neither a restarting worker nor one whose readiness has not been observed yet."""
    first, told = node.workers[0], Told()
    first.table.begin(1, 0)
    first.table.state, first.epoch = State.READY, 1
    first.table.beat()
    first.process, first.phase = cast("Forked", told), Phase.STARTING
    first.started = first.due = node.now_s
    if restarts:
        first.desired = Desired.RESTART
        first.phase = Phase.READY
        node.lifecycle.reconcile([first])
    node.lifecycle.stop([first], by=node.now_s + 30.0)
    assert told.signals == [DRAIN_SIGNAL] * restarts + [signal.SIGTERM]
    assert (first.phase, first.desired, first.due) == (Phase.DRAINING, Desired.STOP, node.now_s + 30.0)
