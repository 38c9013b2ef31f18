"""Tests with rebuilds, reloads and kills of pools under load: every answer is of one build."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.retrieval_steps import RetrievalResult
from runtime.retrieval.retriever import Retriever
from runtime.testing.pool import InProcessPool, plan_of
from runtime.testing.waiting import until
from tests.pool.client_helpers import attached
from tests.pool.conftest import MakePool
from tests.pool.rebuilds import LATER_NS, build, generation_of, killed, retriever
from tests.queries import query_of
from tests.thread_limit import permit_threads

IN_FLIGHT = 6


class Readers:
    """Keeps `IN_FLIGHT` queries running; each must end with passages of one build."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._asked: dict[int, int] = {}  # ticket → number of earlier queries
        self._answers: list[tuple[int, int]] = []  # number of earlier queries, and the build of the answer
        self._count = 0

    def step(self) -> None:
        while len(self._asked) < IN_FLIGHT:
            ticket = self._retriever.submit(query_of(f"question {self._count}", "docs", 4, "decode", LATER_NS))
            self._asked[ticket] = self._count
            self._count += 1
        self._read(self._retriever.poll())
        self._retriever.sleep((), 1)

    def _read(self, found: list[RetrievalResult]) -> None:
        for one in found:
            before = self._asked.pop(one.ticket)
            if one.error is not None:
                raise one.error
            assert len(one.passages) == 4
            self._answers.append((before, generation_of(one.passages)))

    def some(self, count: int = 10) -> set[int]:
        """Return the builds of answers to queries submitted from now on."""
        begin = self._count

        def later() -> list[int]:
            return [build for before, build in self._answers if before >= begin]

        until(lambda: len(later()) >= count, self.step)
        return set(later())


@contextmanager
def reading(plan: NodePlan) -> Iterator[Readers]:
    with retriever(plan) as asking:
        attached(asking.client)
        yield Readers(asking)


def reload(pool: InProcessPool, readers: Readers, number: int) -> bool:
    """Reload as the supervisor does. Return whether the worker has loaded the build."""
    pool.table.set_knob("reload_of", -1.0)
    pool.table.set_knob("reload", float(number))
    until(lambda: pool.metric(PoolMetrics.RELOAD) == number, readers.step)
    return not pool.metric(PoolMetrics.RELOAD_REFUSED)


def test_answers_are_of_the_old_build_before_a_reload_and_of_the_new_one_after(
    tmp_path: Path, make_pool: MakePool
) -> None:
    build(tmp_path / "docs", 1)
    plan = plan_of(tmp_path / "docs")
    pool = make_pool(plan).start()
    with reading(plan) as readers:
        for generation in range(2, 6):
            build(tmp_path / "docs", generation)
            assert readers.some() == {generation - 1}
            assert reload(pool, readers, generation)
            assert readers.some() == {generation}
        until(lambda: len(pool.pool.engine.dims) == 1, readers.step)  # the old build's memory is freed
    assert pool.metric(PoolMetrics.QUERIES_REFUSED) == 0


def _alter_codes(directory: Path) -> None:
    codes = np.load(directory / "segments/0/index" / "codes.npy", mmap_mode="r+")
    codes[0, 0] += 1
    codes.flush()


def _rewrite_documents(directory: Path, change: Callable[[bytes], bytes]) -> None:
    """Write a new file, because others have the old one open."""
    documents = directory / "segments/0/documents.sqlite"
    content = documents.read_bytes()
    documents.unlink()
    documents.write_bytes(change(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_alter_codes, "codes.npy is damaged"),
        (lambda directory: _rewrite_documents(directory, lambda content: content[:-1] + b"?"), "documents.sqlite"),
        (lambda directory: _rewrite_documents(directory, lambda content: content[:1000]), "documents.sqlite"),
        (lambda directory: (directory / "segments/0/documents.sqlite").unlink(), "documents.sqlite"),
    ],
    ids=["codes altered", "documents altered", "documents cut", "documents gone"],
)
def test_a_reload_rejects_a_damaged_build_and_keeps_the_old_one(
    damage: Callable[[Path], None], message: str, tmp_path: Path, make_pool: MakePool
) -> None:
    build(tmp_path / "docs", 1)
    plan = plan_of(tmp_path / "docs")
    pool = make_pool(plan).start()
    with reading(plan) as readers:
        build(tmp_path / "docs", 2)
        damage(tmp_path / "docs")
        assert not reload(pool, readers, 1)
        assert "collection docs: not reloaded: " in pool.table.note
        assert message in pool.table.note
        assert readers.some() == {1}
        build(tmp_path / "docs", 3)
        assert reload(pool, readers, 2)
        assert readers.some() == {3}
    until(lambda: pool.table.note == "")


def test_a_reload_for_which_no_thread_can_be_started_is_refused_and_a_later_one_done(
    tmp_path: Path, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "docs", 1)
    plan = plan_of(tmp_path / "docs")
    pool = make_pool(plan).start()
    with reading(plan) as readers:
        assert readers.some() == {1}
        with monkeypatch.context() as limited:
            permit_threads(limited)
            assert not reload(pool, readers, 1)  # of the same files, which are no less valid for it
            assert "not reloaded: opening: can't start new thread" in pool.table.note
        assert readers.some() == {1}
        build(tmp_path / "docs", 2)
        assert reload(pool, readers, 2)
        assert readers.some() == {2}


def test_a_reload_of_the_served_build_changes_nothing(tmp_path: Path, make_pool: MakePool) -> None:
    build(tmp_path / "docs", 1)
    plan = plan_of(tmp_path / "docs")
    pool = make_pool(plan).start()
    with reading(plan) as readers:
        assert reload(pool, readers, 1)
        assert readers.some() == {1}
        sessions = [client.handle for client in pool.pool.server.client_table.clients if client is not None]
        assert sessions == [1], "it is the first one"


@pytest.mark.parametrize(("shards", "workers", "seed"), [(1, 2, 1), (2, 4, 4)])
def test_no_answer_mixes_builds_under_rebuilds_reloads_and_kills(
    shards: int, workers: int, seed: int, tmp_path: Path, make_pool: MakePool
) -> None:
    chance, generation = random.Random(seed), 1
    build(tmp_path / "docs", generation, shards=shards)
    plan = plan_of(tmp_path / "docs", shards=shards, workers=workers)
    pools = [make_pool(plan, f"pool-{number}").start() for number in range(workers)]
    epochs, reloads = [1] * workers, 0
    with reading(plan) as readers:
        for _ in range(12):
            match chance.choice(("build", "reload", "reload", "kill", "read")):
                case "build":
                    generation += 1
                    build(tmp_path / "docs", generation, shards=shards)
                case "reload":
                    reloads += 1
                    for pool in pools:
                        assert reload(pool, readers, reloads)
                    assert readers.some() == {generation}
                case "kill":
                    number = chance.randrange(workers)
                    killed(pools[number])
                    epochs[number] += 1
                    pools[number] = make_pool(plan, f"pool-{number}", epoch=epochs[number]).start()
                case "read":
                    for _ in range(20):
                        readers.step()
        reloads += 1
        assert all(reload(pool, readers, reloads) for pool in pools)
        assert readers.some() == {generation}
