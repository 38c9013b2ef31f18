"""Contract tests of every engine: slots are admitted, advanced, paused, resumed, released; bad calls are rejected."""

from collections.abc import Iterator

import numpy as np
import pytest

from gpu import (
    Engine,
    GraphIndex,
    InvalidParams,
    InvalidSlot,
    InvalidVector,
    NoFreeSlot,
    SearchParams,
    UnknownCollection,
)
from gpu.index.rows import FloatArray
from tests.gpu.backends import BACKENDS, Backend
from tests.gpu.datasets import clustered

DIM = 24


@pytest.fixture(scope="module")
def index() -> GraphIndex:
    return GraphIndex.build(
        clustered(np.random.default_rng(1), 800, DIM), metric="l2", ids=np.arange(800) + 5000, neighbor_codes=False
    )


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param
    return backend


@pytest.fixture
def engine(backend: Backend, index: GraphIndex) -> Iterator[Engine]:
    with backend.engine({"docs": index}, slots=4) as engine:
        yield engine


def query(number: int = 0) -> FloatArray:
    return clustered(np.random.default_rng(100 + number), 1, DIM).reshape(DIM)


def finish(engine: Engine, slot: int) -> None:
    while slot not in engine.extend():
        pass


def test_a_query_in_a_slot_returns_the_result_of_search(backend: Backend, engine: Engine, index: GraphIndex) -> None:
    slot = engine.admit(query(), SearchParams(k=5, top_m=32, search_width=2), "docs")
    finish(engine, slot)
    ids, distances = engine.result(slot)
    expected = index.search(query()[None], k=5, top_m=32, search_width=2)
    assert ids.tolist() == expected[0][0].tolist()
    np.testing.assert_allclose(distances, expected[1][0], rtol=0 if backend.sums_as_search else 1e-5)


def test_slot_counts_follow_the_life_of_a_query(engine: Engine) -> None:
    assert (engine.free_slots, engine.active_slots) == (4, 0)
    slot = engine.admit(query(), SearchParams(), "docs")
    assert (engine.free_slots, engine.active_slots) == (3, 1)
    engine.pause(slot)
    assert (engine.free_slots, engine.active_slots) == (3, 0)
    engine.resume(slot)
    finish(engine, slot)
    assert (engine.free_slots, engine.active_slots) == (3, 0)
    engine.release(slot)
    assert (engine.free_slots, engine.active_slots) == (4, 0)


def test_a_paused_slot_makes_no_progress_and_resumes_where_it_stopped(engine: Engine, index: GraphIndex) -> None:
    slot = engine.admit(query(), SearchParams(), "docs")
    other = engine.admit(query(1), SearchParams(), "docs")
    engine.extend()
    assert 0 <= engine.padded_slots <= engine.free_slots
    engine.pause(slot)
    finish(engine, other)
    assert engine.extends(slot) == 1
    engine.resume(slot)
    finish(engine, slot)
    assert engine.result(slot)[0].tolist() == index.search(query()[None], search_width=4)[0][0].tolist()


def test_patience_and_width_save_extends(engine: Engine) -> None:
    wanted = [SearchParams(search_width=1), SearchParams(search_width=1, patience=3), SearchParams(search_width=8)]
    slots = [engine.admit(query(), one, "docs") for one in wanted]
    while engine.active_slots:
        engine.extend()
    plain, patient, wide = (engine.extends(slot) for slot in slots)
    assert patient < plain
    assert wide < plain / 4


def test_a_released_slot_is_reused_without_previous_state(engine: Engine, index: GraphIndex) -> None:
    for slot in [engine.admit(query(number), SearchParams(), "docs") for number in range(4)]:
        engine.extend()
        engine.release(slot)
    slot = engine.admit(query(9), SearchParams(), "docs")
    assert engine.extends(slot) == 0
    finish(engine, slot)
    assert engine.result(slot)[0].tolist() == index.search(query(9)[None], search_width=4)[0][0].tolist()


def test_a_full_batch_rejects_a_query_without_side_effects(engine: Engine) -> None:
    for number in range(4):
        engine.admit(query(number), SearchParams(), "docs")
    with pytest.raises(NoFreeSlot, match="all 4 slots are in use"):
        engine.admit(query(), SearchParams(), "docs")
    assert engine.active_slots == 4


def test_a_rejected_query_takes_no_slot(engine: Engine) -> None:
    with pytest.raises(UnknownCollection, match="'papers' is not loaded; loaded: docs"):
        engine.admit(query(), SearchParams(), "papers")
    with pytest.raises(InvalidVector, match=f"needs .*{DIM}"):
        engine.admit(query()[:-1], SearchParams(), "docs")
    with pytest.raises(InvalidVector, match="must be finite"):
        engine.admit(np.full(DIM, np.nan), SearchParams(), "docs")
    with pytest.raises(InvalidParams, match="top_m is 513; this engine's limit is 512"):
        engine.admit(query(), SearchParams(top_m=513), "docs")
    with pytest.raises(InvalidParams, match="search_width is 9; this engine's limit is 8"):
        engine.admit(query(), SearchParams(search_width=9), "docs")
    assert engine.free_slots == 4


def test_a_slot_in_the_wrong_state_is_rejected(engine: Engine) -> None:
    for call in (engine.result, engine.release, engine.pause, engine.resume, engine.extends):
        with pytest.raises(InvalidSlot, match="slot 0 is free"):
            call(0)
        with pytest.raises(InvalidSlot, match=r"outside 0\.\.3"):
            call(4)
    slot = engine.admit(query(), SearchParams(), "docs")
    with pytest.raises(InvalidSlot, match="is running; it must be finished"):
        engine.result(slot)
    with pytest.raises(InvalidSlot, match="is running; it must be paused"):
        engine.resume(slot)


def test_an_extend_without_queries_finishes_nothing(engine: Engine) -> None:
    assert engine.extend().tolist() == []


def test_engine_limits_are_validated(backend: Backend, index: GraphIndex) -> None:
    with pytest.raises(InvalidParams, match=r"slots is 0, outside 1\.\.4096"), backend.engine({"docs": index}, slots=0):
        pass
    with (
        pytest.raises(InvalidParams, match=r"max_top_m is 5000, outside 1\.\.4096"),
        backend.engine({"docs": index}, max_top_m=5000),
    ):
        pass


def test_two_indexes_of_different_dims_and_dtypes_share_the_slots(backend: Backend, index: GraphIndex) -> None:
    wide = GraphIndex.build(clustered(np.random.default_rng(2), 500, 72), metric="cosine", dtype="float16", degree=16)
    params, queries = SearchParams(5, 32, 2), clustered(np.random.default_rng(9), 1, 72)
    with backend.engine({"docs": index, "wide": wide}, slots=4) as engine:
        assert dict(engine.dims) == {"docs": DIM, "wide": 72}
        slots = [engine.admit(query(), params, "docs"), engine.admit(queries[0], params, "wide")]
        while engine.active_slots:
            engine.extend()
        found = [engine.result(slot)[0].tolist() for slot in slots]
    assert found == [
        index.search(query()[None], 5, 32, 2)[0][0].tolist(),
        wide.search(queries, 5, 32, 2)[0][0].tolist(),
    ]


def test_a_step_is_one_extend_unless_a_launch_makes_several(engine: Engine) -> None:
    engine.interrupt_when(lambda: True)
    slot = engine.admit(query(), SearchParams(), "docs")
    engine.extend()
    assert (engine.extends_made, engine.extends(slot)) == (1, 1)
