"""A rolling reload of pool workers stops at the first refusal; the readers of documents follow."""

import random
from collections.abc import Iterator

import pytest

from runtime.node.config import SloSection, parse_config
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import PoolMetrics, RetrievingMetrics
from runtime.node.placement.layout import lay_out
from runtime.node.placement.plan import WorkerPlan
from runtime.node.supervisor.backoff import Backoff
from runtime.node.supervisor.reload import ReloadStatus, RollingReload
from runtime.node.supervisor.supervised_worker import Phase, SupervisedWorker


class ReloadHarness:
    def __init__(self) -> None:
        collections = [{"name": name, "path": f"/{name}", "required": False} for name in ("docs", "code")]
        plan = lay_out(parse_config({"pool": {"workers": 2}, "collections": collections}))
        self.workers = [self._worker(place) for place in plan.of_role("pool")]
        self.frontend = self._worker(plan.of_role("frontend")[0])
        self.reload = RollingReload(self.workers, ["docs", "code"])

    def _worker(self, place: WorkerPlan) -> SupervisedWorker:
        table = WorkerTable.create(place.role, place.name, SloSection())
        return SupervisedWorker(place, table, Backoff(random.Random(0)), phase=Phase.READY)

    def asked(self, worker: int) -> tuple[float, float]:
        """Return the number and collection of the reload requested from a worker."""
        table = self.workers[worker].table
        return table.knob("reload"), table.knob("reload_of")

    def answer(self, worker: int, number: int, refused: str = "") -> None:
        table, pool = self.workers[worker].table, self.workers[worker].placement.role == "pool"
        metrics = PoolMetrics if pool else RetrievingMetrics
        table.set(metrics.RELOAD, number)
        table.set(metrics.RELOAD_REFUSED, bool(refused))
        table.note = refused

    def steps(self) -> ReloadStatus:
        for _ in range(4):
            self.reload.step()
        return self.reload.status()


@pytest.fixture
def harness() -> Iterator[ReloadHarness]:
    made = ReloadHarness()
    yield made
    for table in {worker.table for worker in (*made.workers, made.frontend)}:
        table.close()


def test_workers_reload_one_after_the_other(harness: ReloadHarness) -> None:
    assert not harness.reload.request("code").finished
    assert harness.steps() == ReloadStatus(1, False)
    assert harness.asked(0) == (1.0, 1.0)
    assert harness.asked(1)[0] != 1.0
    harness.answer(0, 1)
    assert harness.steps() == ReloadStatus(1, False, ("pool-0",))
    assert harness.asked(1) == (1.0, 1.0)
    harness.answer(1, 1)
    assert harness.steps() == ReloadStatus(1, True, ("pool-0", "pool-1"))


def test_a_refusal_ends_the_reload_with_its_reason(harness: ReloadHarness) -> None:
    harness.reload.request("")
    harness.steps()
    assert harness.asked(0) == (1.0, -1.0)
    harness.answer(0, 1, "collection docs: not reloaded: damaged")
    assert harness.steps() == ReloadStatus(1, True, (), "pool-0: collection docs: not reloaded: damaged")
    assert harness.asked(1)[0] != 1.0
    harness.reload.request("")
    assert harness.steps() == ReloadStatus(2, False)


def test_a_starting_worker_reloads_when_ready_and_a_stopped_one_is_skipped(
    harness: ReloadHarness,
) -> None:
    harness.workers[0].phase, harness.workers[1].phase = Phase.STARTING, Phase.BACKOFF
    harness.reload.request("")
    assert harness.steps() == ReloadStatus(1, False)
    harness.workers[0].phase = Phase.READY
    harness.steps()
    harness.answer(0, 1)
    assert harness.steps() == ReloadStatus(1, True, ("pool-0",))


def test_a_worker_that_dies_during_its_reload_reports_after_its_restart(harness: ReloadHarness) -> None:
    harness.reload.request("")
    harness.steps()
    harness.workers[0].phase = Phase.BACKOFF
    assert harness.steps() == ReloadStatus(1, False)
    harness.workers[0].phase = Phase.READY
    harness.answer(0, 1)
    assert harness.steps().workers == ("pool-0",)


def test_an_unknown_collection_is_refused(harness: ReloadHarness) -> None:
    assert harness.reload.request("other").error == "no collection 'other' on this node; known: docs, code"
    assert harness.steps() == ReloadStatus(0, True)


@pytest.mark.parametrize("refused", ["", "collection docs: documents.sqlite is damaged"])
def test_a_reload_ends_when_readers_have_opened_the_documents_or_cannot(harness: ReloadHarness, refused: str) -> None:
    harness.workers.insert(0, harness.frontend)
    del harness.workers[2]
    harness.reload.request("docs")
    harness.steps()
    assert harness.asked(0)[0] != 1.0  # before there is anything new
    harness.answer(1, 1)
    assert harness.steps() == ReloadStatus(1, False, ("pool-0",))
    assert harness.asked(0)[0] == 1.0
    harness.answer(0, 1, refused)
    served = ("pool-0",) if refused else ("pool-0", "frontend-0")
    assert harness.steps() == ReloadStatus(1, True, served, refused and f"frontend-0: {refused}")
