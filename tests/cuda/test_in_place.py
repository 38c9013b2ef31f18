"""Tests of queries whose vectors lie in device memory: prepared there as on the host, and refused there if invalid."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu import GraphIndex, InvalidVector, SearchParams
from gpu.cuda import layout
from gpu.cuda.engine import CudaEngine
from gpu.engine import INVALID, c_callable
from gpu.index.data import IndexData
from gpu.index.rows import FloatArray, checked_vectors, encode
from tests.cuda.conftest import NewDriver
from tests.cuda.emulation import LOOK_NS, EmulatedDriver
from tests.cuda.searches import DIM, INDEX, PARAMS, queries, searched
from tests.cuda.workbench import Limits, Workbench
from tests.gpu.datasets import KINDS
from tests.gpu.reference import search_reference

BARE = GraphIndex(replace(INDEX.data, graph=INDEX.data.graph[:, :0], codes=None))  # rows that are scanned
FORMS = ["plain", "loop", "resident"]


class InPlace:
    """An engine and vectors in its device's memory."""

    def __init__(self, driver: EmulatedDriver, form: Any, slots: int = 4) -> None:
        self._driver = driver
        options = {"extends_per_launch": 1 if form == "plain" else 1024, "max_top_m": 64, "fault_poll_ns": LOOK_NS}
        self.engine = CudaEngine(driver, b"", {"docs": INDEX, "bare": BARE}, slots=slots, form=form, **options)
        backend = self.engine.backend()
        self._handle, self._admit = backend.handle, c_callable(backend.admit_in_place, 7)
        self._stream, self._next = driver.create_stream(), 0
        self._arena = driver.allocate(1 << 16)

    def place(self, vector: FloatArray) -> int:
        """Copy a vector to the next slot of the arena. Return its address."""
        address = self._arena + self._next % 256 * 256
        self._next += 1
        self._driver.copy_to_device(self._stream, address, vector)
        self._driver.synchronise(self._stream)
        return address

    def admit(self, vector: FloatArray, collection: int = 0) -> int:
        spec = (PARAMS.k, PARAMS.top_m, PARAMS.search_width, 0)
        return self._admit(self._handle, self.place(vector), collection, *spec)

    def finish(self, *slots: int) -> None:
        """Extend until these slots have finished, each once."""
        done: list[int] = []
        while not {*slots} <= {*done}:
            done += self.engine.extend().tolist()
        assert len(done) == len({*done})


@pytest.mark.parametrize(("metric", "dtype"), KINDS)
@pytest.mark.parametrize("dim", [1, 7, 130, 700])
def test_a_query_is_prepared_on_the_device_as_on_the_host(
    metric: str, dtype: str, dim: int, new_driver: NewDriver
) -> None:
    random = np.random.default_rng(dim)
    vectors = checked_vectors(random.standard_normal((60, dim)), metric)
    graph = np.array([random.permutation(60)[:6] for _ in range(60)], np.uint32)
    data = IndexData(encode(vectors, metric, dtype), graph, np.arange(4, dtype=np.uint32), None)
    query, wanted = random.standard_normal(dim).astype(np.float32), SearchParams(k=16, top_m=20, search_width=3)
    bench = Workbench(new_driver(dim, int(random.choice([32, 64, 256]))), [data], Limits(slots=2))
    bench.admit(0, query, wanted)
    bench.admit_in_place(1, query, wanted)
    on_host, on_device = (bench.query(slot, data) for slot in (0, 1))
    if metric == "cosine":  # norms are summed in another order
        np.testing.assert_allclose(on_device, on_host, rtol=1e-6, atol=0)
    else:
        assert on_device.tobytes() == on_host.tobytes()
    while not bench.done(1):
        bench.extend()
    ids, distances = bench.result(1, 16)
    expected_ids, expected_distances, _ = search_reference(data, query, wanted)
    np.testing.assert_allclose(distances, expected_distances, rtol=2e-5, atol=2e-5)
    assert np.mean(np.array(ids) == expected_ids) > 0.9  # except for near ties


