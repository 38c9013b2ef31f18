"""Tests that engines return the results of the numpy reference after the same number of extends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import GraphIndex, SearchParams
from gpu.cpu.search import search
from gpu.index.data import bitmap
from gpu.index.rows import Dtype, Metric
from tests.gpu.backends import BACKENDS, Backend
from tests.gpu.datasets import DTYPES, METRICS, exact_vectors, random_index
from tests.gpu.reference import ReferenceSearch, search_reference

seeds = st.integers(0, 2**32 - 1)
params = st.builds(
    lambda k, more, width, patience: SearchParams(k, k + more, width, patience),
    st.integers(1, 12),
    st.integers(0, 40),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 6)),
)


@settings(max_examples=120)
@given(seeds, st.sampled_from(METRICS), st.sampled_from(DTYPES), params, st.sampled_from([None, 0.0, 0.02, 0.3, 1.0]))
def test_engine_and_reference_agree_on_random_graphs_with_any_part_of_the_rows_allowed(
    seed: int, metric: Metric, dtype: Dtype, wanted: SearchParams, part: float | None
) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 300))
    data = random_index(random, count, metric, dtype, int(random.integers(2, 12)), int(random.integers(1, 20)))
    query, allowed = exact_vectors(random, 1), None if part is None else random.random(count) < part
    bits = None if allowed is None else bitmap(allowed, count)
    nodes, distances = search(data, query, wanted, threads=1, allowed=bits)
    expected_nodes, expected_distances, _ = search_reference(data, query[0], wanted, allowed)
    assert nodes[0].tolist() == expected_nodes.tolist()
    assert distances[0].tolist() == expected_distances.tolist()
    assert allowed is None or allowed[nodes[nodes >= 0]].all()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@settings(max_examples=15)
@given(seed=seeds, wanted=st.lists(params, min_size=1, max_size=6))
def test_queries_with_different_parameters_share_a_batch_and_take_the_reference_s_extends(
    backend: Backend, seed: int, wanted: list[SearchParams]
) -> None:
    random = np.random.default_rng(seed)
    kinds: dict[str, tuple[Metric, Dtype]] = {
        "a": ("l2", "float32"),
        "b": ("cosine", "float16"),
        "c": ("ip", "float32"),
    }
    data = {name: random_index(random, 200, *kind, 6, 8) for name, kind in kinds.items()}
    with backend.engine({name: GraphIndex(part) for name, part in data.items()}, slots=len(wanted)) as engine:
        running = {}
        for one in wanted:
            name = str(random.choice(list(data)))
            query = exact_vectors(random, 1)[0]
            running[engine.admit(query, one, collection=name)] = ReferenceSearch(data[name], query, one)
        while running:
            slots = list(running)
            paused = [slot for slot in slots if random.random() < 0.3]
            for slot in paused:
                engine.pause(slot)
            finished = engine.extend().tolist()
            for slot in paused:
                engine.resume(slot)
            assert set(finished) == {slot for slot in slots if slot not in paused and running[slot].extend()}
            for slot in finished:
                reference = running.pop(slot)
                assert engine.extends(slot) == reference.extends
                assert engine.result(slot)[0].tolist() == reference.result()[0].tolist()
                assert engine.result(slot)[1].tolist() == reference.result()[1].tolist()
                engine.release(slot)


def test_overflow_of_the_visited_table_does_not_change_results() -> None:
    random = np.random.default_rng(5)
    data = random_index(random, 20_000, "l2", "float32", 32, 32)
    wanted = SearchParams(k=10, top_m=12, search_width=8)  # the table holds 1024 nodes
    query = exact_vectors(random, 1)
    reference = ReferenceSearch(data, query[0], wanted)
    while not reference.extend():
        pass
    assert search(data, query, wanted, threads=1)[0][0].tolist() == reference.result()[0].tolist()
