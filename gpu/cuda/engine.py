"""The engine on a CUDA device: a running batch that captured graphs advance, and results that are read by looking."""

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from gpu.build.params import check_within
from gpu.cuda import backend, layout, resident
from gpu.cuda.batch import BatchMemory
from gpu.cuda.driver import Driver
from gpu.cuda.graphs import LIFETIME_US, Kernels, LaunchForm, LaunchGraphs, StageTimes, buckets_of, time_stages
from gpu.cuda.handle import Handle
from gpu.cuda.upload import DeviceArrays
from gpu.engine import Backend, Engine, c_callable
from gpu.errors import DeviceError, InvalidParams
from gpu.index.data import IndexData
from gpu.index.graph_index import GraphIndex
from gpu.slots import Limits

MAX_EXTENDS_PER_LAUNCH = 1024
_FAULT_POLL_NS = 10_000_000
_LAUNCH_TIMEOUT_NS = 30_000_000_000
_CALLS = {
    backend.LAUNCH_FAILED: "cuLaunchKernel",
    backend.REPLAY_FAILED: "cuGraphLaunch",
    backend.QUERY_FAILED: "cuStreamQuery",
}
_ARRIVED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


_launch, _stop = c_callable(backend.launch, 2), c_callable(resident.stop, 1)


