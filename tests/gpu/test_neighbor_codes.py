"""Tests of RaBitQ neighbour codes: accuracy of the estimates, and recall of searches that use them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu import GraphIndex, SearchParams
from gpu.build.neighbor_codes import make_codes, rotate_all
from gpu.compiled import compiled
from gpu.cpu import fast_scan
from gpu.cpu.extend.keys import insert_at, insert_by_chunks
from gpu.cpu.search import search
from gpu.cpu.simd import KEYS_AT_ONCE
from gpu.cpu.state import BatchState
from gpu.errors import InvalidParams
from gpu.index.data import GROUP, IndexData, bitmap, block_bytes, make_signs
from gpu.index.rows import FloatArray, Metric, aligned_empty, checked_vectors, encode, padded
from tests.gpu.datasets import clustered
from tests.gpu.reference import Table, raw_distances, rotated, search_reference


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


def compiled_estimates(index: IndexData, query: FloatArray, node: int, base: float) -> FloatArray:
    """Return the compiled kernel's estimates for all entries of a node's block."""
    codes = index.codes
    assert codes is not None
    prepared = np.zeros((1, codes.dims), np.float32)
    prepared[0, : len(query)] = query
    rotate_all(prepared, codes.signs)
    table, out = aligned_empty((1, 4 * codes.dims), np.uint8), np.zeros(GROUP, np.float32)
    step, offset = fast_scan.write_table(np.uint64(prepared.ctypes.data), codes.dims, np.uint64(table.ctypes.data))
    found = []
    part_bytes = block_bytes(codes.dims, GROUP, codes.bits)
    for begin in range(0, codes.blocks.shape[1], part_bytes):
        address = np.uint64(codes.blocks[node].ctypes.data + begin)
        fast_scan.estimate(
            address,
            np.uint64(table.ctypes.data),
            codes.dims,
            codes.bits,
            np.float32(base),
            step,
            offset,
            np.uint64(out.ctypes.data),
        )
        found.append(out.copy())
    return np.concatenate(found)


def random_data(
    random: np.random.Generator, dim: int, metric: Metric, degree: int = 40, count: int = 150, bits: int = 1
) -> IndexData:
    """Return Gaussian vectors under a graph of random edges."""
    vectors = checked_vectors(random.standard_normal((count, dim)).astype(np.float32), metric)
    graph = random.integers(count, size=(count, degree), dtype=np.uint32)
    seeds = np.arange(min(count, 20), dtype=np.uint32)
    rows = encode(vectors, metric, "float32")
    codes = make_codes(vectors, rows.centre, metric == "l2", graph, seeds, 1, bits=bits)
    return IndexData(rows, graph, seeds, None, codes)


def test_a_batch_has_room_for_what_a_search_of_a_graph_of_two_neighbours_writes(random: np.random.Generator) -> None:
    state = BatchState([random_data(random, 64, "l2", degree=2, count=3)], 1, 256, 1)
    assert state.batch.distances.size >= GROUP  # estimates
    assert state.batch.visited.shape[1] >= 4 * 256  # a table for that many parents of each entry of top_m


@pytest.mark.parametrize("dim", [3, 64, 100, 200, 784, 1536])
def test_the_rotation_preserves_lengths_and_angles_and_spreads_every_direction(
    random: np.random.Generator, dim: int
) -> None:
    signs = make_signs(dim, random)
    basis = np.zeros((dim, signs.shape[1]), np.float32)
    basis[:, :dim] = np.eye(dim)
    turned = basis.copy()
    rotate_all(turned, signs)
    np.testing.assert_allclose(turned @ turned.T, np.eye(dim), atol=1e-5)
    assert np.abs(turned).max() * np.sqrt(signs.shape[1]) < 16
    np.testing.assert_allclose(turned[0], rotated(basis[0, :dim], signs), atol=1e-5)


@pytest.mark.parametrize(("metric", "dim"), [("l2", 20), ("cosine", 100), ("ip", 1536)])  # the last: sums in two parts
@pytest.mark.parametrize(("bits", "least", "most"), [(1, 0.3, 1.0), (2, 0.15, 0.45)])
def test_estimates_are_unbiased_within_a_bound_that_shrinks_with_more_bits(
    random: np.random.Generator, dim: int, metric: Metric, bits: int, least: float, most: float
) -> None:
    data = random_data(random, dim, metric, bits=bits)
    assert data.codes is not None
    vectors = data.rows.codes[:, :dim]
    errors = []
    for node in range(len(vectors)):
        query = vectors[random.integers(len(vectors))] + 0.3 * random.standard_normal(dim).astype(np.float32) / dim**0.5
        others = vectors[data.graph[node]]
        base = float(raw_distances(vectors[node][None], query, metric)[0])
        estimates = compiled_estimates(data, query, node, base)
        assert np.isposinf(estimates[data.graph.shape[1] :]).all()
        off = estimates[: data.graph.shape[1]] - raw_distances(others, query, metric)
        spread = np.linalg.norm(query - vectors[node]) * np.linalg.norm(others - vectors[node], axis=1)
        errors.append(off / np.maximum((2 if metric == "l2" else 1) * spread / np.sqrt(data.codes.dims), 1e-2))
    assert abs(np.mean(errors)) < 0.05
    assert least < np.std(errors) < most


@pytest.mark.parametrize("bits", [1, 2])
def test_the_kernel_and_the_reference_decode_a_block_alike(random: np.random.Generator, bits: int) -> None:
    data = random_data(random, 200, "l2", bits=bits)
    assert data.codes is not None
    query = random.standard_normal(200).astype(np.float32)
    theirs = Table(data.codes, query).estimates(data.codes.blocks[3], data.graph.shape[1], 5.0)
    ours = compiled_estimates(data, query, 3, 5.0)[: data.graph.shape[1]]
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)


def test_the_scalar_fallback_computes_the_same_sums_as_byte_look_ups(random: np.random.Generator) -> None:
    slow = fast_scan.scan_by(fast_scan.look_up_each)

    @compiled
    def both(codes: Any, table: Any, quick: Any, one_by_one: Any) -> None:
        fast_scan.add_sums(
            np.uint64(codes.ctypes.data),
            np.uint64(table.ctypes.data),
            0,
            4,
            np.float32(1),
            np.uint64(quick.ctypes.data),
        )
        slow(
            np.uint64(codes.ctypes.data),
            np.uint64(table.ctypes.data),
            0,
            4,
            np.float32(1),
            np.uint64(one_by_one.ctypes.data),
        )

    codes, table = (random.integers(256, size=256, dtype=np.uint8) for _ in range(2))
    found = np.zeros((2, GROUP), np.float32)
    both(codes, table, found[0], found[1])
    np.testing.assert_array_equal(found[0], found[1])
    places = np.concatenate([codes.reshape(16, 16) & 15, codes.reshape(16, 16) >> 4], axis=1)
    np.testing.assert_array_equal(found[0], np.take_along_axis(table.reshape(16, 16), places, 1).sum(axis=0))


@pytest.mark.parametrize(("metric", "bits"), [("l2", 1), ("cosine", 2), ("ip", 1), ("l2", 2)])
def test_search_and_reference_agree_except_for_near_ties(
    random: np.random.Generator, metric: Metric, bits: int
) -> None:
    vectors = clustered(random, 800, 48)
    index = GraphIndex.build(vectors, metric=metric, neighbor_codes=True, code_bits=bits)
    queries = vectors[:60] + 0.2 * random.standard_normal((60, 48)).astype(np.float32)
    same = total = 0
    for k, top_m, width, patience in ((5, 16, 1, None), (10, 10, 3, None), (10, 40, 4, 2)):
        params = SearchParams(k, top_m, width, patience)
        ids, _ = index.search(queries, k, top_m, width, patience)
        for query, found in zip(queries, ids, strict=True):
            expected, _, _ = search_reference(index.data, query, params)
            same += len(np.intersect1d(found, expected))
            total += k
    assert same / total > 0.96


# ---- on disk


def test_random_codes_cause_no_out_of_bounds_access(tmp_path: Path, random: np.random.Generator) -> None:
    data = random_data(random, 40, "l2")
    assert data.codes is not None
    data.codes.blocks[:] = random.integers(256, size=data.codes.blocks.shape, dtype=np.uint8)
    data.codes.entry[:] = random.integers(256, size=data.codes.entry.shape, dtype=np.uint8)
    assert data.codes.scan is not None
    data.codes.scan[:] = random.integers(256, size=data.codes.scan.shape, dtype=np.uint8)
    queries, allowed = random.standard_normal((50, 40)), random.random(150) < 0.5
    ids, _ = GraphIndex(data).search(queries, k=10, top_m=32)
    assert ((ids >= -1) & (ids < 150)).all()
    ids, _ = search(data, queries, SearchParams(30, 32), 1, allowed=bitmap(allowed, 150), min_allowed=32)
    assert np.isin(ids, [-1, *np.flatnonzero(allowed)]).all()


@pytest.mark.parametrize(("dim", "fastest"), [(100, 2), (256, 2), (257, 1), (384, 1)])
def test_a_code_has_the_requested_number_of_bits_or_the_fastest(
    random: np.random.Generator, tmp_path: Path, dim: int, fastest: int
) -> None:
    vectors = random.standard_normal((60, dim))
    for code_bits, bits in ((0, fastest), (1, 1), (2, 2)):
        index = GraphIndex.build(vectors, metric="l2", neighbor_codes=True, code_bits=code_bits)
        index.save(tmp_path / "index")
        loaded = GraphIndex.load(tmp_path / "index")
        assert index.data.codes is not None
        assert loaded.data.codes is not None
        assert loaded.data.codes.bits == index.data.codes.bits == bits
        assert loaded.data.codes.blocks.shape[1] == block_bytes(dim, 32, bits)
        np.testing.assert_array_equal(loaded.search(vectors, 10, 32)[0], index.search(vectors, 10, 32)[0])
    with pytest.raises(InvalidParams, match=r"code_bits is 3, outside 0\.\.2"):
        GraphIndex.build(vectors, neighbor_codes=True, code_bits=3)


@pytest.mark.parametrize("top_m", [1, 7, 8, 9, 64, 65, 200])
def test_inserting_by_whole_registers_equals_inserting_key_by_key(random: np.random.Generator, top_m: int) -> None:
    by_key, by_chunks = (np.full(padded(top_m, KEYS_AT_ONCE) + 8, 77, np.uint64) for _ in range(2))
    filled = 0
    for _ in range(4 * top_m + 20):
        key = np.uint64(2 * random.integers(3 * top_m))  # a duplicate of an entry in the list
        there = insert_at(np.uint64(by_key.ctypes.data), filled, top_m, key)
        assert insert_by_chunks(np.uint64(by_chunks.ctypes.data), filled, top_m, key) == there
        if there >= 0:
            by_key[there] |= np.uint64(random.integers(2))  # some entries have been parents
            by_chunks[there] = by_key[there]
            filled = min(filled + 1, top_m)
        np.testing.assert_array_equal(by_chunks[:filled], by_key[:filled])
        assert (by_chunks[-8:] == 77).all()
