"""The CPU engine's C functions for compiled loops (`gpu.engine.Backend`), and their handle."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu import slot_changes
from gpu.compiled import c_function, compiled
from gpu.cpu import running_batch
from gpu.cpu.extend import filtered
from gpu.cpu.state import visited_bits_of
from gpu.cpu.tables import ARRAYS, batch_at
from gpu.engine import INVALID, report_at
from gpu.slots import SlotStates, SlotTable, slot_states_at
from ipc.native.arrays import float32_at
from ipc.native.arrays import int64_at as words_at
from ipc.native.records import Array, Record, address_of, new_array, record, record_at


@record
class Arrays(Record):
    """What the engine's handle is the address of."""

    batch: int  # address of the batch's own handle
    slots: int  # address of the slots' states
    ids: Array[int]  # by collection: addresses, 0 where row numbers are the ids


_arrays_at = record_at(Arrays)


@compiled
def _batch(handle: int) -> Any:
    return batch_at(words_at(_arrays_at(handle).batch, (ARRAYS, 3)))


@compiled
def _slots(handle: int) -> SlotStates:
    return slot_states_at(_arrays_at(handle).slots)


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    batch = _batch(handle)
    if not 0 <= collection < batch.collection_count or batch.encodings[collection].dim == 0:
        return INVALID
    slots = _slots(handle)
    slot = slot_changes.next_free(slots)
    query = float32_at(vector, batch.encodings[collection].dim)
    bits = visited_bits_of(batch.collections[collection], top_m)
    if not running_batch.admit_query(batch, slot, query, collection, k, top_m, width, patience, bits):
        return INVALID
    batch.slots[slot].scanning = filtered.COMPARE if batch.collections[collection].degree == 0 else filtered.WALK
    slot_changes.acquire(slots, batch.active, slot)
    return slot


@c_function("int64(int64, int64, int64, int64)")
def set_filter(handle: int, slot: int, allowed: int, allowed_count: int) -> Any:
    batch = _batch(handle)
    collection = batch.collections[batch.slots[slot].collection]
    length = 0
    if collection.degree != 0:
        length = filtered.filtered_top_m(batch.slots[slot].top_m, allowed_count, collection.size, batch.keys.shape[1])
    filtered.set_filter(batch, slot, allowed, allowed_count, visited_bits_of(collection, length), length)
    return 0


@c_function("int64(int64, int64)")
def extend(handle: int, report: int) -> Any:
    batch = _batch(handle)
    slots = _slots(handle)
    of_batch = words_at(_arrays_at(handle).batch, (ARRAYS, 3))
    done = running_batch.extend_active(of_batch, slots.active_count)
    slots.active_count -= done
    written = report_at(report)
    written.extends, written.padded = 1, 0
    for i in range(done):
        slot, finished = batch.finished[i], written.finished[i]
        slot_changes.finish(slots, slot)
        finished.slot, finished.extends = slot, batch.slots[slot].extends
    return done


@c_function("int64(int64, int64, int64, int64)")
def read_result(handle: int, slot: int, ids: int, distances: int) -> Any:
    batch = _batch(handle)
    k = batch.slots[slot].k
    names = _arrays_at(handle).ids[batch.slots[slot].collection]
    to_ids, to_distances = words_at(ids, k), float32_at(distances, k)
    for i in range(k):
        node = batch.nodes[slot, i]
        if node < 0:
            return i
        to_ids[i] = node if names == 0 else words_at(names + 8 * node, 1)[0]
        to_distances[i] = batch.result_distances[slot, i]
    return k


@c_function("int64(int64, int64, int64)")
def change_state(handle: int, slot: int, action: int) -> Any:
    batch = _batch(handle)
    slot_changes.change(_slots(handle), batch.active, slot, action)
    return 0


class Handle:
    """The handle. Keeps alive what it points to."""

    def __init__(self) -> None:
        self._arrays = Arrays()
        self._keep_alive: tuple[Any, ...] = ()
        self.address = address_of(self._arrays)

    def point_to(self, batch: npt.NDArray[np.int64], slots: SlotTable, ids: list[npt.NDArray[np.int64] | None]) -> None:
        """Set the addresses of the batch's handle, the slots' states, and each collection's ids."""
        self._keep_alive = (batch, slots, ids)
        self._arrays.batch, self._arrays.slots = batch.ctypes.data, address_of(slots.record)
        self._arrays.ids = new_array(int, len(ids))
        for number, of_collection in enumerate(ids):
            self._arrays.ids[number] = 0 if of_collection is None else of_collection.ctypes.data
