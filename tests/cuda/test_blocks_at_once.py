"""Blocks that run at once, each a thread, under the thread sanitizer: fences order what one reads of another's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpu import SearchParams
from gpu.cuda.compiler import kernel_source
from gpu.errors import DeviceError
from tests.cuda.emulation import BLOCKS_AT_ONCE, EmulatedDriver, build, emulator, require_thread_sanitizer
from tests.cuda.test_planted import planted
from tests.cuda.workbench import Limits, Workbench
from tests.gpu.cases import exact_vectors, random_index
from tests.gpu.reference import search_reference

SLOTS, LIMIT = 4, 3

# What is planted: the text, and what takes its place.
FAULTS = {
    "a block leaves without a fence": ("    __threadfence();\n    if (atomicInc(", "    if (atomicInc("),
    "the last block looks without a fence": ("next launch\n    __threadfence();", "next launch\n"),
    "blocks leave by a plain count": (
        "atomicInc(&counters->left, gridDim.x - 1) != gridDim.x - 1", "counters->left++ < gridDim.x - 1",
    ),
    "shares of tasks overlap": ("/ WARP * share, end = min(begin", "/ WARP * share / 2, end = min(begin"),
    "reasons to stop are read as if nobody wrote them": (
        "others = load_system(&at<Counters>(batch.counters)->stop);", "others = at<Counters>(batch.counters)->stop;",
    ),
}  # fmt: skip


# The same of blocks that stay, all in one program: the text, and what takes its place where the fault is wanted.
RESIDENT_FAULTS = {
    "a record is told without its slot's results": [
        ("store_release_system(&record->slot, slot);", "__atomic_store_n(&record->slot, slot, __ATOMIC_RELAXED);"),
    ],
    "known entries are taken without a fence": [
        ("__threadfence();  // SYNC POINT: entries that are known are there, and what the host wrote before them", ""),
    ],
    "entries are taken by a plain word": [
        ("if (found == taken) return entry;", "queue->taken[ring] = taken + 1; if (found == taken) return entry;"),
    ],
    "a goal is read as if nobody wrote it": [("asked = load_system(goal);", "asked = *goal;")],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def thread_sanitizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    require_thread_sanitizer(tmp_path_factory.mktemp("sanitizer"))


def search(driver: EmulatedDriver, seed: int) -> None:
    """Searches of several slots, by launches of the stages and fused in turn, find what the reference finds."""
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
            bench.extend_fused(LIMIT, near=number % 4 == 1)
        else:
            bench.stages(SLOTS, 8, 3, LIMIT, 0)
        number += 1
    for slot, query in enumerate(queries):
        ids, distances, extends = search_reference(data, query, wanted[slot])
        assert (*bench.result(slot, 4), bench.extends(slot)) == (ids.tolist(), distances.tolist(), extends)


def search_resident(driver: EmulatedDriver, seed: int) -> None:
    """The same by two blocks that stay, for slots of which some stop short and go on, in any block."""
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
    """What the sanitizer reports; empty if nothing."""
    driver = EmulatedDriver(program, seed, block_threads=32)
    try:
        act(driver, seed)
    except DeviceError as error:
        return str(error)
    finally:
        driver.close()
    return ""


@pytest.mark.parametrize("seed", range(6))
def test_blocks_at_once_race_nowhere_and_find_what_the_reference_finds(seed: int) -> None:
    assert report_of(emulator(BLOCKS_AT_ONCE), seed) == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_fence_or_a_word_that_is_not_atomic_is_caught(fault: str, tmp_path: Path) -> None:
    program = build(tmp_path, planted(*FAULTS[fault]), sanitizers=BLOCKS_AT_ONCE)
    reports = (report_of(program, seed) for seed in range(8))
    assert "ThreadSanitizer: data race" in next(filter(None, reports), "")


@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_stay_race_neither_with_each_other_nor_with_the_host(seed: int) -> None:
    assert report_of(emulator(BLOCKS_AT_ONCE), seed, search_resident) == ""


@pytest.fixture(scope="module")
def with_faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = kernel_source()
    for number, fault in enumerate(RESIDENT_FAULTS.values()):
        for text, replacement in fault:
            assert source.count(text) == 1, text
            code, *_ = text.partition("  //")
            source = source.replace(text, f"if (emulated::planted() == {number}) {{ {replacement} }} else {{ {code} }}")
    return build(tmp_path_factory.mktemp("faults"), source, sanitizers=BLOCKS_AT_ONCE)


@pytest.mark.parametrize("fault", RESIDENT_FAULTS)
def test_a_missing_fence_or_a_plain_word_between_blocks_that_stay_and_the_host_is_caught(
    fault: str, with_faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_FAULT", str(list(RESIDENT_FAULTS).index(fault)))
    reports = (report_of(with_faults, seed, search_resident) for seed in range(8))
    assert "ThreadSanitizer: data race" in next(filter(None, reports), "")
