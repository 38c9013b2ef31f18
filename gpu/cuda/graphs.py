"""The captured graphs of a launch: one for each bucket of slots, replayed for every step.

A bucket is a number of slots, 0 … bucket - 1, that a launch covers; slots among them that are not active do nothing. A
launch is one extend by two kernels (`plain`), or up to `limit` extends that end early when a slot is done or the
doorbell rings: the same two kernels in a conditional WHILE node (`loop`), or one kernel in which each block goes on
with its own slot (`fused`). Fused is for buckets whose blocks all run at once, one on each multiprocessor; of more, the
later ones would wait while the first go on. `resident` is one launch for all slots, whose blocks stay and take slots
from rings (`gpu.cuda.resident`).
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.cuda import layout
from gpu.cuda.batch import BatchMemory
from gpu.cuda.driver import Argument, Dim, Driver
from gpu.errors import DeviceError, InvalidParams

LaunchForm = Literal["plain", "loop", "fused", "resident"]
BUCKETS = (1, 8, 32, 128, 512, 2048)
LIFETIME_US = 1_000_000
"""A resident launch ends after this long, whoever is there, and the next one goes on where it was."""
_RESIDENT_THREADS = (layout.RESIDENT_THREADS, layout.RESIDENT_THREADS // 2)
_PARTS = 8  # of the device's room for blocks, of which resident ones leave one to others


def buckets_of(slots: int) -> tuple[int, ...]:
    """The buckets of an engine: the usual ones below its slots, and all of its slots."""
    return (*(bucket for bucket in BUCKETS if bucket < slots), slots)


class Stage(NamedTuple):
    """A kernel as it is launched: its function, blocks, threads a block, arguments, bytes of shared memory."""

    name: str
    kernel: int
    blocks: int
    threads: int
    arguments: tuple[Argument, ...]
    shared_bytes: int


class Kernels:
    """The kernels of one loaded module, with what they are launched with; compiled code launches `write_slots`."""

    def __init__(self, driver: Driver, image: bytes, shape: layout.BatchShape, team: int, batch: Any) -> None:
        """batch: the BATCH record as an argument. Raises DeviceError for an image that does not load."""
        self._driver, self._shape, self._team, self._batch = driver, shape, team, batch
        module = driver.load_module(image)
        self._distances = layout.COMPUTE_DISTANCES[team]
        self.write_slots = driver.kernel(module, layout.WRITE_SLOTS.name)
        self._compute = driver.kernel(module, self._distances.name, layout.distance_shared_bytes(shape.slots))
        self._merge = driver.kernel(module, layout.MERGE_AND_GATHER.name, shape.merge_shared_bytes)
        self._module = module
        self._fused: tuple[int, int, int] | None = None  # the kernel, its shared memory, places for rows

    def load_fused(self, limit: int) -> None:
        """The fused kernel for launches of so many extends: of several, with visited tables in shared memory.

        Where these do not fit, they stay in the batch's memory; rows have as many places as fit.

        Raises DeviceError where a block cannot have as much shared memory as the fused form needs. Idempotent.
        """
        if self._fused is not None:
            return
        shape = self._shape
        near, far = layout.EXTEND_FUSED_NEAR, layout.EXTEND_FUSED
        choices = [(near, shape.fused_near_shared_bytes(places), places) for places in layout.RING_PLACES if limit > 1]
        *choices, last = choices + [(far, shape.fused_shared_bytes(places), places) for places in layout.RING_PLACES]
        for kernel, shared_bytes, places in choices:
            with suppress(DeviceError):
                self._fused = (self._load(kernel, shared_bytes), shared_bytes, places)
                return
        kernel, shared_bytes, places = last
        self._fused = (self._load(kernel, shared_bytes), shared_bytes, places)

    def _load(self, kernel: layout.KernelSpec, shared_bytes: int) -> int:
        return self._driver.kernel(self._module, kernel.name, shared_bytes)

    def stages(self, bucket: int, limit: int = 1, condition: int = 0) -> tuple[Stage, ...]:
        """The two kernels of one extend of slots 0 … bucket - 1, in their order."""
        shape, batch = self._shape, self._batch
        blocks = layout.distance_blocks(shape, bucket, self._team, self._driver.multiprocessors)
        first, last = (batch, ctypes.c_uint32(bucket)), (batch, ctypes.c_uint32(limit), ctypes.c_uint64(condition))
        compute, merge, sums_bytes = self._distances, layout.MERGE_AND_GATHER, layout.distance_shared_bytes(bucket)
        return (
            Stage(compute.name, self._compute, blocks, compute.threads, first, sums_bytes),
            Stage(merge.name, self._merge, bucket, merge.threads, last, shape.merge_shared_bytes),
        )

    def fused_stage(self, bucket: int, limit: int = 1) -> Stage:
        """Up to `limit` extends in one kernel."""
        assert self._fused is not None, "load_fused comes first"
        kernel, shared_bytes, places = self._fused
        arguments = (self._batch, *layout.EXTEND_FUSED.argument_values(limit=limit, places=places))
        return Stage(layout.EXTEND_FUSED.name, kernel, bucket, layout.FUSED_THREADS, arguments, shared_bytes)

    def resident_stage(self, life_us: int) -> Stage:
        """Blocks that stay: one a slot, but for those for which a part of the device is to be left free.

        They have as many threads, and then as many places for rows, as they can without being fewer. Raises DeviceError
        where a block cannot have as much shared memory as it needs.
        """
        kernel, shape, driver = layout.EXTEND_RESIDENT, self._shape, self._driver

        def room(threads: int, places: int) -> int:
            shared_bytes = shape.resident_shared_bytes(places, threads)
            with suppress(DeviceError):
                blocks = driver.resident_blocks(self._load(kernel, shared_bytes), threads, shared_bytes)
                return blocks * driver.multiprocessors * (_PARTS - 1) // _PARTS
            return 0

        fewest = layout.RING_PLACES[-1]
        threads = next((one for one in _RESIDENT_THREADS if room(one, fewest) >= shape.slots), _RESIDENT_THREADS[-1])
        blocks = min(shape.slots, room(threads, fewest))
        if blocks == 0:
            shared_bytes = shape.resident_shared_bytes(fewest, threads)
            raise DeviceError(
                f"there is no room for a block of {kernel.name} with {shared_bytes} bytes of shared memory"
            )
        places = next(one for one in layout.RING_PLACES if room(threads, one) >= blocks)
        shared_bytes = shape.resident_shared_bytes(places, threads)
        numbers = kernel.argument_values(entries=shape.entries, life_us=life_us, places=places)
        function = self._load(kernel, shared_bytes)
        return Stage(kernel.name, function, blocks, threads, (self._batch, *numbers), shared_bytes)

    def launch(self, stream: int, *stages: Stage) -> None:
        """One after the other."""
        for stage in stages:
            self._driver.launch(
                stream, stage.kernel, Dim(stage.blocks), Dim(stage.threads), stage.arguments, stage.shared_bytes
            )


class LaunchGraphs:
    """Captured launches for every bucket, made here and never again. `forms` has each bucket's form.

    form: every bucket's; None: `fused` up to as many slots as there are multiprocessors, for more `loop`, or `plain`
    where `limit` is 1. Where a driver cannot capture it, the bucket gets plain replay. Resident blocks are all buckets'
    own; where the device has no room for one, it is as for None.
    """

    def __init__(
        self,
        driver: Driver,
        stream: int,
        kernels: Kernels,
        buckets: Sequence[int],
        form: LaunchForm | None,
        limit: int,
        life_us: int = LIFETIME_US,
    ) -> None:
        if form == "plain" and limit != 1:
            raise InvalidParams(f"a plain launch is one extend, not {limit}")
        self._driver, self._stream, self._kernels = driver, stream, kernels
        self.buckets = tuple(sorted(buckets))
        self.fallback_reason = ""  # why a form that was wanted could not be had
        self.forms: dict[int, LaunchForm] = {}
        self._graphs: dict[int, int] = {}
        if form == "resident" and self._make_resident(life_us):
            self.limit = limit
            return
        form = None if form == "resident" else form
        try:
            for bucket in self.buckets:
                self._make(bucket, form or self._best(bucket, limit), limit)
        except DeviceError:
            self.close()
            raise
        self.limit = 1 if set(self.forms.values()) == {"plain"} else limit

    def _make_resident(self, life_us: int) -> bool:
        """Whether the device can."""
        try:
            stage = self._kernels.resident_stage(life_us)
        except DeviceError as error:
            self.fallback_reason = str(error)
            return False
        self.buckets = self.buckets[-1:]
        self._graphs[self.buckets[0]] = self._captured(lambda: self._kernels.launch(self._stream, stage))
        self.forms[self.buckets[0]] = "resident"
        return True

    @property
    def resident(self) -> bool:
        return set(self.forms.values()) == {"resident"}

    def _best(self, bucket: int, limit: int) -> LaunchForm:
        if bucket <= self._driver.multiprocessors:
            return "fused"
        return "plain" if limit == 1 else "loop"

    def _make(self, bucket: int, form: LaunchForm, limit: int) -> None:
        try:
            if form == "fused":
                self._kernels.load_fused(limit)
            self._graphs[bucket] = self._capture(bucket, form, limit)
        except DeviceError as error:
            if form == "plain":
                raise
            self.fallback_reason, form = str(error), "plain"
            self._graphs[bucket] = self._capture(bucket, form, 1)
        self.forms[bucket] = form

    def table(self) -> npt.NDArray[np.int64]:
        """Buckets and their graphs, int64 [buckets, 2], smallest first."""
        return np.array([(bucket, self._graphs[bucket]) for bucket in self.buckets], np.int64)

    def _capture(self, bucket: int, form: LaunchForm, limit: int) -> int:
        driver, stream = self._driver, self._stream

        def launches() -> None:
            if form == "plain":
                self._kernels.launch(stream, *self._kernels.stages(bucket))
            elif form == "fused":
                self._kernels.launch(stream, self._kernels.fused_stage(bucket, limit))
            else:
                loop = driver.begin_while(stream)
                self._kernels.launch(loop.stream, *self._kernels.stages(bucket, limit, loop.handle))
                driver.end_while(loop)

        return self._captured(launches)

    def _captured(self, launches: Callable[[], None]) -> int:
        driver, stream = self._driver, self._stream
        driver.begin_capture(stream)
        try:
            launches()
        except DeviceError:
            driver.abandon_capture(stream)
            raise
        return driver.end_capture(stream)

    def close(self) -> None:
        """Idempotent."""
        while self._graphs:
            self._driver.destroy_graph(self._graphs.popitem()[1])


# ---- What each kernel of an extend takes on the device, by events around it: for measuring, not for serving. They are
# launched one by one, not replayed, so what lies between two of them is no part of their times.


@dataclass(frozen=True)
class StageTimes:
    """One extend: seconds by kernel, the slots that it advanced, and the rows that these were compared with."""

    seconds: dict[str, float]
    slots: int
    rows: int


def time_stages(driver: Driver, stream: int, kernels: Kernels, memory: BatchMemory, fused: bool) -> StageTimes:
    """Make one extend of all slots that are active on the device, in two kernels or, `fused`, in one. Synchronises.

    Raises DeviceError.
    """
    before = memory.device_heads()
    bucket = len(before)
    if fused:
        kernels.load_fused(1)
    stages = (kernels.fused_stage(bucket),) if fused else kernels.stages(bucket)
    events = [driver.create_event() for _ in range(len(stages) + 1)]
    try:
        driver.record(stream, events[0])
        for stage, event in zip(stages, events[1:], strict=True):
            kernels.launch(stream, stage)
            driver.record(stream, event)
        driver.synchronise(stream)
        took = [driver.elapsed_ms(begin, end) / 1e3 for begin, end in pairwise(events)]
    finally:
        for event in events:
            driver.destroy_event(event)
    after = memory.device_heads()
    advanced = (after["ticket"] == before["ticket"]) & (after["extends"] != before["extends"])
    rows = int(before["task_count"][advanced].sum())
    names = [stage.name for stage in stages]
    return StageTimes(dict(zip(names, took, strict=True)), int(advanced.sum()), rows)
