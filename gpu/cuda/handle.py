"""The handle of the CUDA engine's C functions: the address of a `Host`."""

from dataclasses import replace
from typing import Any

import numpy as np

from gpu.cpu.queries import query_encoding
from gpu.cpu.state import collection_record
from gpu.cpu.tables import Encoding
from gpu.cuda import filtered, layout, resident
from gpu.cuda.batch import BatchMemory
from gpu.cuda.driver import Driver
from gpu.cuda.graphs import Kernels, LaunchGraphs
from gpu.cuda.host import Graph, Host, Resident, ResidentSlot
from gpu.index.data import IndexData
from gpu.slots import MAX_COLLECTIONS, SlotTable
from ipc.native.records import SharedU32, address_of, array_from, array_over, new_array


class Handle:
    """The host's state. Keeps alive what it points to."""

    def __init__(
        self, driver: Driver, stream: int, memory: BatchMemory, kernels: Kernels, graphs: LaunchGraphs, batch: Any
    ) -> None:
        """Fill the handle. batch: the kernels' BATCH as an argument."""
        slots, line_bytes = memory.lines.shape
        self.table = SlotTable(slots)
        self._memory = memory
        self._active = np.zeros(slots, np.int32)
        self._scans = filtered.new_host_scans(memory.lines, layout.SLOT.itemsize, memory.nodes.shape[1])
        self._graphs = graphs.table()
        self._commands_address = np.array([memory.commands_address], np.uint64)
        self._batch = np.frombuffer(bytes(batch), np.uint8).copy()
        self._arguments = np.array([self._batch.ctypes.data, self._commands_address.ctypes.data], np.int64)
        self._alive: dict[int, IndexData] = {}
        entry = driver.entry_points()
        self.host = Host(
            table=address_of(self.table.record),
            active=self._active.ctypes.data,
            slots=slots,
            encodings=new_array(Encoding, MAX_COLLECTIONS),
            ids=new_array(int, MAX_COLLECTIONS),
            collections=self._scans.collections,
            searches=self._scans.slots,
            keys=self._scans.keys.ctypes.data,
            lines=memory.lines.ctypes.data,
            device_lines=memory.lines_address,
            line_bytes=line_bytes,
            commands=array_from(layout.Command, memory.commands.ctypes.data),
            places=new_array(int, slots),
            results=memory.results.ctypes.data,
            result_bytes=memory.result_bytes,
            max_k=memory.nodes.shape[1],
            progress=array_from(layout.Progress, memory.progress.ctypes.data),
            doorbell=array_from(SharedU32, memory.doorbell.ctypes.data),
            graphs=array_over(Graph, self._graphs),
            limit=graphs.limit,
            stream=stream,
            replay=entry.replay,
            launch=entry.launch,
            query=entry.query,
            write=kernels.write_slots,
            arguments=self._arguments.ctypes.data,
            slot_states=new_array(ResidentSlot, slots),
            next_ticket=1,
            resident=Resident(
                rings=array_from(SharedU32, memory.rings.ctypes.data),
                goals=array_from(SharedU32, memory.goals.ctypes.data),
                records=array_from(layout.SlotRecord, memory.records.ctypes.data),
                entries=len(memory.records) // layout.RECORD.itemsize,
                queue=new_array(int, slots),
                finished=new_array(int, resident.FINISHED_PER_SLOT * slots),
            ),
        )
        self.address = address_of(self.host)

    @property
    def graphs(self) -> list[int]:
        """CUDA graphs, smallest bucket first."""
        addresses: list[int] = self._graphs[:, 1].tolist()
        return addresses

    def load(self, number: int, data: IndexData) -> None:
        """Register a collection; queries can be admitted to it afterwards."""
        self._alive[number] = read = replace(data, codes=None)
        self.host.ids[number] = 0 if data.ids is None else data.ids.ctypes.data
        self._scans.collections[number] = collection_record(read)
        self.host.encodings[number] = query_encoding(read.rows)

    def unload(self, number: int) -> None:
        """Unregister a collection. Precondition: no slot searches it."""
        self.host.encodings[number] = Encoding()
        del self._alive[number]

    def requested_k(self, slot: int) -> int:
        """Return k of a slot's query."""
        return self._scans.slots[slot].k

    def scan_extends(self, slot: int) -> int | None:
        """Return the extends of a slot that the host scans; None for a slot that the device searches."""
        search = self._scans.slots[slot]
        return search.extends if search.scanning else None

    def searches(self, number: int) -> bool:
        """Return whether a slot searches this collection."""
        return any(self._memory.head(slot)["collection"] == number for slot in self.table.taken)
