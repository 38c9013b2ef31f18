"""A client's leased slots of its pool's arena, opened by the first vector that can be written there."""

import contextlib

import numpy as np

from ipc.errors import IpcError, RingFull
from ipc.memory.device import DeviceSpan, Source
from ipc.ring.descriptors import Float32s
from ipc.session.device_arena import LeasedSlots, open_memory
from ipc.session.messages import Grant


class ClientArena:
    """Slots that a pool has granted for one session. One thread: the one that submits.

    The arena is opened from the GPU of the first vector, so a client without vectors on GPUs creates no CUDA context.
    A failure to open it (a MIG device, memory of this process) disables the arena for the session.
    """

    def __init__(self, grant: Grant) -> None:
        self._grant = grant
        self.slots: LeasedSlots | None = None
        self._device = ""
        self.on_gpu = grant.gpu is not None
        """Whether the arena is in a GPU's memory; only vectors of the same kind of memory can be written to it."""
        self.error = ""
        """Why the last vector could not be written."""
        self.disabled = False
        """Whether the arena has failed for this session."""

    def write(self, row: Source) -> Float32s | None:
        """Queue a copy of a vector into a free slot. Return its request's handle; None on failure, see `error`."""
        device = f"cuda:{row.device}" if isinstance(row, DeviceSpan) else "cpu"
        try:
            slots = self.slots or self._open_slots(device)
            if slots is None:
                return None
            if device != self._device:
                self.error = f"the arena is open from {self._device}, the vector lies on {device}"
                return None
            return np.array(slots.write(row), np.uint32).view(np.float32)
        except RingFull as error:
            self.error = str(error)
        except IpcError as error:
            self.error = str(error)
            self.disabled = True
            self.close()
        return None

    def _open_slots(self, device: str) -> LeasedSlots | None:
        if self.disabled:
            return None
        memory = open_memory(self._grant.memory, device)
        try:
            self.slots = LeasedSlots(memory, self._grant.lease)
        except BaseException:
            memory.close()
            raise
        self._device = device
        return self.slots

    def close(self) -> None:
        """Close the arena, which the pool frees at the end of the session. Idempotent."""
        if self.slots is not None:
            with contextlib.suppress(IpcError):  # a device that has failed must not keep the session
                self.slots.close()
            self.slots = None
