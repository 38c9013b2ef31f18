"""Tests of a collection rebuilt while it is served: no answer combines an id of one build with a text of another."""

from pathlib import Path

import pytest

from runtime.errors import CollectionReplaced, Unavailable
from runtime.testing.pool import plan_of
from runtime.testing.waiting import until
from tests.pool.client_helpers import attached
from tests.pool.conftest import MakePool
from tests.pool.rebuilds import LATER_NS, ask, build, generation_of, killed, retriever
from tests.queries import query_of


def test_pools_of_a_build_without_documents_are_skipped_and_the_library_reports_the_reason(
    tmp_path: Path, make_pool: MakePool
) -> None:
    build(tmp_path / "docs", 1)
    plan = plan_of(tmp_path / "docs")
    make_pool(plan).start()
    build(tmp_path / "docs", 2)
    with retriever(plan) as asking:  # a worker started after the rebuild
        attached(asking.client)
        with pytest.raises(Unavailable, match="contains another build than the pools serve; `trinity index reload`"):
            ask(asking)
        assert list(asking.registry.unavailable) == ["docs"]


def test_shards_of_different_builds_are_never_merged(tmp_path: Path, make_pool: MakePool) -> None:
    build(tmp_path / "docs", 1, shards=2)
    plan = plan_of(tmp_path / "docs", shards=2, workers=2)
    first, second = make_pool(plan, "pool-0").start(), make_pool(plan, "pool-1").start()
    with retriever(plan) as asking:
        attached(asking.client)
        assert generation_of(ask(asking).passages) == 1
        build(tmp_path / "docs", 2, shards=2)
        killed(first)
        make_pool(plan, "pool-0", epoch=2).start()
        attached(asking.client)
        ticket = asking.submit(query_of("what?", "docs", 5, "decode", LATER_NS))  # no build has both shards
        assert all(found.ticket != ticket for _ in range(20) for found in asking.poll())
        killed(second)
        make_pool(plan, "pool-1", epoch=2).start()
        until(lambda: all(pool.state != "lost" for pool in asking.client.statistics().pools), asking.poll)
        assert generation_of(ask(asking).passages) == 2


def test_a_text_is_embedded_again_after_a_rebuild_with_another_embedder(tmp_path: Path, make_pool: MakePool) -> None:
    build(tmp_path / "docs", 1)
    plan = plan_of(tmp_path / "docs")
    first = make_pool(plan).start()
    with retriever(plan) as asking:
        attached(asking.client)
        ask(asking)
        build(tmp_path / "docs", 2, dim=24)
        with first.held():
            ticket = asking.submit(query_of("what?", "docs", 5, "decode", LATER_NS))
        killed(first)
        make_pool(plan, epoch=2).start()
        attached(asking.client)
        found = ask(asking)
        assert generation_of(found.passages) == 2
        assert asking.registry.dims["docs"] == 24
        assert ticket != found.ticket


def test_probes_of_an_answer_use_its_first_build_or_are_dropped(tmp_path: Path, make_pool: MakePool) -> None:
    build(tmp_path / "docs", 1)
    plan = plan_of(tmp_path / "docs")
    first = make_pool(plan).start()
    with retriever(plan) as asking:
        attached(asking.client)
        began = ask(asking)
        same = ask(asking, build=began.build)
        assert (same.build, generation_of(same.passages)) == (began.build, 1)
        build(tmp_path / "docs", 2)
        killed(first)
        make_pool(plan, epoch=2).start()
        attached(asking.client)
        assert generation_of(ask(asking).passages) == 2
        left_out = ask(asking, build=began.build)
        assert isinstance(left_out.error, CollectionReplaced)
        assert left_out.passages == ()
