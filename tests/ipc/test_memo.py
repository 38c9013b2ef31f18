"""Tests of memoisation with bounded memory."""

from ipc import Memo


def test_a_value_is_computed_once_and_again_after_eviction() -> None:
    computed: list[int] = []
    memo: Memo[int, int] = Memo(lambda key: computed.append(key) or 2 * key, most=2)  # type: ignore[func-returns-value]
    assert [memo[1], memo[1], memo[2], memo[1]] == [2, 2, 4, 2]
    assert computed == [1, 2]
    assert memo[3] == 6  # all were evicted
    assert memo[1] == 2
    assert computed == [1, 2, 3, 1]
    assert len(memo) == 2
