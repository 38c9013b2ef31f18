"""Fusion of two rankings."""

import numpy as np
import pytest

from runtime.retrieval.neighbors import Neighbors, fuse_ranks


def side(*rows: int) -> Neighbors:
    """Build a ranking in which each row's distance is its number."""
    return np.array(rows, np.int64), np.array(rows, np.float32)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.5, [3, 2, 7, 5]), (1.0, [7, 3, 5, 2]), (0.0, [2, 3, 5, 7]), (0.9, [3, 7, 5, 2])],
)
def test_results_of_both_come_first_then_single_ones_by_weight(share: float, expected: list[int]) -> None:
    ids, distances = fuse_ranks(side(2, 3), side(7, 3, 5), 10, share)
    assert ids.tolist() == distances.tolist() == expected


def test_empty_results_have_no_rank_and_at_most_k_are_returned() -> None:
    assert fuse_ranks(side(4, 1, -1), side(), 2)[0].tolist() == [4, 1]
    assert fuse_ranks(side(-1), side(9, 8), 1)[0].tolist() == [9]
    assert fuse_ranks(side(), side(), 3)[0].tolist() == []