@pytest.mark.parametrize("form", FORMS)
def test_vectors_in_place_and_on_the_host_get_the_same_answers_side_by_side(form: str, new_driver: NewDriver) -> None:
    setup = InPlace(new_driver(), form)
    for first in range(0, 12, 4):
        batch = queries(12)[first : first + 4]
        slots = [
            setup.admit(query) if number % 2 else setup.engine.admit(query, PARAMS, "docs")
            for number, query in enumerate(batch)
        ]
        setup.finish(*slots)
        for slot, query in zip(slots, batch, strict=True):
            assert setup.engine.result(slot)[0].tolist() == searched(query)
            setup.engine.release(slot)
    setup.engine.close()


@pytest.mark.parametrize(
    ("form", "wrong"),
    [("plain", np.nan), ("loop", np.inf), ("resident", 1e30), ("resident", np.nan)],
)
def test_an_invalid_vector_ends_its_query_alone_with_the_hosts_error(
    form: str, wrong: float, new_driver: NewDriver
) -> None:
    setup = InPlace(new_driver(), form)
    vectors = queries(4)
    spoilt = vectors[1].copy()
    spoilt[3] = wrong
    with pytest.raises(InvalidVector):
        setup.engine.admit(spoilt, PARAMS, "docs")
    slots = [setup.admit(vector) for vector in (vectors[0], spoilt, vectors[2])]
    setup.finish(*slots)
    with pytest.raises(InvalidVector, match="in device memory"):
        setup.engine.result(slots[1])
    assert [setup.engine.result(slots[n])[0].tolist() for n in (0, 2)] == [searched(vectors[n]) for n in (0, 2)]
    assert setup.engine.extends(slots[1]) == 0
    setup.engine.release(slots[1])
    again = setup.admit(vectors[3])
    assert again == slots[1]
    setup.finish(again)
    assert setup.engine.result(again)[0].tolist() == searched(vectors[3]), "the slot is as good as before"
    setup.engine.close()


@pytest.mark.parametrize("form", ["loop", "resident"])
def test_a_paused_query_resumes_though_its_vector_has_changed_since(form: str, new_driver: NewDriver) -> None:
    setup = InPlace(new_driver(), form, slots=2)
    setup.engine.interrupt_when(lambda: True)
    query = queries(1)[0]
    slot = setup.admit(query)
    done = setup.engine.extend().tolist()
    if slot not in done:
        setup.engine.pause(slot)
        other = setup.admit(queries(2)[1])
        setup.finish(other)
        setup.engine.resume(slot)
        setup.finish(slot)
    assert setup.engine.result(slot)[0].tolist() == searched(query)
    setup.engine.close()


def test_a_query_released_before_it_starts_is_not_read(new_driver: NewDriver) -> None:
    setup = InPlace(new_driver(), "plain", slots=2)
    slot = setup.admit(np.full(DIM, np.nan, np.float32))
    setup.engine.release(slot)
    other = setup.admit(queries(1)[0])
    assert other == slot
    setup.finish(other)
    assert setup.engine.result(other)[0].tolist() == searched(queries(1)[0])
    setup.engine.close()


@pytest.mark.parametrize("form", ["plain", "resident"])
def test_only_collections_with_a_graph_are_searched_in_place(form: str, new_driver: NewDriver) -> None:
    setup = InPlace(new_driver(), form)
    for collection in (-1, 1, 2, 1 << 20):
        assert setup.admit(queries(1)[0], collection) == INVALID
    assert setup.engine.free_slots == 4
    setup.engine.close()


def test_only_the_head_of_a_line_is_fetched_for_a_vector_in_place(new_driver: NewDriver) -> None:
    """The rest of the staged line holds an older query's bytes."""
    setup = InPlace(new_driver(), "resident", slots=1)
    memory = setup.engine.batch_memory()
    memory.lines[0, layout.SLOT.itemsize :] = 0xFF
    slot = setup.admit(queries(1)[0])
    setup.finish(slot)
    assert setup.engine.result(slot)[0].tolist() == searched(queries(1)[0])
    assert (memory.lines[0, layout.SLOT.itemsize :] == 0xFF).all(), "and the host writes nothing there"
    setup.engine.close()
