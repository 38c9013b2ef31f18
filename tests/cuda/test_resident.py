"""Tests of the resident kernel: queries start and finish without a launch; pauses, releases and the end of a launch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu import DeviceError, SearchParams
from gpu.compiled import c_function
from gpu.cuda.backend import INTERRUPT_POLL_NS
from gpu.cuda.engine import CudaEngine
from gpu.cuda.layout import RECORD, SLOT_BITS
from gpu.engine import PAUSE, RELEASE
from gpu.index.rows import FloatArray
from ipc.native.arrays import int64_at as words_at
from tests.cuda.conftest import NewDriver
from tests.cuda.emulation import LOOK_NS, EmulatedDriver, emulator
from tests.cuda.recorder import RecordingDriver
from tests.cuda.searches import INDEX, PARAMS, queries, searched
from tests.cuda.test_fault_injection import LOST, ORDERS, with_injected
from tests.gpu.test_restricted import Compiled

LONG, SHORT = SearchParams(10, 64, 1), SearchParams(10, 16, 4)


def opened(driver: Any, slots: int = 12, **options: Any) -> CudaEngine:
    options = {"form": "resident", "extends_per_launch": 1024, "max_top_m": 64, "fault_poll_ns": LOOK_NS, **options}
    return CudaEngine(driver, b"", {"docs": INDEX}, slots=slots, **options)


def one_block(driver: EmulatedDriver) -> EmulatedDriver:
    driver.resident_blocks = lambda kernel, threads, shared_bytes: 1  # type: ignore[method-assign]
    return driver


def first_recorded(engine: CudaEngine) -> int:
    """Return the slot of the device's first record."""
    return int(engine.batch_memory().records.view(RECORD)["slot"][0]) & ((1 << SLOT_BITS) - 1)


def launches(engine: CudaEngine) -> int:
    return engine.handle.host.launches


def run_all(engine: CudaEngine, vectors: FloatArray) -> list[list[int]]:
    """Return each query's ids; queries are admitted as slots become free."""
    found: dict[int, list[int]] = {}
    running: dict[int, int] = {}
    number = 0
    while len(found) < len(vectors):
        while number < len(vectors) and engine.free_slots:
            running[engine.admit(vectors[number], PARAMS, "docs")] = number
            number += 1
        for slot in engine.extend().tolist():
            found[running.pop(slot)] = engine.result(slot)[0].tolist()
            engine.release(slot)
    return [found[i] for i in range(len(vectors))]


@pytest.mark.parametrize("seed", range(2))
def test_more_queries_than_blocks_are_answered_by_one_launch(new_driver: NewDriver, seed: int) -> None:
    vectors = queries(40, seed)
    engine = opened(new_driver(seed), life_us=60_000_000)
    before = launches(engine)
    assert run_all(engine, vectors) == [searched(query) for query in vectors]
    assert launches(engine) - before == 1
    engine.close()


def test_a_launch_that_expires_during_queries_is_relaunched_without_loss(new_driver: NewDriver) -> None:
    vectors = queries(30)
    engine = opened(new_driver(), life_us=300)
    before = launches(engine)
    assert run_all(engine, vectors) == [searched(query) for query in vectors]
    assert launches(engine) - before > 3
    engine.close()


def test_blocks_exit_without_a_host(new_driver: NewDriver) -> None:
    """Simulate a killed host: queries in the rings, goals, and no doorbell."""
    driver = new_driver()
    engine = opened(driver, life_us=20_000)
    compiled = Compiled(engine, 12)
    for query in queries(12):
        compiled.ask(query, None, 0)
    first = compiled.step()
    while not driver.idle(engine.handle.host.stream):
        pass
    rest = sorted({*range(12)} - {*first})
    ids, _ = compiled.finish(rest)  # as if the host had come back
    assert ids.tolist() == [searched(queries(12)[slot], LONG)[:10] for slot in rest]
    engine.close()


def test_a_paused_query_makes_no_extend_and_the_prioritized_query_is_taken_first(
    new_driver: NewDriver,
) -> None:
    engine = opened(one_block(new_driver()))
    compiled, vectors = Compiled(engine, 12), queries(8)
    long = [compiled.ask(query, None, 0, top_m=64) for query in vectors[:3]]
    hurried = compiled.ask(vectors[3], None, 0)
    assert compiled.prioritize(compiled.handle, hurried) == 0
    engine.interrupt_when(lambda: True)  # so the pause precedes the query's end on the device
    order = [*compiled.step()]
    compiled.change(compiled.handle, long[1], PAUSE)
    engine.stop()
    stood = engine.extends(long[1])
    while not {hurried, long[2]} <= {*order}:
        order += compiled.step()
    # Though it was admitted last. `step` reports slots in admission order, so a late host sees another one before it.
    assert first_recorded(engine) == hurried
    assert engine.extends(long[1]) == stood
    assert long[1] not in order
    engine.resume(long[1])
    ids, _ = compiled.finish([long[1]])
    assert ids[0].tolist() == searched(vectors[1], LONG)[:10]
    engine.close()


