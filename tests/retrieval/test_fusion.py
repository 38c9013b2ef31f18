"""Two rankings as one."""

import numpy as np
import pytest

from runtime.retrieval.neighbors import Neighbors, fuse_ranks


def side(*rows: int) -> Neighbors:
    """Each row is as far as its number says."""
    return np.array(rows, np.int64), np.array(rows, np.float32)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.5, [3, 2, 7, 5]), (1.0, [7, 3, 5, 2]), (0.0, [2, 3, 5, 7]), (0.9, [3, 7, 5, 2])],
)
def test_what_both_found_comes_first_and_then_what_one_found_by_its_share(share: float, expected: list[int]) -> None:
    ids, distances = fuse_ranks(side(2, 3), side(7, 3, 5), 10, share)
    assert ids.tolist() == distances.tolist() == expected


def test_what_is_none_has_no_rank_and_no_more_come_than_are_wanted() -> None:
    assert fuse_ranks(side(4, 1, -1), side(), 2)[0].tolist() == [4, 1]
    assert fuse_ranks(side(-1), side(9, 8), 1)[0].tolist() == [9]
    assert fuse_ranks(side(), side(), 3)[0].tolist() == []
