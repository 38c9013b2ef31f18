"""Contract tests of every engine: indexes are loaded and unloaded between extends without affecting running queries."""

import numpy as np
import pytest

from gpu import Engine, GraphIndex, InvalidParams, SearchParams, UnknownCollection, slots
from gpu.cuda import upload
from gpu.index.rows import FloatArray
from tests.gpu.backends import BACKENDS, Backend
from tests.gpu.datasets import clustered

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
    """Return the ids of a slot, and release it."""
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
    """Limit engines to FEW collection numbers."""
    monkeypatch.setattr(slots, "MAX_COLLECTIONS", FEW)


def test_running_queries_finish_on_their_index_and_new_ones_use_the_replacement(backend: Backend) -> None:
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


def test_a_finished_query_s_result_is_unaffected_by_a_load(backend: Backend) -> None:
    with backend.engine({"docs": OLD}, slots=2) as engine:
        slot = engine.admit(query(3), PARAMS, "docs")
        while slot not in engine.extend():
            pass
        engine.load("other", NEW)
        assert engine.result(slot)[0].tolist() == searched(OLD, query(3))
        assert not engine.unload("docs")
        engine.release(slot)
        assert engine.unload("docs")


def test_loading_a_loaded_name_and_unloading_an_unknown_name_are_rejected(backend: Backend) -> None:
    with backend.engine({"docs": OLD}, slots=2) as engine:
        with pytest.raises(InvalidParams, match="'docs' is loaded already"):
            engine.load("docs", NEW)
        with pytest.raises(UnknownCollection):
            engine.unload("code")


def test_an_engine_can_start_without_an_index(backend: Backend) -> None:
    with backend.engine({}, slots=2) as engine:
        assert dict(engine.dims) == {}
        assert engine.extend().tolist() == []
        engine.load("docs", NEW)
        assert finished(engine, engine.admit(query(7), PARAMS, "docs")) == searched(NEW, query(7))


def test_an_index_of_larger_dim_and_degree_is_accepted_on_a_cpu_and_rejected_where_sizes_are_captured(
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


def test_an_index_is_loaded_in_parts_between_extends_of_running_queries(
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


def test_a_partial_load_can_be_aborted(backend: Backend, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "STEP_BYTES", 16_384)
    with backend.engine({"docs": OLD}, slots=2) as engine:
        for _ in range(FEW + 1):
            engine.load_part("new", NEW)
            assert engine.unload("new")
        engine.load("new", NEW)
        assert finished(engine, engine.admit(query(5), PARAMS, "new")) == searched(NEW, query(5))
