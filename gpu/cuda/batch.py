"""Memory of the running batch: arrays in device memory, and pinned host memory shared with the device."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gpu.cuda import layout
from gpu.cuda.batch_shape import BatchShape
from gpu.cuda.driver import Driver, PinnedMemory
from gpu.cuda.upload import DeviceArrays, check_fits, device_arrays, padded_bytes
from gpu.index.data import IndexData
from gpu.slots import MAX_COLLECTIONS


class BatchMemory:
    """Indexes by number, and slots, in a device's memory. `record` is the kernels' BATCH.

    Views of pinned memory: results: RESULT heads [slots], nodes: int32 [slots, max_k], raw: float32 [slots, max_k] (the
    host only reads these while a launch runs). progress, doorbell: words uint32. lines: uint8 [slots, line_bytes],
    staged queries written by the host; commands: COMMAND [slots]. rings, goals, records: uint8, see `gpu.cuda.layout`.
    *_address: device addresses.
    """

    def __init__(
        self,
        driver: Driver,
        stream: int,
        collections: Mapping[str, IndexData],
        shape: BatchShape,
    ) -> None:
        """Allocate and upload. Raises OutOfDeviceMemory before allocating anything if it does not fit."""
        self._driver = driver
        self._stream = stream
        self._uploaded: dict[int, DeviceArrays] = {}
        self._device: list[int] = []
        self._pinned: list[PinnedMemory] = []
        sizes = shape.array_bytes()
        state = {name: nbytes for name, nbytes in sizes.items() if name not in layout.IN_PINNED_MEMORY}
        self._records = records = np.zeros(MAX_COLLECTIONS, layout.COLLECTION)
        arrays = {name: device_arrays(data) for name, data in collections.items()}
        needed = {f"{name}.{part}": one.nbytes for name, parts in arrays.items() for part, one in parts.items()}
        check_fits(driver, {**needed, "slots": sum(state.values()) + records.nbytes})
        try:
            for number, (name, data) in enumerate(collections.items()):
                uploaded = DeviceArrays(driver, arrays[name])
                self._uploaded[number] = uploaded
                records[number] = layout.collection_record(data, uploaded.address)[0]
            addresses = {name: self._allocate(stream, nbytes) for name, nbytes in state.items()}
            addresses["collections"] = self._allocate(stream, records.nbytes)
            self._collections_address = addresses["collections"]
            driver.copy_to_device(stream, addresses["collections"], records.view(np.uint8))
            driver.synchronise(stream)
            shared = {name: self._allocate_pinned(sizes[name]) for name in layout.IN_PINNED_MEMORY}
            commands = self._allocate_pinned(shape.slots * layout.COMMAND.itemsize)
        except BaseException:
            self.close()
            raise
        self.record = shape.record({**addresses, **{name: memory.address for name, memory in shared.items()}})
        lines = shared["results"].view.reshape(shape.slots, shape.result_bytes)
        head, k = layout.RESULT.itemsize, shape.max_k
        self.results = lines[:, :head].view(layout.RESULT)[:, 0]
        self.nodes: npt.NDArray[np.int32] = lines[:, head : head + 4 * k].view(np.int32)
        self.raw: npt.NDArray[np.float32] = lines[:, head + 4 * k : head + 8 * k].view(np.float32)
        self.result_bytes = shape.result_bytes
        self.progress = shared["progress"].view.view(np.uint32)
        self.doorbell = shared["doorbell"].view.view(np.uint32)
        self.lines = shared["lines"].view.reshape(shape.slots, shape.line_bytes)
        self.lines_address = shared["lines"].address
        self.rings, self.goals, self.records = (shared[name].view for name in ("rings", "goals", "records"))
        self.commands = commands.view.view(layout.COMMAND)
        self.commands_address = commands.address

    def head(self, slot: int) -> np.void:
        """Return the SLOT of a staged line."""
        head: np.void = self.lines[slot, : layout.SLOT.itemsize].view(layout.SLOT)[0]
        return head

    def device_heads(self) -> npt.NDArray[np.void]:
        """Copy every SLOT from the device. Synchronises the stream."""
        lines = np.zeros(self.lines.shape, np.uint8)
        self._driver.copy_to_host(self._stream, lines, int(self.record["slots"][0]))
        self._driver.synchronise(self._stream)
        return lines[:, : layout.SLOT.itemsize].copy().view(layout.SLOT)[:, 0]

    def upload(self, name: str, data: IndexData) -> DeviceArrays:
        """Allocate memory for another index, to be copied in steps. Raises OutOfDeviceMemory without side effects."""
        arrays = device_arrays(data)
        check_fits(self._driver, {f"{name}.{part}": one.nbytes for part, one in arrays.items()})
        return DeviceArrays(self._driver, arrays, in_steps=True)

    def load(self, number: int, data: IndexData, uploaded: DeviceArrays) -> None:
        """Register a completely uploaded index under a free number. Precondition: no launch is running."""
        self._uploaded[number] = uploaded
        self._records[number] = layout.collection_record(data, uploaded.address)[0]
        self._driver.copy_to_device(self._stream, self._collections_address, self._records.view(np.uint8))
        self._driver.synchronise(self._stream)

    def unload(self, number: int) -> None:
        """Free an index's memory. Precondition: no launch is running and no slot searches it."""
        if number in self._uploaded:
            self._uploaded.pop(number).close()

    def _allocate(self, stream: int, nbytes: int) -> int:
        """Allocate zeroed device memory."""
        size = padded_bytes(nbytes)
        address = self._driver.allocate(size)
        self._device.append(address)
        self._driver.fill(stream, address, 0, size // 4)
        return address

    def _allocate_pinned(self, nbytes: int) -> PinnedMemory:
        memory = self._driver.allocate_pinned(padded_bytes(nbytes))
        self._pinned.append(memory)
        return PinnedMemory(memory.view[:nbytes], memory.address)

    def close(self) -> None:
        """Free all memory; the views become invalid. Precondition: no launch is running. Idempotent."""
        while self._pinned:
            self._driver.free_pinned(self._pinned.pop())
        while self._device:
            self._driver.free(self._device.pop())
        while self._uploaded:
            self._uploaded.popitem()[1].close()
