"""Tests of the CUDA calls of an arena in GPU memory, and of their order, over a fake driver that records them."""

import numpy as np
import pytest

from ipc import MemoryRefused
from ipc.memory.device import DeviceSpan
from ipc.session.device_arena import DeviceArena, LeasedSlots, arena_bytes
from tests.ipc.fake_cuda import FakeCuda, from_elsewhere

pytest.importorskip("cuda.bindings.driver")
from ipc.memory.cuda import CudaMemory


def ends() -> tuple[FakeCuda, CudaMemory, CudaMemory]:
    cuda = FakeCuda()
    owner = CudaMemory.create(arena_bytes(2, 64), "cuda:0", cuda)
    return cuda, owner, CudaMemory.open(from_elsewhere(owner.reference), "cuda:0", cuda)


def test_the_word_follows_its_vector_on_one_stream_and_nothing_waits() -> None:
    cuda, owner, peer = ends()
    arena = DeviceArena(owner, 2, 64, 1)
    lease = arena.lease(2)
    client = LeasedSlots(peer, lease)
    words = np.zeros(512, np.int64)
    word = peer.reach(int(words.ctypes.data), words.nbytes) + 48
    query = np.arange(16, dtype=np.float32)
    cuda.calls.clear()
    slot = client.write(DeviceSpan(query.ctypes.data, query.nbytes), word, 7)
    wrote, stored = cuda.calls
    assert (wrote, stored) == (("on device", peer.stream, 64), ("store", peer.stream, word, 7, 0))  # 0: with a barrier
    assert words[6] == 7
    found = np.zeros(16, np.float32)
    owner.read(arena.address_of(slot) - owner.address, found)
    assert found.tolist() == query.tolist()


def test_host_memory_that_a_device_reaches_is_registered_until_the_memory_is_closed() -> None:
    cuda, owner, peer = ends()
    words = np.zeros(512, np.int64)
    address = int(words.ctypes.data)
    assert peer.reach(address, words.nbytes) == address
    assert cuda.calls[-1] == ("register", address, 4096, 3)  # portable, mapped
    peer.close()
    names = [call[0] for call in cuda.calls]
    assert names.index("synchronise") < names.index("unregister"), "what is queued is stored before"
    assert ("unregister", address) in cuda.calls
    owner.close()


def test_memory_is_exported_once_opened_on_demand_closed_by_the_client_and_freed_by_the_pool() -> None:
    cuda, owner, peer = ends()
    peer.close()
    peer.close()
    owner.close()
    names = [call[0] for call in cuda.calls]
    assert names.count("export") == names.count("open") == names.count("close") == names.count("free") == 1
    assert names.count("destroy") == 2
    assert names.index("close") < names.index("free")
    with pytest.raises(MemoryRefused, match="until it closes it"):
        _ = owner.reference


def test_a_process_cannot_open_its_own_export() -> None:
    cuda, owner, _ = ends()
    reference = owner.reference
    with pytest.raises(MemoryRefused, match="cannot open the GPU memory that it exported itself"):
        CudaMemory.open(reference, "cuda:0", cuda)


@pytest.mark.parametrize(
    ("device", "ordinal"),
    [
        ("cuda", 0),
        ("cuda:1", 1),
        ("GPU-01010101-0101-0101-0101-010101010101", 1),
        ("GPU-00000000-0000-0000-0000-000000000000", 0),
    ],
)
def test_memory_is_allocated_and_opened_on_the_placements_device(device: str, ordinal: int) -> None:
    cuda = FakeCuda()
    owner = CudaMemory.create(64, device, cuda)
    assert [call for call in cuda.calls if call[0] == "device"][-1] == ("device", ordinal)
    assert owner.reference.device == f"cuda:{ordinal}"
    CudaMemory.open(from_elsewhere(owner.reference), device, cuda)
    assert [call for call in cuda.calls if call[0] in ("device", "open")][-2:] == [("device", ordinal), ("open", 1)]


@pytest.mark.parametrize("device", ["cuda:2", "cuda:", "cpu", "GPU-02020202-0202-0202-0202-020202020202", ""])
def test_a_missing_device_is_named(device: str) -> None:
    with pytest.raises(MemoryRefused, match=f"'{device}' is not among the 2 GPUs"):
        CudaMemory.create(64, device, FakeCuda())


def test_completion_of_copies_is_queried_without_waiting() -> None:
    cuda = FakeCuda(lazy=True)
    owner = CudaMemory.create(64, "cuda:0", cuda)
    assert owner.idle()
    owner.write(0, np.arange(8, dtype=np.int64))
    cuda.calls.clear()
    assert not owner.idle()
    assert cuda.calls == [("query", owner.stream)]
    cuda.run()
    assert owner.idle()


def test_without_a_driver_the_error_says_so() -> None:
    class NoDriver(FakeCuda):
        def cuInit(self, flags: int) -> tuple[object, ...]:  # noqa: N802
            raise RuntimeError('"cuda" is an NVIDIA driver library')

    with pytest.raises(MemoryRefused, match="has no CUDA driver"):
        CudaMemory.create(64, "cuda:0", NoDriver())


def test_the_threads_context_is_restored_after_every_call() -> None:
    cuda, owner, peer = ends()
    assert cuda.contexts == []
    there = DeviceSpan(owner.address, 16)
    owner.write(0, np.arange(4, dtype=np.float32))
    owner.read(64, np.zeros(4, np.uint8))
    owner.send(64, there, owner.address, 1)
    peer.flush()
    refused = (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
    cuda.cuMemcpyHtoDAsync = cuda.cuMemcpyDtoDAsync = lambda *_: refused  # type: ignore[method-assign]
    with pytest.raises(MemoryRefused, match="cuMemcpyHtoDAsync failed"):
        owner.write(0, np.arange(4, dtype=np.float32))
    with pytest.raises(MemoryRefused, match=r"cuMemcpyDtoDAsync failed: .*INVALID_VALUE"):
        owner.send(64, there, owner.address, 1)
    peer.close()
    owner.close()
    assert cuda.contexts == []
