"""Tests of the kernels against the reference: same nodes, same number of extends, same distances where arithmetic is
exact, in any order of threads and blocks."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from gpu import SearchParams
from gpu.cuda import layout
from gpu.index.data import IndexData
from gpu.index.rows import checked_vectors, encode
from tests.cuda.conftest import NewDriver
from tests.cuda.workbench import Limits, Workbench
from tests.gpu.datasets import DTYPES, METRICS, exact_vectors, random_index
from tests.gpu.reference import ReferenceSearch, fitted_query, search_reference

Extend = Callable[[Workbench], None]
WAYS: dict[str, Extend] = {
    "staged": lambda bench: bench.extend(),
    "staged, by one block": lambda bench: bench.extend(blocks=1),
    "in blocks": lambda bench: bench.extend_in_blocks(),
    "in blocks, with few places for rows": lambda bench: bench.extend_in_blocks(places=layout.RING_PLACES[-1]),
}


def mixed(random: np.random.Generator) -> list[IndexData]:
    """Return collections of every element type with different dims and degrees."""
    return [
        random_index(random, 200, "l2", "float32", 6, 8),
        random_index(random, 150, "cosine", "float16", 9, 5),
        random_index(random, 120, "ip", "float32", 4, 16),
    ]


def run_to_the_end(bench: Workbench, slots: list[int], extend: Extend) -> None:
    for _ in range(200):
        if all(bench.done(slot) for slot in slots):
            return
        extend(bench)
    raise AssertionError("the queries do not end")


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_batch_takes_the_reference_s_steps_by_every_launch_form(seed: int, new_driver: NewDriver) -> None:
    random = np.random.default_rng(seed)
    data = mixed(random)
    bench = Workbench(new_driver(seed, block_threads=int(random.choice([32, 64, 128, 512]))), data, Limits())
    running, ways = {}, list(WAYS.values())
    for slot in range(4):
        number, query = slot % 3, exact_vectors(random, 1)[0]
        k, more, patience = int(random.integers(1, 13)), int(random.integers(40)), random.choice([0, 1, 3])
        wanted = SearchParams(k, k + more, int(random.integers(1, 9)), int(patience) or None)
        bench.admit(slot, query, wanted, number)
        running[slot] = ReferenceSearch(data[number], query, wanted), number, k
    while running:
        ways[random.integers(len(ways))](bench)
        for slot, (reference, number, k) in list(running.items()):
            assert bench.done(slot) == reference.extend()
            assert bench.extends(slot) == reference.extends
            if bench.done(slot):
                ids, distances = reference.result()
                assert bench.result(slot, k, number) == (ids.tolist(), distances.tolist())
                del running[slot]


# Every metric with every type, each at two lengths; every length with every metric and every type.
LENGTHS = [
    (metric, dtype, dim)
    for metric in METRICS
    for dtype in DTYPES
    for dim in ((1, 130), (7, 700))[(METRICS.index(metric) + DTYPES.index(dtype)) % 2]
]


@pytest.mark.parametrize(("metric", "dtype", "dim"), LENGTHS)
def test_distances_are_bitwise_equal_in_every_launch_form_and_near_the_reference_s(
    metric: str, dtype: str, dim: int, new_driver: NewDriver
) -> None:
    random = np.random.default_rng(dim)
    vectors = checked_vectors(random.standard_normal((60, dim)), metric)
    graph = np.array([random.permutation(60)[:6] for _ in range(60)], np.uint32)
    data = IndexData(encode(vectors, metric, dtype), graph, np.arange(4, dtype=np.uint32), None)
    query = random.standard_normal(dim).astype(np.float32)
    wanted = SearchParams(k=16, top_m=20, search_width=3)
    found = []
    for number, extend in enumerate(WAYS.values()):
        bench = Workbench(new_driver(number), [data], Limits(slots=1))
        bench.admit(0, query, wanted)
        run_to_the_end(bench, [0], extend)
        found.append(tuple(map(bytes, bench.raw_result(0, 16))))
    assert len(set(found)) == 1
    expected = search_reference(data, query, wanted)
    ids, distances = bench.result(0, 16)
    np.testing.assert_allclose(distances, expected[1], rtol=2e-5, atol=2e-5)
    assert np.mean(np.array(ids) == expected[0]) > 0.9  # except for near ties


def folded_sum(terms: np.ndarray, chunk: int) -> np.float32:
    """Sum as distance.cuh does, for terms that fmaf rounds alike: 32 lanes, folded in halves."""
    lanes = np.zeros(32, np.float32)
    for number, part in enumerate(terms.reshape(-1, chunk)):
        for term in part:
            lanes[number % 32] += term
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return np.float32(lanes[0])


@pytest.mark.parametrize(("dtype", "chunk"), [("float32", 4), ("float16", 8)])
@pytest.mark.parametrize("dim", [20, 300])
def test_sums_are_folded_in_the_documented_order(dtype: str, chunk: int, dim: int, new_driver: NewDriver) -> None:
    random = np.random.default_rng(1)
    rows = random.integers(-(2**10), 2**10, (5, dim)).astype(np.float32)
    query = (2.0 ** random.integers(-12, 12, dim)).astype(np.float32)  # products are exact, sums are rounded
    data = IndexData(
        encode(checked_vectors(rows, "ip"), "ip", dtype),
        np.zeros((5, 2), np.uint32),
        np.arange(5, dtype=np.uint32),
        None,
    )
    bench = Workbench(new_driver(), [data], Limits(slots=1))
    bench.admit(0, query, SearchParams(k=5, top_m=5))
    run_to_the_end(bench, [0], WAYS["staged"])
    nodes, raw = bench.raw_result(0, 5)
    codes = data.rows.codes.astype(np.float32)
    padded = np.zeros(codes.shape[1], np.float32)
    padded[:dim] = fitted_query(query, data.rows)
    assert raw.tolist() == [-folded_sum(codes[node] * padded, chunk) for node in nodes]
    assert (
        len({float(np.sum(codes[node] * padded)) for node in nodes} - set(-raw)) > 0
    )  # numpy's order of summation rounds differently


@pytest.mark.parametrize("way", ["staged", "in blocks"])
def test_overflow_of_a_one_sector_visited_table_does_not_change_results(way: str, new_driver: NewDriver) -> None:
    random = np.random.default_rng(5)
    data = random_index(random, 300, "l2", "float32", 12, 10)
    data = replace(data, graph=np.hstack([data.graph, data.graph[:, ::-1]]))  # each neighbour twice per extend
    wanted, query = SearchParams(k=10, top_m=24, search_width=8), exact_vectors(random, 1)[0]
    bench = Workbench(new_driver(3), [data], Limits(slots=1))
    bench.admit(0, query, wanted, visited_bits=3)
    run_to_the_end(bench, [0], WAYS[way])
    ids, distances, extends = search_reference(data, query, wanted)
    assert bench.result(0, 10) == (ids.tolist(), distances.tolist())
    assert bench.extends(0) == extends


def test_more_new_keys_than_one_sort_holds_are_merged_in_parts(new_driver: NewDriver) -> None:
    random = np.random.default_rng(6)
    data = random_index(random, 1500, "l2", "float32", 100, 1200)
    wanted, query = SearchParams(k=50, top_m=700, search_width=16), exact_vectors(random, 1)[0]
    bench = Workbench(new_driver(), [data], Limits(slots=1, max_top_m=700, max_k=50, max_search_width=16))
    bench.admit(0, query, wanted)
    reference = ReferenceSearch(data, query, wanted)
    for _ in range(2):
        bench.extend()
        reference.extend()
        keys = bench.read("keys", np.uint64)
        assert ((keys >> np.uint64(1)) & np.uint64(2**31 - 1)).tolist() == [node for _, node in reference.top_m]


def test_a_missing_neighbour_is_skipped(new_driver: NewDriver) -> None:
    random = np.random.default_rng(7)
    data = random_index(random, 50, "l2", "float32", 4, 4)
    data.graph[::3, 1] = 2**32 - 1
    data.graph[::5, 2] = 50
    query = exact_vectors(random, 1)[0]
    bench = Workbench(new_driver(), [data], Limits(slots=1))
    bench.admit(0, query, SearchParams())
    run_to_the_end(bench, [0], WAYS["in blocks"])
    assert bench.result(0, 10)[0] == search_reference(data, query, SearchParams())[0].tolist()


def test_a_block_synchronises_twice_to_distribute_tasks_and_never_to_merge_or_gather(new_driver: NewDriver) -> None:
    """One warp merges and gathers for a slot."""
    random = np.random.default_rng(3)
    driver = new_driver(block_threads=128)
    bench = Workbench(driver, [random_index(random, 300, "l2", "float32", 8, 16)], Limits(slots=1))
    bench.admit(0, exact_vectors(random, 1)[0], SearchParams(k=4, top_m=64, search_width=2))
    for _ in range(5):
        waits = [driver.waits()]
        for launch in bench.stage_launches(bucket=1, blocks=3):
            launch()
            waits.append(driver.waits())
        assert not bench.done(0)
        assert np.diff(waits).tolist() == [3 * 2, 0]


@pytest.mark.parametrize("dim", [96, 768, 3000])
def test_enough_bytes_of_rows_of_any_length_are_in_flight_to_saturate_a_memory(dim: int, new_driver: NewDriver) -> None:
    """A multiprocessor of an H200 needs 24 KB, and half of what it has in flight is waited for."""
    random = np.random.default_rng(12)
    driver = new_driver(block_threads=64)
    data = random_index(random, 64, "l2", "float16", 16, 64, dim)
    bench = Workbench(driver, [data], Limits(slots=1))
    bench.admit(0, exact_vectors(random, 1, dim)[0], SearchParams(search_width=4))
    distances, _ = bench.stage_launches(bucket=1, blocks=1)
    driver.most_copies()
    distances()
    threads = 65_536 // 64  # as many as have registers: see test_compiler.py
    assert driver.most_copies() * layout.CHUNK_BYTES * threads // 2 >= 24 * 1024


@pytest.mark.parametrize("blocks", [1, 7])
def test_blocks_share_the_tasks_of_more_slots_than_a_warp_has_threads(blocks: int, new_driver: NewDriver) -> None:
    """Slots have different numbers of tasks, or none: some slots are free, some pause for a while."""
    random, slots = np.random.default_rng(11), 75
    data = [random_index(random, 40, "l2", "float32", 3, seeds) for seeds in (2, 9)]
    bench = Workbench(new_driver(4, block_threads=64), data, Limits(slots=slots, max_top_m=16))
    queries, taken = exact_vectors(random, slots), [slot for slot in range(slots) if slot % 10 != 3]
    wanted = [SearchParams(k=2, top_m=3 + slot % 11, search_width=1 + slot % 3) for slot in range(slots)]
    for slot in taken:
        bench.admit(slot, queries[slot], wanted[slot], slot % 2)
    for status in (layout.PAUSED, layout.ACTIVE):
        bench.extend(blocks=blocks)
        for slot in (7, 32, 74):
            bench.command(slot, status)
    run_to_the_end(bench, taken, lambda bench: bench.extend(blocks=blocks))
    for slot in taken:
        ids, distances, extends = search_reference(data[slot % 2], queries[slot], wanted[slot])
        assert bench.result(slot, 2, slot % 2) == (ids.tolist(), distances.tolist())
        assert bench.extends(slot) == extends


def test_inactive_slots_and_slots_outside_the_bucket_are_untouched(new_driver: NewDriver) -> None:
    random = np.random.default_rng(8)
    data = random_index(random, 100, "l2", "float32", 6, 8)
    bench = Workbench(new_driver(), [data], Limits(slots=4))
    for slot in range(4):
        bench.admit(slot, exact_vectors(random, 1)[0], SearchParams(search_width=1))
    bench.command(1, layout.PAUSED)
    bench.command(2, layout.FREE)
    bench.extend(bucket=3)
    assert [int(bench.slot(slot)["extends"]) for slot in range(4)] == [1, 0, 0, 0]
    bench.command(1, layout.ACTIVE)
    bench.extend_in_blocks()
    assert [int(bench.slot(slot)["extends"]) for slot in range(4)] == [2, 1, 0, 1]


def test_pausing_a_finished_query_leaves_it_finished(new_driver: NewDriver) -> None:
    random = np.random.default_rng(9)
    bench = Workbench(new_driver(), [random_index(random, 20, "l2", "float32", 4, 4)], Limits(slots=1))
    bench.admit(0, exact_vectors(random, 1)[0], SearchParams())
    run_to_the_end(bench, [0], WAYS["staged"])
    extends = bench.extends(0)
    for status in (layout.PAUSED, layout.ACTIVE):
        bench.command(0, status)
        bench.extend()
    assert int(bench.slot(0)["status"]) == layout.FINISHED
    assert bench.extends(0) == extends
    bench.command(0, layout.FREE)
    assert int(bench.slot(0)["status"]) == layout.FREE
