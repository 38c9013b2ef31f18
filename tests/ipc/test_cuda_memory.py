"""What an arena in a GPU's memory asks of CUDA, and in which order; the driver is a stand-in that writes it down."""

import numpy as np
import pytest

from ipc import MemoryRefused
from ipc.device_arena import DeviceArena, LeasedSlots, arena_bytes
from ipc.device_memory import CudaReference, DeviceSpan
from tests.ipc.fake_cuda import FakeCuda

pytest.importorskip("cuda.bindings.driver")
from ipc.cuda_memory import CudaMemory


def ends() -> tuple[FakeCuda, CudaMemory, CudaMemory]:
    cuda = FakeCuda()
    owner = CudaMemory.create(arena_bytes(2, 64), 0, cuda)
    reference = owner.reference
    assert isinstance(reference, CudaReference)
    peer = CudaMemory.open(CudaReference(1, "cuda:0", reference.handle, reference.size), "cuda:0", cuda)
    return cuda, owner, peer


def test_a_clients_ready_word_follows_its_copy_and_the_pools_ack_follows_its_own_on_one_stream_each() -> None:
    cuda, owner, peer = ends()
    arena = DeviceArena(owner, 2, 64, 1)
    number, lease = arena.lease(2)
    client = LeasedSlots(peer, lease)
    query, slot_of_engine = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    cuda.calls.clear()
    place = client.write(DeviceSpan(query.ctypes.data, query.nbytes))
    arena.take(number, place, DeviceSpan(slot_of_engine.ctypes.data, 64))
    wrote, stored, waited, read, acked = cuda.calls
    assert (wrote, stored[:2]) == (("on device", peer.stream, 64), ("store", peer.stream))
    assert waited[:2] == ("wait", owner.stream)
    assert waited[2:] == stored[2:]  # the same word and generation; flags 0: with a barrier, and at least
    assert (read, acked[:2]) == (("on device", owner.stream, 64), ("store", owner.stream))
    assert slot_of_engine.tolist() == query.tolist()


def test_looking_at_a_word_and_unblocking_do_not_queue_behind_a_stream_that_waits() -> None:
    cuda, owner, _ = ends()
    cuda.calls.clear()
    owner.unblock(64, 7)
    assert owner.word(64) == 7
    streams = {call[1] for call in cuda.calls}
    assert len(streams) == 1
    assert owner.stream not in streams


def test_memory_is_exported_once_opened_lazily_closed_by_the_client_and_freed_by_the_pool() -> None:
    cuda, owner, peer = ends()
    peer.close()
    peer.close()
    owner.close()
    names = [call[0] for call in cuda.calls]
    assert names.count("export") == names.count("open") == names.count("close") == names.count("free") == 1
    assert names.count("destroy") == 4
    assert names.index("close") < names.index("free")
    with pytest.raises(MemoryRefused, match="until it closes it"):
        _ = owner.reference


def test_a_process_cannot_open_what_it_exported() -> None:
    cuda, owner, _ = ends()
    reference = owner.reference
    assert isinstance(reference, CudaReference)
    with pytest.raises(MemoryRefused, match="cannot open the GPU memory that it exported itself"):
        CudaMemory.open(reference, "cuda:0", cuda)


def test_without_a_driver_the_refusal_says_so() -> None:
    class NoDriver(FakeCuda):
        def cuInit(self, flags: int) -> tuple[object, ...]:  # noqa: N802
            raise RuntimeError('"cuda" is an NVIDIA driver library')

    with pytest.raises(MemoryRefused, match="no CUDA driver on this machine"):
        CudaMemory.create(64, 0, NoDriver())
