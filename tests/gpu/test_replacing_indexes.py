"""The contract of every engine: indexes come and go between two extends, and no query notices."""

import numpy as np
import pytest

from gpu import Engine, GraphIndex, InvalidParams, SearchParams, UnknownCollection, slots
from gpu.cuda import upload
from gpu.index.rows import FloatArray
from tests.gpu.cases import clustered
from tests.gpu.engines import BACKENDS, Backend

DIM, FEW = 24, 12
PARAMS = SearchParams(k=5, top_m=32, search_width=2)


def built(seed: int, first_id: int, dim: int = DIM, degree: int = 32) -> GraphIndex:
    vectors = clustered(np.random.default_rng(seed), 600, dim)
    return GraphIndex.build(vectors, metric="l2", degree=degree, ids=np.arange(600) + first_id)


OLD, NEW = built(1, 1000), built(2, 5000)
WIDE = built(3, 9000, dim=72, degree=48)


def query(number: int, dim: int = DIM) -> FloatArray:
    return clustered(np.random.default_rng(100 + number), 1, dim).reshape(dim)


def finished(engine: Engine, slot: int) -> list[int]:
    """The ids of a slot that is released then."""
    while slot not in engine.extend():
        pass
    ids = engine.result(slot)[0].tolist()
    engine.release(slot)
    return [int(id) for id in ids]


def searched(index: GraphIndex, vector: FloatArray) -> list[int]:
    return [int(id) for id in index.search(vector[None], PARAMS.k, PARAMS.top_m, PARAMS.search_width)[0][0]]


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param
    return backend


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have numbers for FEW collections."""
    monkeypatch.setattr(slots, "MAX_COLLECTIONS", FEW)


def test_queries_in_flight_finish_on_the_index_they_began_with_and_new_ones_have_the_new(backend: Backend) -> None:
    with backend.engine({"docs@old": OLD}, slots=4) as engine:
        running = engine.admit(query(0), PARAMS, "docs@old")
        paused = engine.admit(query(1), PARAMS, "docs@old")
        engine.extend()
        engine.extend()
        engine.pause(paused)
        engine.load("docs@new", NEW)
        later = engine.admit(query(0), PARAMS, "docs@new")
        assert not engine.unload("docs@old")
        assert finished(engine, running) == searched(OLD, query(0))
        assert not engine.unload("docs@old")
        engine.resume(paused)
        assert finished(engine, paused) == searched(OLD, query(1))
        assert engine.unload("docs@old")
        assert dict(engine.dims) == {"docs@new": DIM}
        with pytest.raises(UnknownCollection):
            engine.admit(query(0), PARAMS, "docs@old")
        while engine.active_slots:
            engine.extend()
        assert engine.result(later)[0].tolist() == searched(NEW, query(0))


def test_a_finished_query_s_result_is_its_own_after_a_load(backend: Backend) -> None:
    with backend.engine({"docs": OLD}, slots=2) as engine:
        slot = engine.admit(query(3), PARAMS, "docs")
        while slot not in engine.extend():
            pass
        engine.load("other", NEW)
        assert engine.result(slot)[0].tolist() == searched(OLD, query(3))
        assert not engine.unload("docs")
        engine.release(slot)
        assert engine.unload("docs")


def test_a_collection_can_be_replaced_any_number_of_times(backend: Backend, few: None) -> None:
    with backend.engine({"0": OLD}, slots=2) as engine:
        for generation in range(1, FEW + 3):
            index = (OLD, NEW)[generation % 2]
            engine.load(str(generation), index)
            assert engine.unload(str(generation - 1))
        assert finished(engine, engine.admit(query(5), PARAMS, str(generation))) == searched(index, query(5))


def test_a_name_that_is_loaded_is_not_loaded_again_and_one_that_is_not_is_not_unloaded(backend: Backend) -> None:
    with backend.engine({"docs": OLD}, slots=2) as engine:
        with pytest.raises(InvalidParams, match="'docs' is loaded already"):
            engine.load("docs", NEW)
        with pytest.raises(UnknownCollection):
            engine.unload("code")


def test_an_engine_may_have_no_index_until_one_is_loaded(backend: Backend) -> None:
    with backend.engine({}, slots=2) as engine:
        assert dict(engine.dims) == {}
        assert engine.extend().tolist() == []
        engine.load("docs", NEW)
        assert finished(engine, engine.admit(query(7), PARAMS, "docs")) == searched(NEW, query(7))


def test_an_index_with_longer_vectors_and_more_edges_has_room_on_a_cpu_and_is_refused_where_sizes_are_captured(
    backend: Backend,
) -> None:
    with backend.engine({"docs": OLD}, slots=2) as engine:
        running = engine.admit(query(0), PARAMS, "docs")
        engine.extend()
        if backend.device == "cpu":
            engine.load("wide", WIDE)
            assert finished(engine, running) == searched(OLD, query(0))
            assert finished(engine, engine.admit(query(1, 72), PARAMS, "wide")) == searched(WIDE, query(1, 72))
        else:
            with pytest.raises(InvalidParams, match="restart the engine with it"):
                engine.load("wide", WIDE)
            assert finished(engine, running) == searched(OLD, query(0))


def test_an_index_is_loaded_in_parts_between_extends_while_queries_go_on(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "STEP_BYTES", 16_384)
    with backend.engine({"docs@old": OLD}, slots=4) as engine:
        running = engine.admit(query(0), PARAMS, "docs@old")
        parts = 1
        while not engine.load_part("docs@new", NEW):
            with pytest.raises(UnknownCollection):
                engine.admit(query(0), PARAMS, "docs@new")
            engine.extend()
            parts += 1
        assert parts == 1 if backend.device == "cpu" else parts > NEW.data.rows.codes.nbytes // 16_384
        later = engine.admit(query(0), PARAMS, "docs@new")
        while engine.active_slots:
            engine.extend()
        assert engine.result(running)[0].tolist() == searched(OLD, query(0))
        assert engine.result(later)[0].tolist() == searched(NEW, query(0))
        with pytest.raises(InvalidParams, match="'docs@new' is loaded already"):
            engine.load_part("docs@new", NEW)


def test_what_is_loaded_in_part_can_be_given_up(backend: Backend, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "STEP_BYTES", 16_384)
    with backend.engine({"docs": OLD}, slots=2) as engine:
        for _ in range(FEW + 1):
            engine.load_part("new", NEW)
            assert engine.unload("new")
        engine.load("new", NEW)
        assert finished(engine, engine.admit(query(5), PARAMS, "new")) == searched(NEW, query(5))
