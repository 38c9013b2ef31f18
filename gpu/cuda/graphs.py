"""CUDA graphs of a launch: one per bucket of slots, captured once and replayed for every step.

A launch covers the slots 0 … bucket - 1; inactive slots among them do nothing. Launch forms:

    plain     one extend, by two kernels
    loop      up to `limit` extends: the two kernels in a conditional WHILE node
    resident  a persistent kernel for all slots, whose blocks take slots from rings (`gpu.cuda.resident`)

A loop ends early when a slot has finished or the doorbell rings. Where processes share a GPU, every launch waits for
its turn, so launches of many extends are needed. Plain launches are for tools that cannot follow a loop.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.cuda import layout
from gpu.cuda.batch_shape import BatchShape, distance_blocks, distance_shared_bytes
from gpu.cuda.driver import Argument, Dim, Driver
from gpu.errors import DeviceError, InvalidParams

LaunchForm = Literal["plain", "loop", "resident"]
BUCKETS = (1, 8, 32, 128, 512, 2048)
LIFETIME_US = 1_000_000
"""Duration of a resident launch; the next launch continues the remaining queries."""
_RESIDENT_THREADS = (layout.RESIDENT_THREADS, layout.RESIDENT_THREADS // 2)
_PARTS = 8  # resident blocks leave 1/8 of the device's capacity to other kernels


def buckets_of(slots: int) -> tuple[int, ...]:
    """Return the buckets of an engine: those of BUCKETS below `slots`, and `slots`."""
    return (*(bucket for bucket in BUCKETS if bucket < slots), slots)


class Stage(NamedTuple):
    """A kernel launch: function, blocks, threads per block, arguments, bytes of shared memory."""

    name: str
    kernel: int
    blocks: int
    threads: int
    arguments: tuple[Argument, ...]
    shared_bytes: int


class Kernels:
    """The kernels of a module and their launch parameters. `write_slots` is launched by compiled code."""

    def __init__(self, driver: Driver, image: bytes, shape: BatchShape, batch: Any) -> None:
        """Load the module. batch: the BATCH record as an argument. Raises DeviceError for an invalid image."""
        self._driver, self._shape, self._batch = driver, shape, batch
        module = driver.load_module(image)
        self.write_slots = driver.kernel(module, layout.WRITE_SLOTS.name)
        self._compute = driver.kernel(module, layout.COMPUTE_DISTANCES.name, distance_shared_bytes(shape.slots))
        self._merge = driver.kernel(module, layout.MERGE_AND_GATHER.name, shape.merge_shared_bytes)
        self._module = module

    def _load(self, kernel: layout.KernelSpec, shared_bytes: int) -> int:
        return self._driver.kernel(self._module, kernel.name, shared_bytes)

    def stages(self, bucket: int, limit: int = 1, condition: int = 0) -> tuple[Stage, ...]:
        """Return the two kernels of one extend of slots 0 … bucket - 1, in order."""
        shape, batch = self._shape, self._batch
        blocks = distance_blocks(shape, bucket, self._driver.multiprocessors)
        first, last = (batch, ctypes.c_uint32(bucket)), (batch, ctypes.c_uint32(limit), ctypes.c_uint64(condition))
        compute, merge = layout.COMPUTE_DISTANCES, layout.MERGE_AND_GATHER
        return (
            Stage(compute.name, self._compute, blocks, compute.threads, first, distance_shared_bytes(bucket)),
            Stage(merge.name, self._merge, bucket, merge.threads, last, shape.merge_shared_bytes),
        )

    def resident_stage(self, life_us: int) -> Stage:
        """Return the launch of the resident kernel: one block per slot, up to 7/8 of the device's capacity.

        Blocks get as many threads, then as many row places, as possible without reducing their number. Raises
        DeviceError if a block cannot have the required shared memory.
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
                f"the device cannot run a block of {kernel.name} with {shared_bytes} bytes of shared memory"
            )
        places = next(one for one in layout.RING_PLACES if room(threads, one) >= blocks)
        shared_bytes = shape.resident_shared_bytes(places, threads)
        numbers = kernel.argument_values(entries=shape.entries, life_us=life_us, places=places)
        function = self._load(kernel, shared_bytes)
        return Stage(kernel.name, function, blocks, threads, (self._batch, *numbers), shared_bytes)

    def launch(self, stream: int, *stages: Stage) -> None:
        """Launch kernels in order."""
        for stage in stages:
            self._driver.launch(
                stream, stage.kernel, Dim(stage.blocks), Dim(stage.threads), stage.arguments, stage.shared_bytes
            )


class LaunchGraphs:
    """CUDA graphs of all buckets, captured in the constructor. `forms`: the launch form of each bucket.

    form: of every bucket; None: `loop`, or `plain` if `limit` is 1. A bucket whose loop cannot be captured falls back
    to `plain`; `resident` has a single bucket, and falls back to None if the device cannot run it.
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
            raise InvalidParams(f"a plain launch makes 1 extend, not {limit}")
        self._driver, self._stream, self._kernels = driver, stream, kernels
        self.buckets = tuple(sorted(buckets))
        self.fallback_reason = ""  # why the requested form was not possible
        self.forms: dict[int, LaunchForm] = {}
        self._graphs: dict[int, int] = {}
        if form == "resident" and self._make_resident(life_us):
            self.limit = limit
            return
        if form is None or form == "resident":
            form = "plain" if limit == 1 else "loop"
        try:
            for bucket in self.buckets:
                self._make(bucket, form, limit)
        except DeviceError:
            self.close()
            raise
        self.limit = 1 if set(self.forms.values()) == {"plain"} else limit

    def _make_resident(self, life_us: int) -> bool:
        """Capture the resident launch. Returns whether the device can run it."""
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

    def _make(self, bucket: int, form: LaunchForm, limit: int) -> None:
        try:
            self._graphs[bucket] = self._capture(bucket, form, limit)
        except DeviceError as error:
            if form == "plain":
                raise
            self.fallback_reason, form = str(error), "plain"
            self._graphs[bucket] = self._capture(bucket, form, 1)
        self.forms[bucket] = form

    def table(self) -> npt.NDArray[np.int64]:
        """Return buckets and their graphs, int64 [buckets, 2], smallest first."""
        return np.array([(bucket, self._graphs[bucket]) for bucket in self.buckets], np.int64)

    def _capture(self, bucket: int, form: LaunchForm, limit: int) -> int:
        driver, stream = self._driver, self._stream

        def launches() -> None:
            if form == "plain":
                self._kernels.launch(stream, *self._kernels.stages(bucket))
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
        """Destroy the graphs. Idempotent."""
        while self._graphs:
            self._driver.destroy_graph(self._graphs.popitem()[1])