def test_a_running_query_stops_after_an_extend_and_resumes_there(new_driver: NewDriver) -> None:
    engine = opened(one_block(new_driver()), slots=1, max_top_m=256)
    engine.interrupt_when(lambda: True)
    longest = SearchParams(10, 256, 1)  # many extends to be stopped at
    vectors, stood = iter(queries(400)), set[int]()
    while not stood - {0} and (query := next(vectors, None)) is not None:  # its progress is random
        slot = engine.admit(query, longest, "docs")
        done = engine.extend().tolist()
        while not done:
            if not stood - {0}:
                engine.stop()  # lowers the goal of the running query
                stood.add(engine.extends(slot))
            done = engine.extend().tolist()
        stood.discard(engine.extends(slot))  # all of its extends
        assert engine.result(slot)[0].tolist() == searched(query, longest)
        engine.release(slot)
    assert stood - {0}, "no query was stopped between its start and its end"
    engine.close()


def test_decode_is_not_starved_by_prioritized_queries(new_driver: NewDriver) -> None:
    engine = opened(one_block(new_driver()), slots=32)
    compiled, vectors = Compiled(engine, 32), queries(31)
    patient = compiled.ask(vectors[0], None, 0)
    for query in vectors[1:]:
        compiled.prioritize(compiled.handle, compiled.ask(query, None, 0))
    order: list[int] = []
    while patient not in order:
        order += compiled.step()
    assert 0 < len(order) <= 24  # the eighth to be taken, not the last
    engine.close()


def test_a_running_query_is_released_at_once_and_its_slot_reused(new_driver: NewDriver) -> None:
    engine = opened(one_block(new_driver()), slots=2)
    compiled, vectors = Compiled(engine, 2), queries(9)
    for round in range(6):
        first, second = (compiled.ask(query, None, 0, top_m=64) for query in vectors[round : round + 2])
        compiled.prioritize(compiled.handle, second)
        while second not in compiled.step():
            pass
        for slot in (first, second):
            compiled.change(compiled.handle, slot, RELEASE)
        assert engine.free_slots == 2
    slot = compiled.ask(vectors[8], None, 0)
    assert compiled.finish([slot])[0][0].tolist() == searched(vectors[8], SearchParams(10, 64, 1))
    engine.close()


def test_indexes_are_loaded_and_unloaded_while_blocks_are_resident(new_driver: NewDriver) -> None:
    driver = new_driver()
    engine = opened(driver, max_top_m=64)
    vectors = queries(6)
    slots = [engine.admit(query, PARAMS, "docs") for query in vectors]
    done = engine.extend().tolist()
    engine.load("other", INDEX)
    later = engine.admit(vectors[0], PARAMS, "other")
    while engine.active_slots:
        done += engine.extend().tolist()
    assert sorted(done) == sorted([*slots, later])
    assert [engine.result(slot)[0].tolist() for slot in slots] == [searched(query) for query in vectors]
    assert engine.result(later)[0].tolist() == searched(vectors[0])
    for slot in slots:
        engine.release(slot)
    assert engine.unload("docs")
    engine.close()


def test_an_arrival_ends_the_step_while_queries_continue(new_driver: NewDriver) -> None:
    engine = opened(new_driver())
    engine.interrupt_when(lambda: True)
    slot = engine.admit(queries(1)[0], LONG, "docs")
    engine.pause(slot)
    other = engine.admit(queries(2)[1], LONG, "docs")
    assert engine.extend().tolist() == []  # no query of so many extends is that fast
    engine.release(other)
    engine.resume(slot)
    while slot not in engine.extend().tolist():
        pass
    assert engine.result(slot)[0].tolist() == searched(queries(1)[0], LONG)
    engine.close()


def test_extends_are_counted_once_over_several_reports(new_driver: NewDriver) -> None:
    engine = opened(new_driver(), slots=1)
    made = 0
    slot = engine.admit(queries(1)[0], LONG, "docs")
    engine.interrupt_when(lambda: True)
    while True:
        done = engine.extend().tolist()
        made += engine.extends_made
        if done:
            break
    assert made == engine.extends(slot) > 1
    engine.close()


@c_function("int64(int64)")
def counts_calls(counted: int) -> Any:
    words_at(counted, 1)[0] += 1
    return 0


