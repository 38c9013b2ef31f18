"""Tests of small parts of the KV path: copies in slices and the measured chunk size."""

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.serving.kv.transport import Transfer

SHAPE = (3, 2, 12, 2, 4, 8)


def kv(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


@given(taken=st.permutations(range(12)), given_=st.permutations(range(12)), count=st.integers(0, 12))
@settings(max_examples=30)
def test_a_sliced_copy_writes_every_block_and_no_other(taken: list[int], given_: list[int], count: int) -> None:
    source, target = kv(1), kv(2)
    before = target.copy()
    copy = Transfer(source, taken[:count], target, given_[:count])
    steps = 0
    while not copy.done:
        copy.step(0)
        steps += 1
    assert steps == (3 if count else 0), "a slice is a layer here"
    assert np.array_equal(target[:, :, given_[:count]], source[:, :, taken[:count]])
    assert np.array_equal(target[:, :, given_[count:]], before[:, :, given_[count:]])
    assert copy.bytes == source[:, :, :count].nbytes


def test_a_copy_stops_after_the_slice_in_which_its_time_runs_out() -> None:
    times = iter(range(0, 1000, 10))
    source, target = kv(1), kv(2)
    copy = Transfer(source, range(12), target, range(12))
    assert not copy.step(15, clock=lambda: next(times))  # the clock advances 10 ns per call: two slices
    assert [bool(np.array_equal(*layers)) for layers in zip(source, target, strict=True)] == [True, True, False]