class CudaEngine(Engine):
    """An engine over indexes in a device's memory; limits as in `CpuEngine`.

    What it does for each query and step is compiled: `gpu.cuda.backend`. Nothing is captured after the constructor, and
    no step synchronises.

    extends_per_launch: up to so many extends in one launch, which ends early when a slot is done, or when what was
    given to `interrupt_when` rings the doorbell. form: see `gpu.cuda.graphs`. Resident blocks go on by themselves where
    it is more than one; `extend` returns once a slot is done.
    """

    def __init__(
        self,
        driver: Driver,
        image: bytes,
        collections: Mapping[str, GraphIndex],
        *,
        slots: int = 32,
        max_top_m: int = 512,
        max_k: int | None = None,
        max_search_width: int = 8,
        extends_per_launch: int = 1,
        form: LaunchForm | None = None,
        fault_poll_ns: int = _FAULT_POLL_NS,
        launch_timeout_ns: int = _LAUNCH_TIMEOUT_NS,
        life_us: int = LIFETIME_US,
    ) -> None:
        """Open the engine on a driver, which the caller closes.

        image: the kernels, compiled for the device. fault_poll_ns: interval at which a wait for a launch polls the
        driver for errors. launch_timeout_ns: a launch that runs longer is an error. life_us: duration of a resident
        launch.

        Raises InvalidParams, OutOfDeviceMemory, DeviceError.
        """
        check_within("extends_per_launch", extends_per_launch, 1, MAX_EXTENDS_PER_LAUNCH)
        super().__init__(collections, Limits.of(slots, max_top_m, max_k, max_search_width))
        data = self._collections.loaded
        # Of a query that is restricted to some rows the device hands over its whole list: see `gpu.cuda.filtered`.
        self._shape = shape = layout.BatchShape.of(data, slots, max_top_m, max_top_m, max_search_width)
        self._driver = driver
        self._own_driver = False
        self.resident = False
        self._timed_out = False  # a launch has not ended in time, and never may
        self._stream = driver.create_stream()
        self._memory: BatchMemory | None = None
        self._uploads: dict[str, DeviceArrays] = {}  # that `load_part` has begun
        self._graphs: LaunchGraphs | None = None
        try:
            named = dict(zip(collections, data, strict=True))
            self._memory = memory = BatchMemory(driver, self._stream, named, shape)
            batch = layout.argument(memory.record)
            self._kernels = kernels = Kernels(driver, image, shape, layout.team_of(data), batch)
            buckets = buckets_of(slots)
            self._graphs = graphs = LaunchGraphs(
                driver, self._stream, kernels, buckets, form, extends_per_launch, life_us
            )
            self.handle = own = Handle(driver, self._stream, memory, kernels, graphs, batch)
            # How launches are made, by bucket, and why not as was wanted; whether blocks stay on the device; the most
            # extends of a launch: what was wanted, or 1 where the device cannot.
            self.forms, self.fallback_reason, self.resident = graphs.forms, graphs.fallback_reason, graphs.resident
            self.extends_per_launch = graphs.limit
            own.words[backend.POLL_NS], own.words[backend.TIMEOUT_NS] = fault_poll_ns, launch_timeout_ns
            self._start(self._functions(), own.table)
            for number, one in enumerate(data):
                own.load(number, one)
            memory.doorbell[0] = graphs.resident  # at which the launch ends
            for graph in own.graphs:  # with no slot active: what a first launch takes longer belongs to the start
                if _launch(own.address, graph) < 0:
                    self._check()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, device: str, collections: Mapping[str, GraphIndex], **options: Any) -> "CudaEngine":
        """An engine on "cuda:N" or on the GPU of a UUID, its kernels compiled (once a machine) for it; `options` are
        the constructor's.

        Raises DeviceUnavailable beside what the constructor raises.
        """
        from gpu.cuda.compiler import compile_kernels
        from gpu.cuda.cuda_driver import CudaDriver

        driver = CudaDriver(device)
        try:
            engine = cls(driver, compile_kernels(driver.arch), collections, **options)
        except BaseException:
            driver.close()
            raise
        engine._own_driver = True
        return engine

    @property
    def waited_ns(self) -> int:
        """Time that was spent waiting for launches, in all."""
        return int(self.handle.words[backend.WAITED_NS])

    def _functions(self) -> Backend:
        own, number = self.handle, self._collections.number
        if self.resident:
            return Backend(
                resident.admit, resident.extend, backend.read_result, resident.change_state, own.address, number,
                resident.set_filter, self._check, resident.prioritize,
            )  # fmt: skip
        return Backend(
            backend.admit, backend.extend, backend.read_result, backend.change_state, own.address, number,
            backend.set_filter, self._check,
        )  # fmt: skip

    def load(self, collection: str, index: GraphIndex) -> None:
        """See `Engine.load`. The loop stands still while it is copied to the device.

        Raises OutOfDeviceMemory, and InvalidParams for an index whose queries need more than those of the indexes that
        the engine was made with: sizes are captured in its graphs.
        """
        while not self.load_part(collection, index):
            pass

    def load_part(self, collection: str, index: GraphIndex) -> bool:
        """See `Engine.load_part`. Copies a megabyte, on streams of its own, and waits for no copy. Raises as `load`."""
        number, data = self._collections.next_number(collection), index.data
        if collection not in self._uploads:
            self._check_shape(collection, data)
        if data.graph.shape[1]:  # rows without a graph are compared by the host
            if collection not in self._uploads:
                self.stop()
                self._uploads[collection] = self.batch_memory().upload(collection, data)
            if not self._uploads[collection].step():
                return False
            self.stop()
            self.batch_memory().load(number, data, self._uploads.pop(collection))
        self.handle.load(number, data)
        self._collections.add(collection, index)
        return True

    def _check_shape(self, collection: str, data: IndexData) -> None:
        limits = self.limits
        wanted = layout.BatchShape.of([data], limits.slots, limits.max_top_m, limits.max_top_m, limits.max_search_width)
        if not self._shape.covers(wanted):
            raise InvalidParams(
                f"collection {collection!r} has longer vectors, a larger degree or more seeds than this engine has "
                f"room for: it can be loaded when the engine starts (needed {wanted}, there is {self._shape})"
            )

    def unload(self, collection: str) -> bool:
        """See `Engine.unload`."""
        if collection in self._uploads:
            self.stop()
            self._uploads.pop(collection).close()
            return True
        number = self._collections.number(collection)
        if self.handle.searches(number):
            return False
        self.stop()
        self.batch_memory().unload(number)
        self.handle.unload(number)
        self._collections.remove(collection)
        return True

    def interrupt_when(self, arrived: Callable[[], bool]) -> None:
        """See `Engine.interrupt_when`."""
        self._arrived = _ARRIVED(lambda _: arrived())
        self.handle.words[backend.INTERRUPT] = ctypes.cast(self._arrived, ctypes.c_void_p).value or 0

    def _requested_k(self, slot: int) -> int:
        return self.handle.wanted(slot)

    def _check_open(self) -> None:
        self.batch_memory()

    def extends(self, slot: int) -> int:
        """See `Engine.extends`. Waits for the device if the query still runs. Raises InvalidSlot for a free slot."""
        self._slots.expect_taken(slot)
        memory, compared = self.batch_memory(), self.handle.scan_extends(slot)
        if compared is not None:
            return compared
        if self.resident:
            self.stop()
            return int(self.handle.slot_states[slot, resident.REACHED])
        ticket = memory.head(slot)[layout.TICKET]
        if (head := memory.results[slot])["ticket"] != ticket:
            head = memory.device_heads()[slot]
        return int(head["extends"]) if head["ticket"] == ticket else 0

    def time_stages(self, fused: bool = False) -> StageTimes:
        """An extend of what is running, its kernels timed one by one; see `gpu.cuda.graphs`. It counts as one."""
        if self.resident:
            raise DeviceError("blocks that stay have no stages to be timed")
        if self.handle.words[backend.PENDING]:
            raise DeviceError("what was admitted, paused or released since the last extend is not on the device yet")
        times = time_stages(self._driver, self._stream, self._kernels, self.batch_memory(), fused)
        self.handle.words[backend.LAUNCHES] = int(self.batch_memory().progress[0])
        return times

    def close(self) -> None:
        """See `Engine.close`. A driver that `open` made is closed too."""
        if self._stream:
            stream, self._stream = self._stream, 0
            if self._timed_out:  # waiting for it, or freeing what it uses, would hang too: the process's end frees it
                return
            with contextlib.suppress(DeviceError):  # a launch that failed must not keep the memory
                if self._memory is not None and self._graphs is not None:
                    self.stop()
                self._driver.synchronise(stream)
            if self._graphs is not None:
                self._graphs.close()
            while self._uploads:
                self._uploads.popitem()[1].close()
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            self._driver.destroy_stream(stream)
            if self._own_driver:
                self._driver.close()

    def stop(self) -> None:
        """End the launch of resident blocks, if one is under way; running queries go on with the next `extend`.

        Device memory is allocated and freed while there is none. Raises DeviceError if one fails.
        """
        if self.resident and _stop(self.handle.address) < 0:
            self._check()

    def _check(self) -> None:
        """Raise the DeviceError of what failed, if anything did."""
        words = self.handle.words
        failure, code, wanted = (int(words[word]) for word in (backend.FAILURE, backend.CODE, backend.LAUNCHES))
        if failure in _CALLS:
            self._driver.raise_for(_CALLS[failure], code)
        if failure == backend.NOT_REPORTED:
            reported = self.batch_memory().progress[0]
            raise DeviceError(f"launch {wanted} ended, but only {reported} launches are reported")
        if failure == backend.RECORDS_MISSING:
            raise DeviceError(f"launch {wanted} ended without a record of {code} of the queries that it took")
        if failure == backend.TIMED_OUT:
            self._timed_out = True
            raise DeviceError(f"launch {wanted} has not ended within {words[backend.TIMEOUT_NS] / 1e9:g} s")

    def batch_memory(self) -> BatchMemory:
        """What the engine shares with its device. Raises `DeviceError` once it was closed."""
        if self._memory is None:
            raise DeviceError("the engine was closed")
        return self._memory
