"""Arenas of query vectors in a fake GPU's memory, and vectors there: it is host memory, see `fake_cuda`."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from ipc.memory.device import CudaReference, DeviceMemory, DeviceSpan
from ipc.session.device_arena import DeviceArena, arena_bytes
from tests.ipc.fake_cuda import FakeCuda, from_elsewhere


def make_arena(cuda: FakeCuda, slots: int, dim: int, epoch: int) -> DeviceArena:
    from ipc.memory.cuda import CudaMemory

    return DeviceArena(CudaMemory.create(arena_bytes(slots, 4 * dim), "cuda:0", cuda), slots, 4 * dim, epoch)


@contextmanager
def clients_on(cuda: FakeCuda) -> Iterator[None]:
    """Let clients of this process open arenas as those of other processes do."""
    from ipc.memory.cuda import CudaMemory

    def open_memory(reference: CudaReference, device: str) -> DeviceMemory:
        return CudaMemory.open(from_elsewhere(reference), device, cuda)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ipc.client.arena.open_memory", open_memory)
        yield


def span(array: npt.NDArray[np.float32], device: int = 0) -> DeviceSpan:
    """Return an array as one in the fake GPU's memory."""
    return DeviceSpan(array.ctypes.data, array.nbytes, device)
