"""What is planted in the kernels' text is caught: the emulation can fail, and so can the tests that rely on it."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gpu import SearchParams
from gpu.cuda.compiler import kernel_source
from gpu.cuda.layout import RING_PLACES
from gpu.errors import DeviceError
from gpu.index.data import IndexData
from gpu.index.rows import checked_vectors, encode
from tests.cuda.conftest import NewDriver
from tests.cuda.emulation import EmulatedDriver, emulator, require_compiler
from tests.cuda.workbench import Limits, Workbench
from tests.gpu.cases import exact_vectors, random_index
from tests.gpu.reference import search_reference

SEEDS = range(40)

# A barrier that is left out: the line that it follows, as the source has it.
BARRIERS = {
    "nodes are counted before there are none": "*node_count = 0;\n    wait_for_block<ONE_WARP>();",
    "nodes are counted before they are there": "= brought[j];\n    }\n    wait_for_block<ONE_WARP>();",
    "neighbours are gathered before parents are chosen": "parent_count = found;\n        }\n        __syncthreads();",
    "tasks are shared out before they are counted": "sums[i] += before;\n    __syncthreads();",
    "parents are selected before all have looked": "break;\n                }\n            __syncthreads();",
    "new keys are sorted before they are there": "count += __popc(all);\n            }\n        __syncwarp();",
    "new keys are counted before they are there": "= key;\n        }\n        __syncthreads();",
    "sorting steps overtake each other": "max(stride, next) > WARP)\n        __syncthreads();",
    "lanes overtake each other": "else\n        __syncwarp();",
    "doubles are looked for before keys are there": "fresh[lane + WARP * j] = keys[j];\n        __syncwarp();",
}


def run(driver: EmulatedDriver, seed: int) -> bool:
    """Whether a small batch, by stages and fused in turn, finds what the reference finds.

    One slot's top_m is merged by a warp, the other's by the block.
    """
    random = np.random.default_rng(seed)
    data = [random_index(random, 300, "l2", "float32", 16, 40), random_index(random, 300, "ip", "int8", 16, 40)]
    wanted = [SearchParams(k=12, top_m=top_m, search_width=8) for top_m in (100, 270)]
    bench = Workbench(driver, data, Limits(slots=2, max_top_m=270))
    queries = exact_vectors(random, 2)
    for slot, query in enumerate(queries):
        bench.admit(slot, query, wanted[slot], slot)
    for number in range(60):
        (bench.extend if number % 2 else bench.extend_fused)()
        for slot, query in enumerate(queries):
            if bench.done(slot):
                ids, distances, extends = search_reference(data[slot], query, wanted[slot])
                if (*bench.result(slot, 12, slot), bench.extends(slot)) != (ids.tolist(), distances.tolist(), extends):
                    return False
        if bench.done(0) and bench.done(1):
            return True
    return False


def run_long_rows(driver: EmulatedDriver, seed: int, places: int) -> bool:
    """The same for one query, fused, over rows of several pieces, with so many places for what is under way."""
    random = np.random.default_rng(seed)
    vectors = checked_vectors(exact_vectors(random, 201, 200), "l2")
    edges = random.integers(200, size=(200, 8), dtype=np.uint32)
    data = IndexData(encode(vectors[:200], "l2", "float32"), edges, np.arange(20, dtype=np.uint32), None)
    bench, wanted = Workbench(driver, [data], Limits(slots=1)), SearchParams(k=12, top_m=40, search_width=8)
    bench.admit(0, vectors[200], wanted)
    for _ in range(60):
        bench.extend_fused(places=places)
        if bench.done(0):
            ids, distances, _ = search_reference(data, vectors[200], wanted)
            return bench.result(0, 12) == (ids.tolist(), distances.tolist())
    return False


def caught(program: Path, run: Callable[[EmulatedDriver, int], bool] = run) -> str | None:
    """How runs of an emulator in several orders give a fault of the kernels away, or None."""
    for seed in SEEDS:
        driver = EmulatedDriver(program, seed, block_threads=128)
        try:
            if not run(driver, seed):
                return "wrong result"
        except DeviceError as error:
            return str(error)
        finally:
            driver.close()
    return None


def planted(faults: Mapping[str, str]) -> str:
    """The kernels' text with other text in its places. A program has all its faults; `emulated::planted()`, of the
    environment, says which one it is to show: compiling takes far longer than finding one."""
    source = kernel_source()
    for text, replacement in faults.items():
        assert source.count(text) == 1, f"{text!r} is in the source {source.count(text)} times"
        source = source.replace(text, replacement)
    return source


MISSES = 100  # added to a barrier's number: one thread misses it
SHUFFLE, BEYOND, LONG_KEYS, SHIFT, COUNT, DUE, LOST = range(200, 207)
NO_WAIT, SHORT_WAIT = 210, 220  # and the groups that are waited for as it is

# What is planted, in two programs: the text, and what takes its place.
ORDERS = (
    {
        barrier: f"{line}\n{{ if (emulated::planted() != {number} && "
        f"(emulated::planted() != {number + MISSES} || threadIdx.x != 40)) {call.strip()} }}"
        for number, barrier in enumerate(BARRIERS.values())
        for line, call in [barrier.rsplit("\n", 1)]
    }
    | {
        "sum += __shfl_xor_sync(together, sum, half);": f"if (emulated::planted() != {SHUFFLE} || "
        "threadIdx.x % TEAM != 3) sum += __shfl_xor_sync(together, sum, half);",
        "slot->task_count = count;": f"if (emulated::planted() != {COUNT}) slot->task_count = count;",
        "    set_due(batch, slot_number, collection, count);": f"if (emulated::planted() != {DUE}) "
        "set_due(batch, slot_number, collection, count);",
        "    const uint32 position = atomicAdd(&queue->records, 1u);": f"    if (emulated::planted() == {LOST} && "
        "slot_number == 3) return;\n    const uint32 position = atomicAdd(&queue->records, 1u);",
    }
    | {
        f"wait_for_copies<{later}>();": f"{{ if (emulated::planted() != {NO_WAIT + later}) "
        f"emulated::wait_for_copies({later} + (emulated::planted() == {SHORT_WAIT + later})); }}"
        for later in (0, 1)
    }
)

MEMORY = {
    "nodes[i] = key == NO_KEY ? -1": "nodes[i + (slot_number == 1 && "
    f"emulated::planted() == {BEYOND} ? 1ll << 44 : 0)] = key == NO_KEY ? -1",  # no process has memory there
    "fill_keys(keys, top_m, max(power_of_two(top_m), MERGE_KEYS));": "fill_keys(keys, top_m, "
    f"(emulated::planted() == {LONG_KEYS}) + max(power_of_two(top_m), MERGE_KEYS));",
    "((1u << threadIdx.x % WARP) - 1)": f"((1u << (threadIdx.x % WARP + (emulated::planted() == {SHIFT}))) - 1)",
}

Plant = Callable[[int], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Has the programs that start from now on show a fault, by its number."""
    return lambda number: monkeypatch.setenv("PLANTED_FAULT", str(number))


