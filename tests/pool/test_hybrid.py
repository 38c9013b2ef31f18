"""Tests of hybrid searches through a pool: keyword and vector results of one build and one filter are fused."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import DeadlineExceeded, InvalidRequest
from runtime.node.metrics.worker_metrics import PoolMetrics
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.attributes.filters import filter_bytes
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.neighbors import FUSION_DEPTH
from runtime.retrieval.passages import Passage
from runtime.retrieval.retrieval_steps import RetrievalResult
from runtime.retrieval.retriever import Retriever
from runtime.testing.pool import InProcessPool, plan_of
from runtime.testing.waiting import until
from tests.pool.conftest import MakePool
from tests.pool.rebuilds import LATER_NS, retriever
from tests.pool.written_collection import tenant_filter
from tests.queries import query_of

ROWS, DIM = 300, 16
TENANTS = ("acme", "blue")


def build(path: Path, shards: int = 1, generation: int = 1) -> None:
    """Vectors are unrelated to the texts: only keyword search finds a number's row."""
    documents = [
        Document(f"g{generation}-{row}", "", f"entry n{row} s{row // 10}", {"tenant": TENANTS[row % 2]})
        for row in range(ROWS)
    ]
    vectors = np.random.default_rng(generation).normal(size=(ROWS, DIM)).astype(np.float32)
    bulk_load.build(documents, path, embedder=f"hashing-{DIM}", vectors=vectors, shards=shards, force=True)


def serve(plan: NodePlan, make_pool: MakePool) -> list[InProcessPool]:
    return [make_pool(plan, worker.name).start() for worker in plan.of_role("pool")]


@pytest.fixture(params=[1, 2])
def plan(tmp_path: Path, request: pytest.FixtureRequest) -> NodePlan:
    build(tmp_path / "docs", request.param)
    return plan_of(tmp_path / "docs", shards=request.param, workers=request.param)


@pytest.fixture
def asker(plan: NodePlan, make_pool: MakePool) -> Iterator[Retriever]:
    serve(plan, make_pool)
    with retriever(plan) as made:
        yield made


def ended(retriever: Retriever, ticket: int) -> RetrievalResult:
    found: list[RetrievalResult] = []

    def poll() -> None:
        found.extend(retriever.poll())
        retriever.sleep((), 1)

    until(lambda: bool(found), poll)
    assert [one.ticket for one in found] == [ticket]
    return found[0]


def ask(retriever: Retriever, text: str, k: int = 4, build: str = "", **options: Any) -> tuple[Passage, ...]:
    found = ended(retriever, retriever.submit(query_of(text, "docs", k, "prefill", LATER_NS, **options), build))
    if found.error is not None:
        raise found.error
    return found.passages


def test_keywords_find_passages_that_the_vector_misses(asker: Retriever) -> None:
    plain = ask(asker, "which is n77?")
    assert "g1-77" not in [passage.id for passage in plain]
    both = ask(asker, "which is n77?", hybrid=0.5)
    assert both[0].id == plain[0].id or both[0].id == "g1-77"
    assert {passage.id for passage in both[:2]} == {plain[0].id, "g1-77"}
    assert len(both) == 4
    assert {passage.id: passage.distance for passage in plain}[plain[0].id] == pytest.approx(
        {passage.id: passage.distance for passage in both}[plain[0].id]
    )
    far = max(passage.distance for passage in plain)
    assert next(passage.distance for passage in both if passage.id == "g1-77") > far, "distances are unchanged"


def test_more_results_than_wanted_are_fused(asker: Retriever) -> None:
    """The best of both is neither the nearest nor the one with the best words."""
    found = set[bool]()
    for number in range(10):
        text, scores = f"entry s{number}", defaultdict[str, float](float)
        ranked = [[one.id for one in ask(asker, text, FUSION_DEPTH, hybrid=side)] for side in (0.0, 1.0)]
        for ids in ranked:
            for rank, id in enumerate(ids, 1):
                scores[id] += 1 / (60 + rank)
        (best,) = ask(asker, text, k=1, hybrid=0.5)
        assert scores[best.id] == max(scores.values())
        found.add(best.id not in (ranked[0][0], ranked[1][0]))
    assert True in found


def test_a_filter_applies_to_keywords_and_vectors(asker: Retriever) -> None:
    found = ask(asker, "all of s7", k=8, hybrid=1.0, filter=filter_bytes(tenant_filter("blue")))
    assert {passage.id for passage in found[:5]} == {f"g1-{row}" for row in range(71, 80, 2)}
    assert {passage.attributes["tenant"] for passage in found} == {"blue"}
    assert len(found) == 8


def test_a_query_whose_keyword_search_is_slow_ends_at_its_deadline(asker: Retriever) -> None:
    found = ended(asker, asker.submit(query_of("all of s7", "docs", 4, "decode", 1, hybrid=0.5)))
    assert isinstance(found.error, DeadlineExceeded)


def test_keyword_results_are_of_the_build_that_answers(tmp_path: Path, make_pool: MakePool) -> None:
    build(tmp_path / "docs")
    plan = plan_of(tmp_path / "docs")
    (pool,) = serve(plan, make_pool)
    with retriever(plan) as asker:
        first = ended(asker, asker.submit(query_of("n77", "docs", 4, "prefill", LATER_NS, hybrid=1.0)))
        assert first.passages[0].id == "g1-77"
        build(tmp_path / "docs", generation=2)
        assert ask(asker, "n78", hybrid=1.0)[0].id == "g1-78", "the build that the pool still serves"
        assert ask(asker, "n79", hybrid=1.0, build=first.build)[0].id == "g1-79"
        pool.table.set_knob("reload_of", -1.0)
        pool.table.set_knob("reload", 1.0)
        until(lambda: pool.metric(PoolMetrics.RELOAD) == 1.0, lambda: asker.sleep((), 1))
        until(lambda: ask(asker, "n78", hybrid=1.0)[0].id == "g2-78")


def test_keywords_are_not_searched_for_a_vector(asker: Retriever) -> None:
    with pytest.raises(InvalidRequest, match="use query instead of vector"):
        asker.submit(query_of(None, vector=[1.0] * DIM, hybrid=0.5))