@pytest.mark.parametrize("form", ["resident", "loop"])
def test_the_host_looks_for_arrivals_every_2_us_at_most(new_driver: NewDriver, form: str) -> None:
    engine = opened(new_driver(), slots=1, fault_poll_ns=20_000_000, form=form)
    assert set(engine.forms.values()) == {form}
    counted, host, waits = np.zeros(1, np.int64), engine.handle.host, 0
    host.interrupt, host.interrupt_argument = counts_calls.address, counted.ctypes.data
    before = engine.waited_ns
    engine.admit(queries(1)[0], LONG, "docs")
    while engine.active_slots:
        engine.extend()
        waits += 1
    assert 1 < counted[0] <= (engine.waited_ns - before) // INTERRUPT_POLL_NS + waits
    engine.close()


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build kernels that do not record the completion of one slot's queries."""
    monkeypatch.setenv("PLANTED_FAULT", str(LOST))
    return emulator((), with_injected(ORDERS))


def test_a_lost_completion_is_reported_when_the_launch_ends(losing: Path, new_driver: NewDriver) -> None:
    engine = opened(new_driver(program=losing), life_us=30_000)
    with pytest.raises(DeviceError, match="ended without records of 1 of its queries"):
        run_all(engine, queries(8))
    engine.close()


def test_releasing_a_query_that_never_completes_times_out(losing: Path, new_driver: NewDriver) -> None:
    engine = opened(new_driver(program=losing), life_us=100_000_000, fault_poll_ns=1_000_000)
    slots = [engine.admit(query, PARAMS, "docs") for query in queries(4)]
    engine.extend()
    engine.handle.host.timeout_ns = 100_000_000  # only now: what the device does may take longer on a busy machine
    with pytest.raises(DeviceError, match=r"has not ended within 0\.1 s"):
        engine.release(slots[3])
    engine.close()


def test_part_of_the_device_stays_free_and_blocks_are_larger_for_few_slots() -> None:
    for slots, threads, blocks in ((64, 256, 64), (924, 256, 924), (1000, 128, 1000), (4096, 128, 1848)):
        driver = RecordingDriver()
        made: list[Any] = []
        driver.on_launch = made.append
        with pytest.raises(DeviceError):  # no host would end the launch
            opened(driver, slots, max_top_m=32, fault_poll_ns=1)
        (launch,) = [one for one in made if one.kernel == "extend_resident"]
        assert (launch.block.x, launch.grid.x) == (threads, blocks), slots


@pytest.mark.parametrize(("blocks", "places"), [(528, 8), (529, 4)])
def test_copy_buffers_use_only_memory_that_costs_no_block(blocks: int, places: int) -> None:
    driver = RecordingDriver()
    driver.resident_blocks = lambda kernel, threads, shared_bytes: 8 if shared_bytes < 40_000 else 4  # type: ignore[method-assign]
    driver.multiprocessors = 151  # an eighth of the memory stays free
    made: list[Any] = []
    driver.on_launch = made.append
    with pytest.raises(DeviceError):
        opened(driver, blocks, max_top_m=32, fault_poll_ns=1)
    (launch,) = [one for one in made if one.kernel == "extend_resident"]
    assert (launch.grid.x, launch.block.x, launch.arguments[3].value) == (blocks, 256, places)
    assert (launch.shared_bytes < 40_000) == (places == 4)


def test_launches_are_the_fallback_if_no_block_fits(new_driver: NewDriver) -> None:
    driver = new_driver()
    driver.resident_blocks = lambda kernel, threads, shared_bytes: 0  # type: ignore[method-assign]
    engine = opened(driver)
    assert not engine.resident
    assert "cannot run a block of extend_resident" in engine.fallback_reason
    assert run_all(engine, queries(5)) == [searched(query) for query in queries(5)]
    engine.close()


def test_the_host_writes_nothing_for_queries_that_merely_run(new_driver: NewDriver) -> None:
    """A pass over all running queries in every call would bound the rate when hundreds run."""
    while True:
        engine = opened(one_block(new_driver()), slots=12)
        engine.interrupt_when(lambda: True)
        slots = [engine.admit(query, LONG, "docs") for query in queries(12)]
        done = engine.extend().tolist()
        goals, unwritten = engine.batch_memory().goals.view(np.uint32), 0xFFFFFFF0  # no query reaches this goal either
        goals[slots] = unwritten
        while len(done) < 11:
            done += engine.extend().tolist()
        assert (goals[slots] == unwritten).all()
        if len(done) == 11:
            break
        engine.close()  # the last two finished between two looks
    (running,) = {*slots} - {*done}
    engine.pause(running)
    engine.resume(running)
    done += engine.extend().tolist()
    assert goals[running] != unwritten
    while running not in done:
        done += engine.extend().tolist()
    engine.close()


def test_queries_are_reported_in_the_order_in_which_they_finish(new_driver: NewDriver) -> None:
    engine = opened(one_block(new_driver()), slots=8)
    long = [engine.admit(query, LONG, "docs") for query in queries(2)]
    compiled = Compiled(engine, 8)
    short = compiled.ask(queries(3)[2], None, 0)
    compiled.prioritize(compiled.handle, short)
    order: list[int] = []
    while len(order) < 3:
        order += engine.extend().tolist()
    assert order[0] == first_recorded(engine) == short
    assert {*order} == {*long, short}
    engine.close()
