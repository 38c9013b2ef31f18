"""Tests of concurrent blocks, each a thread, under the thread sanitizer: fences order reads of other blocks' writes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpu import SearchParams
from gpu.errors import DeviceError
from tests.cuda.emulation import BLOCKS_AT_ONCE, EmulatedDriver, emulator, require_thread_sanitizer
from tests.cuda.test_fault_injection import with_injected
from tests.cuda.workbench import Limits, Workbench
from tests.gpu.datasets import exact_vectors, random_index
from tests.gpu.reference import search_reference

SLOTS, LIMIT = 4, 3

# Injected faults, all in one program: source text and its replacement; {selected} is true if this fault is selected.
FAULTS = {
    "a block leaves without a fence": (
        "    __threadfence();\n    if (atomicInc(", "    if (!{selected}) __threadfence();\n    if (atomicInc(",
    ),
    "the last block looks without a fence": (
        "next launch\n    __threadfence();", "next launch\n    if (!{selected}) __threadfence();",
    ),
    "blocks leave by a plain count": (
        "(atomicInc(&counters->left, gridDim.x - 1) != gridDim.x - 1)",
        "({selected} ? counters->left++ < gridDim.x - 1 : atomicInc(&counters->left, gridDim.x - 1) != gridDim.x - 1)",
    ),
    "shares of tasks overlap": (
        "/ WARP * share, total);", "/ WARP * share / ({selected} ? 2 : 1), total);",
    ),
}  # fmt: skip

# Faults of the resident kernel.
RESIDENT_FAULTS = {
    "a record is published before its slot's results": (
        "store_release_system(&record->slot, slot);",
        "if ({selected}) __atomic_store_n(&record->slot, slot, __ATOMIC_RELAXED);"
        " else store_release_system(&record->slot, slot);",
    ),
    "known entries are taken without a fence": (
        "__threadfence();  // SYNC POINT: known entries", "if (!{selected}) __threadfence();  //",
    ),
    "entries are taken by a plain word": (
        "if (found == taken) return entry;",
        "if ({selected}) queue->taken[ring] = taken + 1; if (found == taken) return entry;",
    ),
    "a goal is read by a plain load": (
        "loaded = load_system(goal);", "loaded = {selected} ? *goal : load_system(goal);",
    ),
}  # fmt: skip
ALL = [*FAULTS, *RESIDENT_FAULTS]


@pytest.fixture(scope="module", autouse=True)
def thread_sanitizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    require_thread_sanitizer(tmp_path_factory.mktemp("sanitizer"))


def search(driver: EmulatedDriver, seed: int) -> None:
    """Check searches of several slots, by stages and in blocks alternately, against the reference."""
    random = np.random.default_rng(seed)
    data = random_index(random, 200, "l2", "float32", 8, 12)
    bench = Workbench(driver, [data], Limits(slots=SLOTS))
    queries = exact_vectors(random, SLOTS)
    wanted = [SearchParams(k=4, top_m=10 + 8 * slot, search_width=2) for slot in range(SLOTS)]
    for slot, query in enumerate(queries):
        bench.admit(slot, query, wanted[slot])
    number = 0
    while not all(bench.done(slot) for slot in range(SLOTS)):
        if number % 2:
            bench.extend_in_blocks(LIMIT)
        else:
            bench.stages(SLOTS, 3, LIMIT, 0)
        number += 1
    for slot, query in enumerate(queries):
        ids, distances, extends = search_reference(data, query, wanted[slot])
        assert (*bench.result(slot, 4), bench.extends(slot)) == (ids.tolist(), distances.tolist(), extends)


def search_resident(driver: EmulatedDriver, seed: int) -> None:
    """Check searches by two blocks of the resident kernel; some slots pause and continue in any block."""
    random = np.random.default_rng(seed)
    data = random_index(random, 200, "l2", "float32", 8, 12)
    bench = Workbench(driver, [data], Limits(slots=8))
    queries, wanted = exact_vectors(random, 8), [SearchParams(k=4, top_m=8 + slot, search_width=2) for slot in range(8)]
    lines = [bench.line(slot, query, wanted[slot]) for slot, query in enumerate(queries)]
    staged = bench.upload(np.stack(lines))
    bench.stay(blocks=2, life_us=60_000_000)
    driver.act_as_host(bench.batch, bench.shape.entries, 8, staged)
    driver.synchronise(bench.stream)
    for slot, query in enumerate(queries):
        ids, distances, extends = search_reference(data, query, wanted[slot])
        assert (*bench.result(slot, 4), bench.extends(slot)) == (ids.tolist(), distances.tolist(), extends)


def report_of(program: Path, seed: int, act: Callable[[EmulatedDriver, int], None] = search) -> str:
    """Return the sanitizer's report, or an empty string."""
    driver = EmulatedDriver(program, seed, block_threads=32)
    try:
        act(driver, seed)
    except DeviceError as error:
        return str(error)
    finally:
        driver.close()
    return ""


@pytest.mark.parametrize("seed", range(3))
def test_concurrent_blocks_are_race_free_and_match_the_reference(seed: int) -> None:
    assert report_of(emulator(BLOCKS_AT_ONCE), seed) == ""


@pytest.fixture(scope="module")
def with_faults() -> Path:
    faults = {
        text: replacement.replace("{selected}", f"(emulated::injected_fault() == {number})")
        for number, (text, replacement) in enumerate((FAULTS | RESIDENT_FAULTS).values())
    }
    return emulator(BLOCKS_AT_ONCE, with_injected(faults))


def reported(program: Path, fault: str, act: Callable[[EmulatedDriver, int], None]) -> str:
    """Return the first report of a fault over many orders: on busy cores, blocks rarely run at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED_FAULT", str(ALL.index(fault)))
        return next(filter(None, (report_of(program, seed, act) for seed in range(60))), "")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_fence_or_non_atomic_word_is_detected(fault: str, with_faults: Path) -> None:
    assert "ThreadSanitizer: data race" in reported(with_faults, fault, search)


@pytest.mark.parametrize("seed", range(3))
def test_resident_blocks_race_neither_with_each_other_nor_with_the_host(seed: int) -> None:
    assert report_of(emulator(BLOCKS_AT_ONCE), seed, search_resident) == ""


@pytest.mark.parametrize("fault", RESIDENT_FAULTS)
def test_a_missing_fence_or_plain_word_between_resident_blocks_and_the_host_is_detected(
    fault: str, with_faults: Path
) -> None:
    assert "ThreadSanitizer: data race" in reported(with_faults, fault, search_resident)
