"""Tests of the engine's step: driver calls per extend, calls it must not make, and how it reads results."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu import DeviceError, GraphIndex, NoFreeSlot, SearchParams
from gpu.cuda.engine import CudaEngine
from tests.cuda.recorder import RecordingDriver
from tests.cuda.scripted_device import ScriptedDevice
from tests.gpu.datasets import clustered

DIM = 24
INDEX = GraphIndex.build(clustered(np.random.default_rng(1), 300, DIM), metric="l2", degree=8, neighbor_codes=False)


class Setup:
    """An engine on a scripted device, without the recorded calls of its construction."""

    def __init__(self, slots: int = 40, length: int = 3, **options: Any) -> None:
        self.driver = RecordingDriver()
        self.device = ScriptedDevice(self.driver, length)
        self.engine = CudaEngine(self.driver, b"image", {"docs": INDEX}, slots=slots, max_top_m=64, **options)
        self.driver.calls.clear()
        self.device.covered.clear()

    def admit(self, count: int = 1, k: int = 5) -> list[int]:
        params = SearchParams(k, 32, 2)
        return [self.engine.admit(np.full(DIM, 1.0, np.float32), params, "docs") for _ in range(count)]


def test_a_step_with_new_queries_is_one_launch_and_one_replay() -> None:
    setup = Setup()
    setup.admit(3)
    setup.engine.extend()
    assert setup.driver.names() == ["launch", "replay"]
    assert setup.driver.calls[0] == ("launch", "write_slots", 3)


def test_commands_wait_for_a_replay_which_alone_confirms_that_they_were_read() -> None:
    setup, bits = Setup(), np.array([1, 0, 0, 0, 0], np.uint64)
    made = setup.engine.backend()
    set_filter = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(made.set_filter)
    (slot,) = setup.admit()
    set_filter(made.handle, slot, bits.ctypes.data, 1)  # few enough for the host to compare each
    setup.engine.extend()
    assert setup.driver.names() == []
    setup.admit(2)
    setup.engine.extend()
    assert setup.driver.names() == ["launch", "replay"]
    assert setup.driver.calls[0] == ("launch", "write_slots", 3)


def test_nothing_is_captured_allocated_or_synchronised_after_startup() -> None:
    setup = Setup(slots=9, length=4)
    engine, held = setup.engine, []
    for step in range(60):
        held += setup.admit(min(engine.free_slots, step % 4))
        if step % 3 == 0 and held:
            engine.pause(held[0])
            engine.resume(held[0])
        for slot in engine.extend().tolist():
            engine.result(slot)
            engine.release(slot)
            held.remove(slot)
    assert set(setup.driver.names()) == {"launch", "replay"}
    assert setup.driver.names().count("replay") <= 60
    assert setup.driver.names().count("launch") <= setup.driver.names().count("replay")


def test_a_launch_covers_the_highest_active_slot_with_the_smallest_bucket() -> None:
    setup = Setup(slots=40, length=100)
    slots: list[int] = []
    padded = []
    for arrivals in (1, 7, 1, 31):
        slots += setup.admit(arrivals)
        setup.engine.extend()
        padded.append(setup.engine.padded_slots)
    for slot in slots[8:]:
        setup.engine.release(slot)
    setup.engine.extend()
    assert setup.device.covered == [1, 8, 32, 40, 8]
    assert padded == [0, 0, 23, 0]


def test_a_result_is_read_only_with_its_own_ticket() -> None:
    setup = Setup(slots=1, length=2)
    for _ in range(3):
        (slot,) = setup.admit(k=3)
        assert setup.engine.extends(slot) == 0
        assert setup.engine.extend().tolist() == []
        assert setup.engine.extend().tolist() == [slot]
        ids, distances = setup.engine.result(slot)
        assert (ids.tolist(), ids.dtype.name, distances.dtype.name) == ([0, 0, 0], "int64", "float32")
        setup.engine.release(slot)


def test_tickets_wrap_around_without_becoming_zero() -> None:
    setup = Setup(slots=1, length=1)
    setup.engine.handle.host.next_ticket = int(np.iinfo(np.uint32).max)
    for _ in range(3):
        (slot,) = setup.admit()
        assert setup.engine.extend().tolist() == [slot]
        setup.engine.release(slot)
    assert setup.engine.handle.host.next_ticket == 3


def test_a_launch_of_several_extends_ends_at_its_limit_or_when_a_slot_is_done() -> None:
    setup = Setup(length=10, extends_per_launch=4)
    (slot,) = setup.admit()
    finished, counts = [], []
    for _ in range(3):
        finished.append(setup.engine.extend().tolist())
        counts.append(setup.engine.extends(slot))
    assert finished == [[], [], [slot]]
    assert counts == [4, 8, 10]
    looks = ("copy_to_host", "synchronise")  # the test's own poll of a running query
    assert [name for name in setup.driver.names() if name not in looks] == ["launch", "replay", "replay", "replay"]


def test_an_arrival_rings_a_running_launchs_doorbell_once_and_the_next_launch_clears_it() -> None:
    setup = Setup(length=100, extends_per_launch=50)
    setup.admit()
    memory = setup.engine.batch_memory()
    doorbells = []

    def arrived() -> bool:  # polled while the launch runs; here it has ended and is not reported yet
        doorbells.append(int(memory.doorbell[0]))
        memory.progress[0] += 1
        return True

    setup.device.silent = True
    setup.engine.interrupt_when(arrived)
    setup.engine.extend()
    assert doorbells == [0]
    assert memory.doorbell[0] == 0
    setup.device.silent = False
    setup.engine.interrupt_when(lambda: False)
    setup.engine.extend()
    assert setup.engine.extends(0) == 100


def faulty(make: Callable[[Setup], None], hangs: bool = False) -> str:
    setup = Setup(fault_poll_ns=0, launch_timeout_ns=1)
    setup.admit()
    make(setup)
    with pytest.raises(DeviceError) as caught:
        setup.engine.extend()
    assert setup.driver.names()[:2] == ["launch", "replay"]
    assert set(setup.driver.names()[2:]) == {"idle"}
    before = len(setup.driver.names())
    setup.engine.close()
    if hangs:  # waiting for the device, or freeing memory it uses, would hang too
        assert setup.driver.names()[before:] == []
    else:
        assert setup.driver.memory_of == {}
    return str(caught.value)


def test_a_failed_launch_raises_instead_of_hanging() -> None:
    def fault(setup: Setup) -> None:
        setup.device.silent = True
        setup.driver.fault = "CUDA_ERROR_ILLEGAL_ADDRESS"

    assert faulty(fault) == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_a_launch_that_ends_without_a_report_is_an_error() -> None:
    def silence(setup: Setup) -> None:
        setup.device.silent = True

    assert "launch 5 ended, but the device has reported only 4 launches" in faulty(silence)


def test_a_launch_that_never_ends_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingDriver, "idle", lambda self, stream: self.calls.append(("idle", stream)))

    def silence(setup: Setup) -> None:
        setup.device.silent = True

    assert "has not ended within 1e-09 s" in faulty(silence, hangs=True)


def test_a_failed_construction_frees_everything() -> None:
    driver = RecordingDriver(fault="no module")

    def refuse(image: bytes) -> int:
        raise DeviceError("no module")

    driver.load_module = refuse  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="no module"):
        CudaEngine(driver, b"image", {"docs": INDEX}, slots=4)
    assert driver.memory_of == {}
    assert driver.streams == set()


def test_a_closed_engine_has_freed_everything_and_rejects_calls() -> None:
    setup = Setup()
    setup.admit()
    setup.engine.close()
    setup.engine.close()
    assert (setup.driver.memory_of, setup.driver.streams, setup.driver.graphs) == ({}, set(), {})
    with pytest.raises(DeviceError, match="is closed"):
        setup.admit()


class Slots(RuleBasedStateMachine):
    """State machine: device and engine agree on slots after any sequence of admissions, pauses and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.setup = Setup(slots=9, length=4)
        self.states: dict[int, str] = {}

    def of(self, state: str) -> list[int]:
        return sorted(slot for slot, found in self.states.items() if found == state)

    @rule()
    def admit(self) -> None:
        if len(self.states) == 9:
            with pytest.raises(NoFreeSlot):
                self.setup.admit()
            return
        (slot,) = self.setup.admit()
        assert slot not in self.states
        self.states[slot] = "active"

    @precondition(lambda self: self.of("active"))
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.of("active")))
        self.setup.engine.pause(slot)
        self.states[slot] = "paused"

    @precondition(lambda self: self.of("paused"))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.of("paused")))
        self.setup.engine.resume(slot)
        self.states[slot] = "active"

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.states)))
        self.setup.engine.release(slot)
        del self.states[slot]

    @precondition(lambda self: self.of("active"))
    @rule()
    def extend(self) -> None:
        before = {slot: self.setup.engine.extends(slot) for slot in self.states}
        active = self.of("active")
        finished = self.setup.engine.extend().tolist()
        for slot in self.states:
            assert self.setup.engine.extends(slot) == before[slot] + (slot in active)
        for slot in finished:
            assert self.setup.engine.extends(slot) == 4
            self.states[slot] = "finished"

    @invariant()
    def counts_agree(self) -> None:
        assert self.setup.engine.free_slots == 9 - len(self.states)
        assert self.setup.engine.active_slots == len(self.of("active"))

    def teardown(self) -> None:
        self.setup.engine.close()


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40)
