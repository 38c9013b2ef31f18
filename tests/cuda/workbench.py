"""Test bench of the kernels: the arrays of a running batch over any driver, and individual launches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.cpu.queries import QUERY_ROW, prepare, prepared_bytes, query_encoding
from gpu.cuda import layout
from gpu.cuda.batch_shape import BatchShape, distance_shared_bytes
from gpu.cuda.driver import Argument, Dim, Driver, PinnedMemory
from gpu.cuda.layout import KernelSpec
from gpu.cuda.upload import device_arrays
from gpu.index.data import IndexData
from gpu.index.rows import aligned_empty, padded
from gpu.params import SearchParams
from tests.gpu.reference import true_distances

IN_BLOCKS = KernelSpec("extend_in_blocks", layout.RESIDENT_THREADS, (("limit", np.uint32), ("places", np.uint32)))
"""A kernel of the emulated device only (blocks.cu)."""


@dataclass(frozen=True)
class Limits:
    slots: int = 4
    max_top_m: int = 64
    max_k: int = 16
    max_search_width: int = 8


class Workbench:
    """Slots over some indexes on a device; every launch is synchronous."""

    def __init__(
        self, driver: Driver, indexes: Sequence[IndexData], limits: Limits = Limits(), image: bytes = b""
    ) -> None:
        self.driver, self.indexes = driver, indexes
        self.shape = BatchShape.of(indexes, limits.slots, limits.max_top_m, limits.max_k, limits.max_search_width)
        self.stream = driver.create_stream()
        self._module = driver.load_module(image)
        self._tickets = 0
        self._owners: dict[int, int] = {}
        addresses = {}
        for name, nbytes in self.shape.array_bytes().items():
            if name in layout.IN_PINNED_MEMORY:
                self.__dict__[name] = memory = driver.allocate_pinned(nbytes)
                addresses[name] = memory.address
            else:
                addresses[name] = driver.allocate(nbytes)
        for name in ("slots", "due", "counters", "queue"):
            driver.fill(self.stream, addresses[name], 0, self.shape.array_bytes()[name] // 4)
        addresses["collections"] = self._upload(np.concatenate([self._collection(one) for one in self.indexes]))
        self.addresses = addresses
        self.batch = layout.argument(self.shape.record(addresses))

    results: PinnedMemory
    progress: PinnedMemory
    doorbell: PinnedMemory

    def _collection(self, index: IndexData) -> npt.NDArray[Any]:
        return layout.collection_record(
            index, {name: self._upload(array) for name, array in device_arrays(index).items()}
        )

    def _upload(self, array: npt.NDArray[Any]) -> int:
        address = self.driver.allocate(array.nbytes)
        self.driver.copy_to_device(self.stream, address, np.ascontiguousarray(array))
        return address

    def launch(self, spec: KernelSpec, blocks: int, shared_bytes: int = 0, *arguments: Argument) -> None:
        kernel = self.driver.kernel(self._module, spec.name, shared_bytes)
        self.driver.launch(self.stream, kernel, Dim(blocks), Dim(spec.threads), [self.batch, *arguments], shared_bytes)

    def command(self, slot: int, status: int, line: npt.NDArray[Any] | None = None, flag: int = 0) -> None:
        staged = 0 if line is None else self._upload(line) | flag
        command = np.array([(slot, status, staged)], layout.COMMAND)
        self.launch(
            layout.WRITE_SLOTS,
            1,
            layout.PREPARE_BYTES,
            *layout.WRITE_SLOTS.argument_values(commands=self._upload(command)),
        )

    def admit(self, slot: int, query: npt.NDArray[Any], params: SearchParams, collection: int = 0, **head: int) -> None:
        """Admit a query. `head` overrides fields of the slot's head."""
        self.command(slot, layout.ACTIVE, self.line(slot, query, params, collection, **head))

    def admit_in_place(self, slot: int, query: npt.NDArray[Any], params: SearchParams) -> None:
        """Admit a query of the first collection whose vector is in device memory."""
        line = self.line(slot, query, params, vector=self._upload(query))
        line[layout.SLOT.itemsize :] = 0xFF  # not to be read
        self.command(slot, layout.ACTIVE, line, layout.LINE_IN_PLACE)

    def query(self, slot: int, index: IndexData) -> npt.NDArray[np.float32]:
        """Return what rows of this index are compared with, of a slot's prepared query in device memory."""
        line = np.zeros(self.shape.line_bytes, np.uint8)
        self.driver.copy_to_host(self.stream, line, self.addresses["slots"] + slot * self.shape.line_bytes)
        begin = layout.SLOT.itemsize + QUERY_ROW
        return line[begin : begin + 4 * padded(index.rows.dim)].view(np.float32)

    def line(
        self, slot: int, query: npt.NDArray[Any], params: SearchParams, collection: int = 0, **head: int
    ) -> npt.NDArray[np.uint8]:
        """Return a slot's line for a query, as the host stages it."""
        index = self.indexes[collection]
        self._tickets += 1
        self._owners[slot] = self._tickets
        line = np.zeros(self.shape.line_bytes, np.uint8)
        made: Any = layout.SlotHead
        fields = made.from_buffer(line)
        head_params = (params.k, params.top_m, params.search_width, params.patience or 0)
        layout.write_head.py_func(fields, self._tickets, collection, index.graph.shape[1], *head_params)
        for name, value in head.items():
            setattr(fields, name, value)
        record = aligned_empty((1, prepared_bytes(index.rows)), np.uint8)
        prepare(query[None], query_encoding(index.rows), record)
        line[layout.SLOT.itemsize : layout.SLOT.itemsize + record.nbytes] = record[0]
        return line

    def extend(self, blocks: int = 3, bucket: int = 0) -> None:
        """Run one extend of the slots before `bucket`, stage by stage."""
        self.stages(bucket or self.shape.slots, blocks, 1, 0)
        self.driver.synchronise(self.stream)

    def stages(self, bucket: int, blocks: int, limit: int, condition: int) -> None:
        for launch in self.stage_launches(bucket, blocks, limit, condition):
            launch()

    def stage_launches(
        self, bucket: int, blocks: int = 3, limit: int = 1, condition: int = 0
    ) -> list[Callable[[], None]]:
        """Return functions that launch the two stages of an extend."""
        distances, merge = layout.COMPUTE_DISTANCES, layout.MERGE_AND_GATHER
        slots, ends = distances.argument_values(slots=bucket), merge.argument_values(limit=limit, condition=condition)
        return [
            partial(self.launch, distances, blocks, distance_shared_bytes(bucket), *slots),
            partial(self.launch, merge, bucket, self.shape.merge_shared_bytes, *ends),
        ]

    def extend_in_blocks(self, limit: int = 1, places: int = layout.RING_PLACES[0]) -> None:
        """Make up to `limit` extends of each slot, in a block."""
        shared_bytes = self.shape.block_shared_bytes(places) + 4 * self.shape.visited_stride
        numbers = IN_BLOCKS.argument_values(limit=limit, places=places)
        self.launch(IN_BLOCKS, self.shape.slots, shared_bytes, *numbers)
        self.driver.synchronise(self.stream)

    def stay(self, blocks: int, life_us: int, places: int = layout.RING_PLACES[0]) -> None:
        """Launch the resident kernel."""
        numbers = layout.EXTEND_RESIDENT.argument_values(entries=self.shape.entries, life_us=life_us, places=places)
        self.launch(layout.EXTEND_RESIDENT, blocks, self.shape.resident_shared_bytes(places), *numbers)

    def upload(self, array: npt.NDArray[Any]) -> int:
        """Copy an array to the device. Return its address there."""
        return self._upload(array)

    def slot(self, number: int) -> np.void:
        """Return the head of a slot's line in device memory."""
        head = np.zeros(1, layout.SLOT)
        self.driver.copy_to_host(self.stream, head, self.addresses["slots"] + number * self.shape.line_bytes)
        line: np.void = head[0]
        return line

    def read(self, name: str, dtype: Any) -> npt.NDArray[Any]:
        """Return one of the batch's arrays in device memory."""
        target = np.zeros(self.shape.array_bytes()[name] // np.dtype(dtype).itemsize, dtype)
        self.driver.copy_to_host(self.stream, target, self.addresses[name])
        return target

    def done(self, slot: int) -> bool:
        return int(self._result(slot).view(layout.RESULT)[0]["ticket"]) == self._owners[slot]

    def extends(self, slot: int) -> int:
        return int(self.slot(slot)["extends"])

    def _result(self, slot: int) -> npt.NDArray[np.uint8]:
        return self.results.view[slot * self.shape.result_bytes :][: layout.RESULT.itemsize]

    def raw_result(self, slot: int, k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        line = self.results.view[slot * self.shape.result_bytes :][: self.shape.result_bytes]
        rest = line[layout.RESULT.itemsize :]
        nodes, distances = rest[: 4 * k].view(np.int32), rest[4 * self.shape.max_k :][: 4 * k].view(np.float32)
        return nodes.copy(), distances.copy()

    def result(self, slot: int, k: int, collection: int = 0) -> tuple[list[int], list[float]]:
        nodes, raw = self.raw_result(slot, k)
        index = self.indexes[collection]
        return index.ids_of(nodes.astype(np.int64)).tolist(), true_distances(raw, index.rows).tolist()

    @property
    def launches(self) -> int:
        return int(self.progress.view.view(layout.PROGRESS)[0]["launches"])
