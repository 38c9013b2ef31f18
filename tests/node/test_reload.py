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


class Stand:
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
        table = self.workers[worker].table
        table.set(PoolMetrics.RELOAD, number)
        table.set(PoolMetrics.RELOAD_REFUSED, bool(refused))
        table.note = refused

    def steps(self) -> ReloadStatus:
        for _ in range(4):
            self.reload.step()
        return self.reload.status()


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    for table in {worker.table for worker in (*made.workers, made.frontend)}:
        table.close()


def test_workers_reload_one_after_the_other(stand: Stand) -> None:
    assert not stand.reload.request("code").finished
    assert stand.steps() == ReloadStatus(1, False)
    assert stand.asked(0) == (1.0, 1.0)
    assert stand.asked(1)[0] != 1.0
    stand.answer(0, 1)
    assert stand.steps() == ReloadStatus(1, False, ("pool-0",))
    assert stand.asked(1) == (1.0, 1.0)
    stand.answer(1, 1)
    assert stand.steps() == ReloadStatus(1, True, ("pool-0", "pool-1"))


def test_a_refusal_ends_the_reload_with_its_reason(stand: Stand) -> None:
    stand.reload.request("")
    stand.steps()
    assert stand.asked(0) == (1.0, -1.0)
    stand.answer(0, 1, "collection docs: not reloaded: damaged")
    assert stand.steps() == ReloadStatus(1, True, (), "pool-0: collection docs: not reloaded: damaged")
    assert stand.asked(1)[0] != 1.0
    stand.reload.request("")
    assert stand.steps() == ReloadStatus(2, False)


def test_a_starting_worker_reloads_when_ready_and_a_stopped_one_is_skipped(
    stand: Stand,
) -> None:
    stand.workers[0].phase, stand.workers[1].phase = Phase.STARTING, Phase.BACKOFF
    stand.reload.request("")
    assert stand.steps() == ReloadStatus(1, False)
    stand.workers[0].phase = Phase.READY
    stand.steps()
    stand.answer(0, 1)
    assert stand.steps() == ReloadStatus(1, True, ("pool-0",))


def test_a_worker_that_dies_during_its_reload_reports_after_its_restart(stand: Stand) -> None:
    stand.reload.request("")
    stand.steps()
    stand.workers[0].phase = Phase.BACKOFF
    assert stand.steps() == ReloadStatus(1, False)
    stand.workers[0].phase = Phase.READY
    stand.answer(0, 1)
    assert stand.steps().workers == ("pool-0",)


def test_an_unknown_collection_is_refused(stand: Stand) -> None:
    assert stand.reload.request("other").error == "no collection 'other' on this node; known: docs, code"
    assert stand.steps() == ReloadStatus(0, True)


def test_a_reload_ends_when_readers_have_opened_the_documents(stand: Stand) -> None:
    stand.workers.insert(0, stand.frontend)
    del stand.workers[2]
    stand.reload.request("docs")
    stand.steps()
    assert stand.frontend.table.knob("reload") != 1.0  # before there is anything new
    stand.answer(1, 1)
    assert stand.steps() == ReloadStatus(1, False, ("pool-0",))
    assert stand.frontend.table.knob("reload") == 1.0
    stand.frontend.table.set(RetrievingMetrics.RELOAD, 1)
    assert stand.steps() == ReloadStatus(1, True, ("pool-0", "frontend-0"))


def test_a_worker_that_cannot_use_the_documents_ends_the_reload_with_its_reason(stand: Stand) -> None:
    stand.workers.insert(0, stand.frontend)
    del stand.workers[2]
    stand.reload.request("docs")
    stand.steps()
    stand.answer(1, 1)
    stand.steps()
    table = stand.frontend.table
    table.note = "collection docs: documents.sqlite is damaged"
    table.set(RetrievingMetrics.RELOAD_REFUSED, 1)
    table.set(RetrievingMetrics.RELOAD, 1)
    assert stand.steps() == ReloadStatus(
        1, True, ("pool-0",), "frontend-0: collection docs: documents.sqlite is damaged"
    )
