"""Tests of the slot count that "auto" selects: from costs under noise, and measured over engines of every kind."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import GraphIndex, SearchParams
from gpu.cuda.engine import MAX_EXTENDS_PER_LAUNCH, CudaEngine
from gpu.cuda.graphs import LaunchForm
from gpu.slots import Collections
from runtime.pool.process import AUTO_GPU_SLOTS, slots_of
from runtime.pool.sizing import FIXED_SHARE, LOOP_NS, ExtendCost, fewest_slots, measure, sizes_to
from tests.cuda.conftest import new_driver as new_driver
from tests.cuda.emulation import LOOK_NS
from tests.cuda.searches import DIM, INDEX
from tests.pool.callbacks import Callbacks

SIZES = (1, 2, 4, 8, 16, 32)


def line(fixed_ns: float, each_ns: float, most: int = 512) -> list[ExtendCost]:
    sizes = [1 << power for power in range(most.bit_length())]
    return [ExtendCost(size, LOOP_NS + fixed_ns + each_ns * size) for size in sizes]


def blocks(latency_ns: float, host_ns: float, most: int = 512) -> list[ExtendCost]:
    """A resident kernel: queries wait for nobody until the host is busy."""
    return [ExtendCost(size, max(latency_ns, host_ns * size)) for size in sizes_to(most)]


@pytest.mark.parametrize(("each_ns", "slots"), [(2000.0, 3), (700.0, 7), (20_000.0, 1)])
def test_with_linear_costs_only_the_loop_s_fixed_time_is_amortised(each_ns: float, slots: int) -> None:
    assert fewest_slots(line(0.0, each_ns, 32)) == slots


@given(fixed=st.floats(0, 1e5), each=st.floats(1, 1e4))
def test_the_smallest_slot_count_within_the_fixed_share_is_selected(fixed: float, each: float) -> None:
    costs = line(fixed, each)
    slots = fewest_slots(costs)
    share = (fixed + LOOP_NS) / (fixed + LOOP_NS + each * slots)
    fewer = (fixed + LOOP_NS) / (fixed + LOOP_NS + each * max(slots - 1, 0))
    assert fewer >= FIXED_SHARE * 0.99
    best = max(cost.active / cost.extend_ns for cost in costs)
    assert share <= FIXED_SHARE * 1.01 or slots / (fixed + LOOP_NS + each * slots) >= 0.95 * best


@pytest.mark.parametrize(("latency_ns", "host_ns", "slots"), [(90e3, 900.0, 96), (230e3, 900.0, 256), (9e3, 900.0, 12)])
def test_a_resident_kernel_gets_the_slots_that_keep_the_host_busy_and_no_more(
    latency_ns: float, host_ns: float, slots: int
) -> None:
    assert fewest_slots(blocks(latency_ns, host_ns)) == slots


def test_the_best_rate_decides_where_more_slots_are_slower() -> None:
    falling = [ExtendCost(size, max(1000.0, size * (10.0 + size / 20))) for size in sizes_to(512)]
    assert fewest_slots(falling) == 96  # the best; 64 have 90% of its rate


@given(noise=st.lists(st.floats(1.0, 1.05), min_size=len(SIZES), max_size=len(SIZES)))
def test_five_percent_of_noise_moves_the_slots_by_one(noise: list[float]) -> None:
    measured = [ExtendCost(cost.active, cost.extend_ns * by) for cost, by in zip(line(0, 2e3, 32), noise, strict=True)]
    assert 2 <= fewest_slots(measured) <= 4


# ---- measured


class Blocks:
    """A resident kernel on a virtual clock: a query ends `latency` ns after its admission; `host` ns for each one, in
    the host's thread. `extend` returns when one has ended, and counts extends of ended queries only."""

    padded_slots = 0

    def __init__(self, latency: int, host: int, length: int = 20) -> None:
        self.length = length
        self.clock = np.zeros(1, np.int64)
        self.costs, self.dims, self.extends_made = (latency, host), {"docs": DIM}, 0
        self.ends: dict[int, int] = {}
        self.admitted: list[npt.NDArray[np.float32]] = []
        self._advanced = 0

    def admit(self, query: npt.NDArray[np.float32], params: SearchParams, collection: str) -> int:
        self.admitted.append(query.copy())
        slot = next(slot for slot in range(4096) if slot not in self.ends)
        self.clock[0] += self.costs[1]
        self.ends[slot] = int(self.clock[0]) + self.costs[0]
        return slot

    def extend(self) -> npt.NDArray[np.int32]:
        self.clock[0] = max(int(self.clock[0]), min(self.ends.values()))
        done = [slot for slot, end in self.ends.items() if end <= self.clock[0]]
        self._advanced += self.length * len(done)
        self.extends_made, self._advanced = divmod(self._advanced, len(self.ends))
        return np.array(done, np.int32)

    def result(self, slot: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        return np.zeros(1, np.int64), np.zeros(1, np.float32)

    def extends(self, slot: int) -> int:
        return self.length

    def release(self, slot: int) -> None:
        del self.ends[slot]

    def pause(self, slot: int) -> None: ...


def measured_over(engine: Any, most: int, budget_ns: int = 10**12, index: GraphIndex = INDEX) -> list[ExtendCost]:
    callbacks = Callbacks(engine, Collections({"docs": index}))
    backend = callbacks.backend()._replace(prioritize=1)  # as of engines whose slots advance on their own
    return measure(backend, index.data, 0, 32, 2, most, budget_ns=budget_ns, clock=engine.clock.ctypes.data)


def test_rounds_of_queries_that_advance_on_their_own_are_measured_by_their_rate() -> None:
    costs = measured_over(Blocks(latency=90_000, host=3_000), 128)
    assert [cost.active for cost in costs] == sizes_to(128)
    for cost in costs:
        latency = max(90_000 + 3_000, cost.active * 3_000)
        assert cost.extend_ns == pytest.approx(latency / 20, rel=0.25), cost
    assert fewest_slots(costs) in (24, 32, 48)


def test_an_index_whose_vectors_are_all_refused_is_not_measured() -> None:
    class Refusing(Blocks):
        def admit(self, query: npt.NDArray[np.float32], params: SearchParams, collection: str) -> int:
            return -1

    assert measured_over(Refusing(1, 1), 8) == []


@pytest.mark.parametrize("form", ["resident", None])
def test_hundreds_of_slots_are_measured_on_a_device_in_the_time_given(new_driver: Any, form: LaunchForm | None) -> None:
    most, limit = AUTO_GPU_SLOTS, MAX_EXTENDS_PER_LAUNCH  # a pool's
    engine = CudaEngine(
        new_driver(), b"", {"docs": INDEX}, slots=1024, max_top_m=64, extends_per_launch=limit, form=form,
        fault_poll_ns=LOOK_NS,
    )  # fmt: skip
    begin = time.process_time()  # of which a busy machine gives less in the same time, and it waits on a core
    costs = measure(engine.backend(), INDEX.data, 0, 32, 2, most)
    assert time.process_time() - begin < 5.0  # a second, and the call that it ends in
    assert engine.free_slots == 1024
    assert 1 <= slots_of("auto", [costs]) <= most
    engine.close()
