"""The running batch's memory: on the device what kernels work with, in pinned host memory what both sides see."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gpu.cuda import layout
from gpu.cuda.driver import Driver, PinnedMemory
from gpu.cuda.upload import DeviceArrays, check_fits, device_arrays
from gpu.index.data import IndexData
from gpu.slots import MAX_COLLECTIONS

_ALIGNMENT = 256


class BatchMemory:
    """Indexes, by their number, and slots on a device. `record` is the kernels' BATCH; the views are of pinned memory.

    results: RESULT heads [slots], nodes: int32 [slots, max_k], raw: float32 [slots, max_k] (read-only to the host while
    a launch runs). progress, doorbell: words uint32. lines: uint8 [slots, line_bytes], where the host writes a query
    for its slot; commands: COMMAND [slots]. rings, goals, records: uint8, as the layout has them. *_address: where the
    device sees them.
    """

    def __init__(
        self,
        driver: Driver,
        stream: int,
        collections: Mapping[str, IndexData],
        shape: layout.BatchShape,
    ) -> None:
        """Raises OutOfDeviceMemory before anything is allocated if it does not all fit."""
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

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the indexes take."""
        return sum(uploaded.nbytes for uploaded in self._uploaded.values())

    def head(self, slot: int) -> npt.NDArray[np.uint32]:
        """The SLOT of a staged line."""
        return self.lines[slot, : layout.SLOT.itemsize].view(np.uint32)

    def device_heads(self) -> npt.NDArray[np.void]:
        """Every SLOT as the device has it. Waits for what is queued."""
        lines = np.zeros(self.lines.shape, np.uint8)
        self._driver.copy_to_host(self._stream, lines, int(self.record["slots"][0]))
        self._driver.synchronise(self._stream)
        return lines[:, : layout.SLOT.itemsize].copy().view(layout.SLOT)[:, 0]

    def upload(self, name: str, data: IndexData) -> DeviceArrays:
        """Begin to copy one more index, by steps. Raises OutOfDeviceMemory; nothing is done then."""
        arrays = device_arrays(data)
        check_fits(self._driver, {f"{name}.{part}": one.nbytes for part, one in arrays.items()})
        return DeviceArrays(self._driver, arrays, in_steps=True)

    def load(self, number: int, data: IndexData, uploaded: DeviceArrays) -> None:
        """One more index, which is there as a whole, under a free number, while no launch runs."""
        self._uploaded[number] = uploaded
        self._records[number] = layout.collection_record(data, uploaded.address)[0]
        self._driver.copy_to_device(self._stream, self._collections_address, self._records.view(np.uint8))
        self._driver.synchronise(self._stream)

    def unload(self, number: int) -> None:
        """Give an index's memory back, while no launch runs. No slot may search it."""
        if number in self._uploaded:
            self._uploaded.pop(number).close()

    def _allocate(self, stream: int, nbytes: int) -> int:
        """Zeroed device memory."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        address = self._driver.allocate(size)
        self._device.append(address)
        self._driver.fill(stream, address, 0, size // 4)
        return address

    def _allocate_pinned(self, nbytes: int) -> PinnedMemory:
        memory = self._driver.allocate_pinned(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        self._pinned.append(memory)
        return PinnedMemory(memory.view[:nbytes], memory.address)

    def close(self) -> None:
        """Give everything back; no launch may run any more, and the views are of nothing. Idempotent."""
        while self._pinned:
            self._driver.free_pinned(self._pinned.pop())
        while self._device:
            self._driver.free(self._device.pop())
        while self._uploaded:
            self._uploaded.popitem()[1].close()