@pytest.fixture(scope="module")
def orders() -> Path:
    """Faults in the order of threads, and one of the resident kernel."""
    return emulator((), planted(ORDERS))


@pytest.fixture(scope="module")
def memory() -> Path:
    """With those that the sanitizers see."""
    return emulator(source=planted(MEMORY))


def test_nothing_is_caught_in_the_kernels_as_they_are() -> None:
    assert caught(emulator()) is None


@pytest.mark.parametrize("where", BARRIERS)
def test_a_missing_barrier_is_caught(where: str, orders: Path, plant: Plant) -> None:
    plant(list(BARRIERS).index(where))
    assert caught(orders) is not None


@pytest.mark.parametrize("fault", [NO_WAIT, SHORT_WAIT])
def test_rows_that_are_added_before_they_are_there_are_caught(fault: int, orders: Path, plant: Plant) -> None:
    """A wait that is left out, and one that leaves a group too many under way; rows are one piece, or several."""
    plant(fault + 1)
    assert caught(orders) is not None
    for later, places in ((1, 8), (0, 4)):
        plant(fault + later)
        assert caught(orders, partial(run_long_rows, places=places)) is not None


def test_what_is_planted_and_not_asked_for_is_not_there(orders: Path, memory: Path) -> None:
    for program in (orders, memory):
        driver = EmulatedDriver(program, 0, block_threads=128)
        assert run(driver, 0)
        assert all(run_long_rows(driver, 0, places) for places in RING_PLACES)
        driver.close()


@pytest.mark.parametrize("kept", [COUNT, DUE])
def test_tasks_that_are_gathered_and_not_counted_are_caught(kept: int, orders: Path, plant: Plant) -> None:
    plant(kept)
    assert caught(orders) is not None


def test_a_write_out_of_bounds_is_caught(memory: Path, plant: Plant) -> None:
    plant(BEYOND)
    report = caught(memory)
    assert report is not None
    assert "ERROR: AddressSanitizer: SEGV" in report


def test_a_write_past_a_block_s_shared_memory_is_caught(memory: Path, plant: Plant) -> None:
    plant(LONG_KEYS)
    report = caught(memory)
    assert report is not None
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in report


def test_a_barrier_that_some_threads_do_not_reach_is_caught(orders: Path, plant: Plant) -> None:
    plant(MISSES + list(BARRIERS).index("new keys are counted before they are there"))
    report = caught(orders)
    assert report is not None
    assert "EMULATED FAULT: threads of a block wait at different barriers" in report


def test_a_shuffle_that_misses_a_partner_is_caught(orders: Path, plant: Plant) -> None:
    plant(SHUFFLE)
    report = caught(orders)
    assert report is not None
    assert "EMULATED FAULT: threads wait for others that never come" in report


def test_undefined_arithmetic_is_caught(memory: Path, plant: Plant) -> None:
    plant(SHIFT)
    report = caught(memory)
    assert report is not None
    assert "runtime error: shift exponent" in report


def test_a_fault_is_told_by_the_next_call_that_waits(tmp_path: Path, new_driver: NewDriver) -> None:
    driver = new_driver()
    driver.fill(driver.create_stream(), 64, 0, 1)  # an address that nobody gave out
    with pytest.raises(DeviceError, match="the emulated device ended"):
        driver.synchronise(0)


def test_without_a_compiler_tests_are_skipped_but_fail_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"g\+\+ is not installed"):
        require_compiler()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="in CI the kernels must run"):
        require_compiler()
