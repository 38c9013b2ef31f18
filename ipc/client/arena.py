"""A client's leased slots of its pool's arena, opened by the first vector that is written there."""

import contextlib
from collections.abc import Iterable

import numpy as np

from ipc.errors import IpcError, MemoryRefused, RingFull
from ipc.memory.device import MAX_WORD, CudaReference, DeviceMemory, DeviceSpan
from ipc.ring.descriptors import Float32s
from ipc.session.device_arena import LeasedSlots
from ipc.session.messages import Grant


class ClientArena:
    """Slots that a pool has granted for one session. One thread: the one that submits.

    The arena is opened from the GPU of the first vector, so a client without vectors on GPUs creates no CUDA context.
    A failure to open it (a MIG device, memory of this process) disables the arena for the session.
    """

    def __init__(self, grant: Grant, requests: tuple[int, int]) -> None:
        """requests: address and bytes of the request ring, in which the GPU stores that a vector is written."""
        self._grant, self._requests = grant, requests
        self.slots: LeasedSlots | None = None
        self._device = ""
        self._ring = 0  # address of the request ring for the device
        self._generation = 0
        self._held: dict[int, int] = {}  # slots by request id
        self.error = ""
        """Why the arena has failed for this session; empty while it has not."""

    def write(self, row: DeviceSpan, request_id: int, word: int) -> Float32s:
        """Queue a copy of a request's vector into a free slot. Return its payload. Raises MemoryRefused.

        word: offset in the request ring of the word that says that the vector is written.
        """
        if self.error:
            raise MemoryRefused(self.error)
        device = f"cuda:{row.device}"
        if self.slots is not None and device != self._device:
            raise MemoryRefused(f"the arena is open from {self._device}, the vector lies on {device}")
        try:
            slots = self.slots or self._open_slots(device)
            generation = self._generation + 1 & MAX_WORD
            slot = self._held[request_id] = slots.write(row, self._ring + word, generation)
        except RingFull as error:
            raise MemoryRefused(str(error)) from error
        except IpcError as error:
            self.error = str(error)
            self.close()
            raise MemoryRefused(self.error) from error
        self._generation = generation
        return np.array((slot, generation), np.uint32).view(np.float32)

    @property
    def is_full(self) -> bool:
        """Whether all slots are in use by requests that have not ended, as far as `end` was told."""
        return self.slots is not None and not self.slots.free_slots

    def end(self, request_ids: Iterable[int]) -> None:
        """Free the slots of requests that have ended, or were not sent."""
        for request_id in request_ids if self._held else ():
            slot = self._held.pop(request_id, None)
            if slot is not None and self.slots is not None:
                self.slots.release(slot)

    def _open_slots(self, device: str) -> LeasedSlots:
        memory = open_memory(self._grant.memory, device)
        try:
            slots = LeasedSlots(memory, self._grant.lease)
            self._ring = memory.reach(*self._requests)
        except BaseException:
            memory.close()
            raise
        self.slots, self._device = slots, device
        return slots

    def close(self) -> None:
        """Close the arena, which the pool frees at the end of the session. Idempotent."""
        if self.slots is not None:
            with contextlib.suppress(IpcError):  # a device that has failed must not keep the session
                self.slots.close()
            self.slots = None


def open_memory(reference: CudaReference, device: str) -> DeviceMemory:
    """Open a pool's GPU memory from the GPU `device` of this process. Raises MemoryRefused."""
    from ipc.memory.cuda import CudaMemory

    return CudaMemory.open(reference, device)
