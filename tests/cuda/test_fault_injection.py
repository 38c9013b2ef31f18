"""Fault injection into the kernels' source: the emulation, and so the tests that rely on it, detects each fault."""

from collections.abc import Callable, Iterable, Mapping
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
from tests.gpu.datasets import exact_vectors, random_index
from tests.gpu.reference import search_reference

# Barriers to remove: each with the source line before it.
BARRIERS = {
    "nodes are counted before the count is cleared": "*node_count = 0;\n    wait_for_block<ONE_WARP>();",
    "nodes are counted before they are written": "= brought[j];\n    }\n    wait_for_block<ONE_WARP>();",
    "neighbours are gathered before parents are chosen": "parent_count = found;\n        }\n        __syncthreads();",
    "tasks are distributed before they are counted": "sums[i] += before;\n    __syncthreads();",
    "parents are selected before all threads have read": "break;\n                }\n            __syncthreads();",
    "new keys are sorted before they are written": "count += __popc(all);\n            }\n        __syncwarp();",
    "new keys are counted before they are written": "= key;\n        }\n        __syncthreads();",
    "sorting steps overtake each other": "max(stride, next) > WARP)\n        __syncthreads();",
    "lanes overtake each other": "else\n        __syncwarp();",
    "duplicates are searched for before keys are written": "fresh[lane + WARP * j] = keys[j];\n        __syncwarp();",
    "a group's rows are fetched before its nodes are written": "[group.place + lane] : 0;\n        __syncwarp();",
}


def run(driver: EmulatedDriver, seed: int) -> bool:
    """Return whether a small batch, by stages and in blocks alternately, matches the reference.

    A warp merges the top_m of one slot, the block that of the other.
    """
    random = np.random.default_rng(seed)
    data = [random_index(random, 300, "l2", "float32", 16, 40), random_index(random, 300, "ip", "float16", 16, 40)]
    wanted = [SearchParams(k=12, top_m=top_m, search_width=8) for top_m in (100, 270)]
    bench = Workbench(driver, data, Limits(slots=2, max_top_m=270))
    queries = exact_vectors(random, 2)
    for slot, query in enumerate(queries):
        bench.admit(slot, query, wanted[slot], slot)
    for number in range(60):
        (bench.extend if number % 2 else bench.extend_in_blocks)()
        for slot, query in enumerate(queries):
            if bench.done(slot):
                ids, distances, extends = search_reference(data[slot], query, wanted[slot])
                if (*bench.result(slot, 12, slot), bench.extends(slot)) != (ids.tolist(), distances.tolist(), extends):
                    return False
        if bench.done(0) and bench.done(1):
            return True
    return False


def run_long_rows(driver: EmulatedDriver, seed: int, places: int) -> bool:
    """Like `run` for one query in a block over rows of several pieces, with `places` for copies in flight."""
    random = np.random.default_rng(seed)
    vectors = checked_vectors(exact_vectors(random, 201, 200), "l2")
    edges = random.integers(200, size=(200, 8), dtype=np.uint32)
    data = IndexData(encode(vectors[:200], "l2", "float32"), edges, np.arange(20, dtype=np.uint32), None)
    bench, wanted = Workbench(driver, [data], Limits(slots=1)), SearchParams(k=12, top_m=40, search_width=8)
    bench.admit(0, vectors[200], wanted)
    for _ in range(60):
        bench.extend_in_blocks(places=places)
        if bench.done(0):
            ids, distances, _ = search_reference(data, vectors[200], wanted)
            return bench.result(0, 12) == (ids.tolist(), distances.tolist())
    return False


def caught(
    program: Path, run: Callable[[EmulatedDriver, int], bool] = run, seeds: Iterable[int] = range(40)
) -> str | None:
    """Run an emulator in several orders. Return how a fault of the kernels shows, or None."""
    for seed in seeds:
        driver = EmulatedDriver(program, seed, block_threads=128)
        try:
            if not run(driver, seed):
                return "wrong result"
        except DeviceError as error:
            return str(error)
        finally:
            driver.close()
    return None


def with_injected(faults: Mapping[str, str]) -> str:
    """Return the kernels' source with faults injected. A program contains all of them, and the environment selects the
    active one (`emulated::injected_fault()`): compiling takes far longer than detecting one."""
    source = kernel_source()
    for text, replacement in faults.items():
        assert source.count(text) == 1, f"{text!r} occurs {source.count(text)} times in the source"
        source = source.replace(text, replacement)
    return source


ONE_THREAD_SKIPS = 100  # added to a barrier's number: only one thread skips it
DIVERGES = list(BARRIERS).index("new keys are counted before they are written")
SHUFFLE, OUT_OF_BOUNDS, LONG_KEYS, SHIFT, COUNT, DUE, LOST = range(200, 207)
NO_WAIT, SHORT_WAIT = 210, 220  # plus the number of groups of the original wait

