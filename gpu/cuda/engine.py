"""The CUDA engine: a running batch advanced by captured CUDA graphs, with results polled from pinned memory."""

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from gpu.build.params import check_within
from gpu.cuda import backend, layout, resident
from gpu.cuda.batch import BatchMemory
from gpu.cuda.batch_shape import BatchShape
from gpu.cuda.driver import Driver
from gpu.cuda.graphs import LIFETIME_US, Kernels, LaunchForm, LaunchGraphs, buckets_of
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


_launch, _stop = c_callable(backend.launch.address, 2), c_callable(resident.stop.address, 1)


class CudaEngine(Engine):
    """An engine over indexes in device memory; limits as in `CpuEngine`.

    Work per query and per step is compiled (`gpu.cuda.backend`). All graphs are captured in the constructor, and no
    step synchronises.

    extends_per_launch: maximum of extends in one launch, which ends early when a slot has finished or the callback of
    `interrupt_when` rings the doorbell. form: of a launch, see `gpu.cuda.graphs`. With the resident form and a value
    above 1, slots advance on their own, and `extend` returns once a slot has finished.
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
        # max_k is max_top_m here: filtered queries return their whole top_m (see `gpu.cuda.filtered`).
        self._shape = shape = BatchShape.of(data, slots, max_top_m, max_top_m, max_search_width)
        self._driver = driver
        self._own_driver = False
        self.resident = False
        self._timed_out = False  # a launch has exceeded its timeout and may never end
        self._stream = driver.create_stream()
        self._memory: BatchMemory | None = None
        self._uploads: dict[str, DeviceArrays] = {}  # uploads in progress (`load_part`)
        self._graphs: LaunchGraphs | None = None
        try:
            named = dict(zip(collections, data, strict=True))
            self._memory = memory = BatchMemory(driver, self._stream, named, shape)
            batch = layout.argument(memory.record)
            self._kernels = kernels = Kernels(driver, image, shape, batch)
            buckets = buckets_of(slots)
            self._graphs = graphs = LaunchGraphs(
                driver, self._stream, kernels, buckets, form, extends_per_launch, life_us
            )
            self.handle = handle = Handle(driver, self._stream, memory, kernels, graphs, batch)
            # Launch forms by bucket; the reason for a fallback; whether a resident kernel is used;
            # extends per launch, as requested or 1 if the device cannot do more.
            self.forms, self.fallback_reason, self.resident = graphs.forms, graphs.fallback_reason, graphs.resident
            self.extends_per_launch = graphs.limit
            handle.host.poll_ns, handle.host.timeout_ns = fault_poll_ns, launch_timeout_ns
            self._start(self._functions(), handle.table)
            for number, index_data in enumerate(data):
                handle.load(number, index_data)
            for graph in handle.graphs:  # warm up with no active slot: first launches are slower
                memory.doorbell[0] = 1  # ends a launch of many extends, or a resident one, at once
                if _launch(handle.address, graph) < 0:
                    self._check()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, device: str, collections: Mapping[str, GraphIndex], **options: Any) -> "CudaEngine":
        """Open an engine on "cuda:N" or a GPU's UUID. Kernels are compiled for it once and cached on disk.

        options: of the constructor. Raises DeviceUnavailable, and the constructor's errors.
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
        """Total time spent waiting for launches."""
        return self.handle.host.waited_ns

    def _functions(self) -> Backend:
        handle, number = self.handle, self._collections.number
        if self.resident:
            return Backend(
                resident.admit.address, resident.extend.address, backend.read_result.address,
                resident.change_state.address, handle.address, number, resident.set_filter.address, self._check,
                resident.prioritize.address, resident.admit_in_place.address,
            )  # fmt: skip
        return Backend(
            backend.admit.address, backend.extend.address, backend.read_result.address, backend.change_state.address,
            handle.address, number, backend.set_filter.address, self._check,
            admit_in_place=backend.admit_in_place.address,
        )  # fmt: skip

    def load(self, collection: str, index: GraphIndex) -> None:
        """See `Engine.load`. Blocks while the index is copied to the device.

        Raises OutOfDeviceMemory, and InvalidParams for an index whose queries need larger arrays than those of the
        indexes that the engine was opened with: sizes are fixed in the captured graphs.
        """
        while not self.load_part(collection, index):
            pass

    def load_part(self, collection: str, index: GraphIndex) -> bool:
        """See `Engine.load_part`. Copies a megabyte per call on separate streams without waiting. Raises as `load`."""
        number, data = self._collections.next_number(collection), index.data
        if collection not in self._uploads:
            self._check_shape(collection, data)
        if data.graph.shape[1]:  # rows without a graph are scanned by the host
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
        required = BatchShape.of([data], limits.slots, limits.max_top_m, limits.max_top_m, limits.max_search_width)
        if not self._shape.covers(required):
            raise InvalidParams(
                f"collection {collection!r} has longer vectors, a larger degree or more seeds than this engine was "
                f"opened for: restart the engine with it (it needs {required}, the engine has {self._shape})"
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
        self.handle.host.interrupt = ctypes.cast(self._arrived, ctypes.c_void_p).value or 0

    def _requested_k(self, slot: int) -> int:
        return self.handle.requested_k(slot)

    def _check_open(self) -> None:
        self.batch_memory()

    def extends(self, slot: int) -> int:
        """See `Engine.extends`. Synchronises with the device if the query runs. Raises InvalidSlot for a free slot."""
        self._slots.expect_taken(slot)
        memory, scanned = self.batch_memory(), self.handle.scan_extends(slot)
        if scanned is not None:
            return scanned
        if self.resident:
            self.stop()
            return self.handle.host.slot_states[slot].reached
        ticket = memory.head(slot)["ticket"]
        if (head := memory.results[slot])["ticket"] != ticket:
            head = memory.device_heads()[slot]
        return int(head["extends"]) if head["ticket"] == ticket else 0

    def close(self) -> None:
        """See `Engine.close`. Also closes a driver created by `open`."""
        if self._stream:
            stream, self._stream = self._stream, 0
            if self._timed_out:  # waiting for it, or freeing its memory, would hang as well; process exit frees it
                return
            with contextlib.suppress(DeviceError):  # free the memory even if a launch failed
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
        """End a running resident launch; its queries continue with the next `extend`.

        Needed before device memory is allocated or freed. Raises DeviceError if the launch fails.
        """
        if self.resident and _stop(self.handle.address) < 0:
            self._check()

    def _check(self) -> None:
        """Raise DeviceError for a recorded failure."""
        host = self.handle.host
        failure, code, expected = host.failure, host.code, host.launches
        if failure in _CALLS:
            self._driver.raise_for(_CALLS[failure], code)
        if failure == backend.NOT_REPORTED:
            reported = self.batch_memory().progress[0]
            raise DeviceError(f"launch {expected} ended, but the device has reported only {reported} launches")
        if failure == backend.RECORDS_MISSING:
            raise DeviceError(f"launch {expected} ended without records of {code} of its queries")
        if failure == backend.TIMED_OUT:
            self._timed_out = True
            raise DeviceError(f"launch {expected} has not ended within {host.timeout_ns / 1e9:g} s")

    def batch_memory(self) -> BatchMemory:
        """Return the batch's memory. Raises DeviceError if the engine is closed."""
        if self._memory is None:
            raise DeviceError("the engine is closed")
        return self._memory
