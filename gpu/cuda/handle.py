"""The handle of the CUDA engine's C functions; `gpu.cuda.backend` defines its words."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.cpu.queries import QueryEncoding
from gpu.cpu.state import collection_record
from gpu.cpu.tables import Encoding
from gpu.cuda import backend, filtered, layout, resident
from gpu.cuda.batch import BatchMemory
from gpu.cuda.driver import Driver
from gpu.cuda.graphs import Kernels, LaunchGraphs
from gpu.index.data import IndexData
from gpu.slots import MAX_COLLECTIONS, SlotTable
from ipc.native.records import address_of, new_array


class Handle:
    """The handle's words. Keeps the arrays that they point to alive."""

    def __init__(
        self, driver: Driver, stream: int, memory: BatchMemory, kernels: Kernels, graphs: LaunchGraphs, batch: Any
    ) -> None:
        """Fill the handle. batch: the kernels' BATCH as an argument."""
        slots, line_bytes = memory.lines.shape
        self.words = np.zeros(backend.HANDLE_WORDS, np.int64)
        self.address = int(self.words.ctypes.data)
        self.table = SlotTable(slots)
        self._memory = memory
        self._active = np.zeros(slots, np.int32)
        self._places = np.zeros(slots, np.int64)
        self._encodings = new_array(Encoding, MAX_COLLECTIONS)
        self._ids = np.zeros(MAX_COLLECTIONS, np.int64)
        self._scans = filtered.new_host_scans(memory.lines, layout.SLOT.itemsize, memory.nodes.shape[1])
        self._graphs = graphs.table()
        self._commands_address = np.array([memory.commands_address], np.uint64)
        self.slot_states = np.zeros((slots, backend.SLOT_STATE_WORDS), np.int64)
        self._resident = np.zeros(resident.RESIDENT_WORDS, np.int64)
        self._resident[resident.AT_RINGS] = memory.rings.ctypes.data
        self._resident[resident.AT_GOALS] = memory.goals.ctypes.data
        self._resident[resident.AT_RECORDS] = memory.records.ctypes.data
        self._resident[resident.ENTRIES] = len(memory.records) // layout.RECORD.itemsize
        self._queue = np.zeros(slots, np.int64)
        self._finished = np.zeros(resident.FINISHED_PER_SLOT * slots, np.int64)
        self._resident[resident.AT_QUEUE] = self._queue.ctypes.data
        self._resident[resident.AT_FINISHED] = self._finished.ctypes.data
        self._batch = np.frombuffer(bytes(batch), np.uint8).copy()
        self._arguments = np.array([self._batch.ctypes.data, self._commands_address.ctypes.data], np.int64)
        self._alive: dict[int, tuple[IndexData, QueryEncoding]] = {}
        arrays: dict[int, npt.NDArray[Any]] = {
            backend.TABLE: self.table.words,
            backend.ACTIVE: self._active,
            backend.IDS: self._ids,
            backend.KEYS: self._scans.keys,
            backend.LINES: memory.lines,
            backend.COMMANDS: memory.commands,
            backend.PLACES: self._places,
            backend.RESULTS: memory.results,
            backend.GRAPHS: self._graphs,
            backend.ARGUMENTS: self._arguments,
            backend.RESIDENT: self._resident,
            backend.SLOT_STATES: self.slot_states,
        }
        for word, array in arrays.items():
            self.words[word] = array.ctypes.data
        entry = driver.entry_points()
        values = {
            backend.ENCODINGS: address_of(self._encodings),
            backend.COLLECTIONS: address_of(self._scans.collections),
            backend.SEARCHES: address_of(self._scans.slots),
            backend.SLOTS: slots,
            backend.DEVICE_LINES: memory.lines_address,
            backend.LINE_BYTES: line_bytes,
            backend.RESULT_BYTES: memory.result_bytes,
            backend.MAX_K: memory.nodes.shape[1],
            backend.PROGRESS: memory.progress.ctypes.data,
            backend.DOORBELL: memory.doorbell.ctypes.data,
            backend.BUCKETS: len(self._graphs),
            backend.LIMIT: graphs.limit,
            backend.STREAM: stream,
            backend.REPLAY: entry.replay,
            backend.LAUNCH: entry.launch,
            backend.QUERY: entry.query,
            backend.WRITE: kernels.write_slots,
            backend.NEXT_TICKET: 1,
        }
        for word, value in values.items():
            self.words[word] = value

    @property
    def graphs(self) -> list[int]:
        """CUDA graphs, smallest bucket first."""
        found: list[int] = self._graphs[:, 1].tolist()
        return found

    def load(self, number: int, data: IndexData) -> None:
        """Register a collection; queries can be admitted to it afterwards."""
        read = replace(data, rows=layout.without_sketch(data.rows), codes=None)
        encoding = QueryEncoding(read.rows)
        self._alive[number] = (read, encoding)
        self._ids[number] = 0 if data.ids is None else data.ids.ctypes.data
        self._scans.collections[number] = collection_record(read)
        self._encodings[number] = encoding.record

    def unload(self, number: int) -> None:
        """Unregister a collection. Precondition: no slot searches it."""
        self._encodings[number] = Encoding()
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
        return any(self._memory.head(slot)[layout.COLLECTION_NUMBER] == number for slot in self.table.taken)