# Injected faults of two programs: source text and its replacement.
ORDERS = (
    {
        barrier: f"{line}\n{{ if (emulated::injected_fault() != {number} && "
        f"(emulated::injected_fault() != {number + ONE_THREAD_SKIPS} || threadIdx.x != 40)) {call.strip()} }}"
        for number, barrier in enumerate(BARRIERS.values())
        for line, call in [barrier.rsplit("\n", 1)]
    }
    | {
        "sum += __shfl_xor_sync(together, sum, half);": f"if (emulated::injected_fault() != {SHUFFLE} || "
        "threadIdx.x % TEAM != 3) sum += __shfl_xor_sync(together, sum, half);",
        "slot->task_count = count;": f"if (emulated::injected_fault() != {COUNT}) slot->task_count = count;",
        "    set_due(batch, slot_number, collection, count);": f"if (emulated::injected_fault() != {DUE}) "
        "set_due(batch, slot_number, collection, count);",
        "    const uint32 position = atomicAdd(&queue->records, 1u);": f"    if (emulated::injected_fault() == {LOST} "
        "&& slot_number == 3) return;\n    const uint32 position = atomicAdd(&queue->records, 1u);",
    }
    | {
        f"wait_for_copies<{later}>();": f"{{ if (emulated::injected_fault() != {NO_WAIT + later}) "
        f"emulated::wait_for_copies({later} + (emulated::injected_fault() == {SHORT_WAIT + later})); }}"
        for later in (0, 1)
    }
)

MEMORY = {
    "nodes[i] = key == NO_KEY ? -1": "nodes[i + (slot_number == 1 && "
    f"emulated::injected_fault() == {OUT_OF_BOUNDS} ? 1ll << 44 : 0)] = key == NO_KEY ? -1",  # never mapped
    "fill_keys(keys, top_m, max(power_of_two(top_m), MERGE_KEYS));": "fill_keys(keys, top_m, "
    f"(emulated::injected_fault() == {LONG_KEYS}) + max(power_of_two(top_m), MERGE_KEYS));",
    "((1u << threadIdx.x % WARP) - 1)": f"((1u << (threadIdx.x % WARP + (emulated::injected_fault() == {SHIFT}))) - 1)",
}

Inject = Callable[[int], None]


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Inject:
    """Return a function that selects, by number, the fault of programs started afterwards."""
    return lambda number: monkeypatch.setenv("PLANTED_FAULT", str(number))


@pytest.fixture(scope="module")
def orders() -> Path:
    """Build the program of ordering faults and of a fault of the resident kernel."""
    return emulator((), with_injected(ORDERS))


@pytest.fixture(scope="module")
def memory() -> Path:
    """Build the program of faults that the sanitizers detect."""
    return emulator(source=with_injected(MEMORY))


def test_no_fault_is_detected_in_the_original_kernels() -> None:
    assert caught(emulator(), seeds=range(8)) is None


@pytest.mark.parametrize("where", BARRIERS)
def test_a_missing_barrier_is_detected(where: str, orders: Path, inject: Inject) -> None:
    inject(list(BARRIERS).index(where))
    assert caught(orders) is not None


@pytest.mark.parametrize("fault", [NO_WAIT, SHORT_WAIT])
def test_reading_rows_before_their_copy_completes_is_detected(fault: int, orders: Path, inject: Inject) -> None:
    """A wait is removed, or leaves one group too many in flight; rows are one piece or several."""
    inject(fault + 1)
    assert caught(orders) is not None
    for later, places in ((1, 8), (0, 4)):
        inject(fault + later)
        assert caught(orders, partial(run_long_rows, places=places)) is not None


def test_injected_faults_stay_inactive_unless_selected(orders: Path, memory: Path) -> None:
    for program in (orders, memory):
        driver = EmulatedDriver(program, 0, block_threads=128)
        assert run(driver, 0)
        assert all(run_long_rows(driver, 0, places) for places in RING_PLACES)
        driver.close()


@pytest.mark.parametrize("fault", [COUNT, DUE])
def test_gathered_tasks_that_are_not_counted_are_detected(fault: int, orders: Path, inject: Inject) -> None:
    inject(fault)
    assert caught(orders) is not None


@pytest.mark.parametrize(
    ("program", "fault", "report"),
    [
        ("memory", OUT_OF_BOUNDS, "ERROR: AddressSanitizer: SEGV"),
        ("memory", LONG_KEYS, "ERROR: AddressSanitizer: heap-buffer-overflow"),  # past a block's shared memory
        ("memory", SHIFT, "runtime error: shift exponent"),
        ("orders", SHUFFLE, "EMULATED FAULT: threads wait for others that never come"),
        ("orders", ONE_THREAD_SKIPS + DIVERGES, "EMULATED FAULT: threads of a block wait at different barriers"),
    ],
)
def test_a_fault_is_reported_by_its_kind(
    program: str, fault: int, report: str, orders: Path, memory: Path, inject: Inject
) -> None:
    inject(fault)
    assert report in (caught({"orders": orders, "memory": memory}[program]) or "")


def test_a_fault_is_reported_by_the_next_call_that_waits(tmp_path: Path, new_driver: NewDriver) -> None:
    driver = new_driver()
    driver.fill(driver.create_stream(), 64, 0, 1)  # an address that was never allocated
    with pytest.raises(DeviceError, match="the emulated device ended"):
        driver.synchronise(0)


def test_without_a_compiler_tests_skip_locally_and_fail_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"g\+\+ is not installed"):
        require_compiler()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="in CI the kernels must run"):
        require_compiler()
