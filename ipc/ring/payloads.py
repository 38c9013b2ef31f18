"""Vectors as a request's slot takes them, and a result as its slot held it: all that is copied in and out of rings."""

import numpy as np
import numpy.typing as npt

from ipc.errors import ProtocolViolation, StaleEpoch
from ipc.ring.descriptors import LOST, RESULT_HEADER, STATUS_CODES, STATUSES, Float32s, Result
from ipc.ring.ring import RingConsumer

FLOAT32 = np.dtype(np.float32)
_LOST_CODE = STATUS_CODES[LOST]


def as_float32(vectors: npt.ArrayLike) -> Float32s:
    """As a ring takes them: float32, C-contiguous, aligned; a copy only if they are not so already."""
    if type(vectors) is np.ndarray and vectors.dtype is FLOAT32 and vectors.flags.carray:
        return vectors
    return np.require(vectors, FLOAT32, ["C", "A"])


def read_results(ring: RingConsumer, epoch: int, max_k: int, outstanding: dict[int, int], ended: list[Result]) -> None:
    """Append all results that are in the ring to `ended`; each ends its request in `outstanding` (id → enqueue_ns).

    Nothing in a slot is trusted. Raises `StaleEpoch`, or `ProtocolViolation` for what no correct pool writes; such a
    slot is given back and ends nothing, the ones before it count.
    """
    slots = ring.layout.slots
    while count := ring.ready(slots):
        first, done = ring.first, 0
        try:
            for slot in range(first, first + count):
                done += 1
                ended.append(_read(ring, slot, epoch, max_k, outstanding))
        finally:
            ring.release(done)
        if first + count < slots:  # what is ready ends here, or at the last slot
            return


def _read(ring: RingConsumer, slot: int, epoch: int, max_k: int, outstanding: dict[int, int]) -> Result:
    fields = RESULT_HEADER.unpack_from(ring.view, ring.header_offsets[slot])
    request_id, found_epoch, status, found, extends, receive_ns, begin_ns, end_ns = fields
    if found_epoch != epoch:
        raise StaleEpoch(f"a result of epoch {found_epoch} in a session of epoch {epoch}")
    if request_id not in outstanding or status >= _LOST_CODE or found > max_k:
        raise ProtocolViolation(f"the pool wrote result {request_id}, status {status}, {found} ids: not what was asked")
    ids, distances = np.empty(found, np.int64), np.empty(found, np.float32)
    ring.take_pairs(slot, ids, distances)
    enqueue_ns = outstanding.pop(request_id)
    return Result(request_id, STATUSES[status], ids, distances, extends, enqueue_ns, receive_ns, begin_ns, end_ns)


def rehearse(ring: RingConsumer) -> None:
    """Read the next result before it is there, for nothing: who does so while it waits reads the real one in half the
    time if there was a pause before, for the code and its memory are back in the caches."""
    slot = ring.first
    RESULT_HEADER.unpack_from(ring.view, ring.header_offsets[slot])
    ids, distances = np.empty(1, np.int64), np.empty(1, np.float32)
    ring.take_pairs(slot, ids, distances)
    Result(0, LOST, ids, distances, 0, 0, 0, 0, 0)
