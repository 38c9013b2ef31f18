"""The CPU engine's C functions for compiled loops (`gpu.engine.Backend`), and their handle."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu import slot_changes
from gpu.compiled import c_function, compiled
from gpu.cpu import running_batch
from gpu.cpu.extend import filtered
from gpu.cpu.state import visited_bits_of
from gpu.cpu.tables import COLLECTION, DEGREE, DIM, EXTENDS, SCANNING, SIZE, TOP_M, Batch, K, batch_at
from gpu.engine import INVALID
from gpu.slots import ACTIVE_COUNT, STATES
from ipc.native.arrays import float32_at
from ipc.native.arrays import int64_at as words_at

_ARRAYS = len(Batch._fields)

# Words of the handle, int64: addresses of the batch's handle, of the slot table's words and of the table of ids (int64
# [collections]: addresses, 0 where row numbers are the ids); and the number of collections.
BATCH, SLOT_WORDS, IDS, COLLECTIONS = range(4)
HANDLE_WORDS = 4


@compiled
def _batch(handle: int) -> Any:
    return batch_at(words_at(words_at(handle, HANDLE_WORDS)[BATCH], (_ARRAYS, 3)))


@compiled
def _slot_words(handle: int, batch: Any) -> Any:
    return words_at(words_at(handle, HANDLE_WORDS)[SLOT_WORDS], STATES + len(batch.slots))


@c_function("int64(int64, int64, int64, int64, int64, int64, int64)")
def admit(handle: int, vector: int, collection: int, k: int, top_m: int, width: int, patience: int) -> Any:
    batch = _batch(handle)
    if not 0 <= collection < len(batch.encodings) or batch.encodings[collection, DIM] == 0:
        return INVALID
    words = _slot_words(handle, batch)
    slot = slot_changes.next_free(words)
    query = float32_at(vector, batch.encodings[collection, DIM])
    bits = visited_bits_of(batch.collections[collection], top_m)
    if not running_batch.admit_query(batch, slot, query, collection, k, top_m, width, patience, bits):
        return INVALID
    batch.slots[slot, SCANNING] = batch.collections[collection, DEGREE] == 0
    slot_changes.acquire(words, batch.active, slot)
    return slot


@c_function("int64(int64, int64, int64, int64)")
def set_filter(handle: int, slot: int, allowed: int, allowed_count: int) -> Any:
    batch = _batch(handle)
    collection = batch.collections[batch.slots[slot, COLLECTION]]
    length = 0
    if collection[DEGREE] != 0:
        length = filtered.filtered_top_m(batch.slots[slot, TOP_M], allowed_count, collection[SIZE], batch.keys.shape[1])
    filtered.set_filter(batch, slot, allowed, allowed_count, visited_bits_of(collection, length), length)
    return 0


@c_function("int64(int64, int64)")
def extend(handle: int, report: int) -> Any:
    batch = _batch(handle)
    words = _slot_words(handle, batch)
    of_batch = words_at(words_at(handle, HANDLE_WORDS)[BATCH], (_ARRAYS, 3))
    done = running_batch.extend_active(of_batch, words[ACTIVE_COUNT])
    words[ACTIVE_COUNT] -= done
    out = words_at(report, 2 + 2 * done)
    out[0], out[1] = 1, 0
    for i in range(done):
        slot = batch.finished[i]
        slot_changes.finish(words, slot)
        out[2 + 2 * i], out[3 + 2 * i] = slot, batch.slots[slot, EXTENDS]
    return done


@c_function("int64(int64, int64, int64, int64)")
def read_result(handle: int, slot: int, ids: int, distances: int) -> Any:
    batch = _batch(handle)
    handle_words = words_at(handle, HANDLE_WORDS)
    k = batch.slots[slot, K]
    names = words_at(handle_words[IDS], handle_words[COLLECTIONS])[batch.slots[slot, COLLECTION]]
    to_ids, to_distances = words_at(ids, k), float32_at(distances, k)
    for i in range(k):
        node = batch.nodes[slot, i]
        if node < 0:
            return i
        to_ids[i] = node if names == 0 else words_at(names + 8 * node, 1)[0]
        to_distances[i] = batch.found[slot, i]
    return k


@c_function("int64(int64, int64, int64)")
def change_state(handle: int, slot: int, action: int) -> Any:
    batch = _batch(handle)
    slot_changes.change(_slot_words(handle, batch), batch.active, slot, action)
    return 0


class Handle:
    """The handle's words. Keeps the arrays that they point to alive."""

    def __init__(self) -> None:
        self._words = np.zeros(HANDLE_WORDS, np.int64)
        self._ids = np.zeros(0, np.int64)
        self._keep_alive: tuple[Any, ...] = ()
        self.address = int(self._words.ctypes.data)

    def point_to(
        self, batch: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], ids: list[npt.NDArray[np.int64] | None]
    ) -> None:
        """Set the addresses of the batch's handle, the slot table's words, and each collection's ids."""
        self._ids = np.array([0 if one is None else one.ctypes.data for one in ids], np.int64)
        self._keep_alive = (batch, slots, ids)
        self._words[:] = batch.ctypes.data, slots.ctypes.data, self._ids.ctypes.data, len(ids)
