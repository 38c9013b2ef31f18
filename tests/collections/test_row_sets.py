"""Which rows of a part are not deleted, as of a moment."""

import tracemalloc

import numpy as np
import pytest

from gpu.index.data import bitmap
from runtime.retrieval.collections.growing_segment import GrowingSegment
from runtime.retrieval.collections.log import Upsert
from runtime.retrieval.collections.part import RowSet


@pytest.mark.parametrize("size", [0, 1, 64, 300])
def test_a_set_of_rows_is_a_value_of_one_moment(size: int) -> None:
    random, mask = np.random.default_rng(size), np.ones(size, bool)
    rows = RowSet.of(mask)
    for _ in range(9):
        before, mask_before = rows, mask.copy()
        gone, more = random.integers(0, len(mask), 5 if len(mask) else 0), int(random.integers(0, 70))
        mask[gone] = False
        mask = np.concatenate([mask, np.ones(more, bool)])
        rows = rows.without(gone).extended(more)
        for one, expected in ((rows, mask), (before, mask_before)):
            assert one.mask.tolist() == one.at(np.arange(len(expected))).tolist() == expected.tolist()
            assert one.bits.tolist() == bitmap(expected, len(expected)).tolist()
            assert (one.size, one.count) == (len(expected), int(expected.sum()))


def test_a_deletion_copies_which_rows_are_there_only_for_those_who_have_seen_them() -> None:
    size, growing = 1 << 17, GrowingSegment(0, 1, "l2")
    same, vectors = [""] * size, np.zeros(size, np.float32).tobytes()
    upsert = Upsert(0, [str(row) for row in range(size)], same, same, [{}] * size, vectors, [])
    for _ in growing.prepare(upsert, {}):
        pass
    growing.append(upsert)

    def bytes_to_delete(row: int) -> int:
        tracemalloc.start()
        growing.delete(np.array([row]))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert bytes_to_delete(1) < size // 16
    seen = growing.alive
    assert bytes_to_delete(2) >= size // 8
    assert bytes_to_delete(3) < size // 16
    assert seen.at(np.arange(5)).tolist() == [True, False, True, True, True]
    assert growing.alive.at(np.arange(5)).tolist() == [True, False, False, False, True]
