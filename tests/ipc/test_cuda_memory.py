"""Tests of the CUDA calls of an arena in GPU memory, and of their order, over a fake driver that records them."""

import numpy as np
import pytest

from ipc import MemoryRefused, RingFull
from ipc.memory.device import DeviceSpan
from ipc.session.device_arena import DeviceArena, LeasedSlots, arena_bytes
from tests.ipc.fake_cuda import FakeCuda, from_elsewhere

pytest.importorskip("cuda.bindings.driver")
from ipc.memory.cuda import CudaMemory


def ends() -> tuple[FakeCuda, CudaMemory, CudaMemory]:
    cuda = FakeCuda()
    owner = CudaMemory.create(arena_bytes(2, 64), "cuda:0", cuda)
    return cuda, owner, CudaMemory.open(from_elsewhere(owner.reference), "cuda:0", cuda)


def test_the_ready_word_and_the_ack_follow_their_copies_on_one_stream_each() -> None:
    cuda, owner, peer = ends()
    arena = DeviceArena(owner, 2, 64, 1)
    number, lease = arena.lease(2)
    client = LeasedSlots(peer, lease)
    query = np.arange(16, dtype=np.float32)
    cuda.calls.clear()
    place = client.write(DeviceSpan(query.ctypes.data, query.nbytes))
    arena.claim(number, place)
    arena.copy_out(place)
    found = arena.copied(place)
    wrote, stored, word, payload, acked = cuda.calls  # no call waits
    assert (wrote, stored[:2]) == (("on device", peer.stream, 64), ("store", peer.stream))
    assert (word, payload) == (("to host", owner.stream, 4), ("to host", owner.stream, 64))
    assert acked[:2] == ("store", owner.stream)
    base, theirs = (memory.__cuda_array_interface__["data"][0] for memory in (owner, peer))
    assert acked[2] - base == stored[2] - theirs + 64  # the words of one slot, each at its mapped address …
    assert acked[3:] == stored[3:]  # … and its generation; flags 0: with a barrier
    assert found is not None
    assert found.view(np.float32).tolist() == query.tolist()


def test_a_full_lease_costs_one_read_of_all_its_slots() -> None:
    cuda = FakeCuda()
    owner = CudaMemory.create(arena_bytes(9, 64), "cuda:0", cuda)
    arena = DeviceArena(owner, 9, 64, 1)
    arena.lease(2)
    number, lease = arena.lease(7)
    client = LeasedSlots(CudaMemory.open(from_elsewhere(owner.reference), "cuda:0", cuda), lease)
    row = np.arange(16, dtype=np.float32)
    places = [client.write(row) for _ in range(7)]
    for place in (places[6], places[2]):
        arena.claim(number, place)
        arena.copy_out(place)
        assert arena.copied(place) is not None
    cuda.calls.clear()
    again = {client.write(row).slot for _ in range(2)}
    assert again == {places[6].slot, places[2].slot}
    assert [call[0] for call in cuda.calls].count("to host") == 1
    with pytest.raises(RingFull, match="all 7 leased slots"):
        client.write(row)
    assert [call[0] for call in cuda.calls].count("to host") == 2


def test_reading_a_word_does_not_queue_behind_the_streams_work() -> None:
    cuda, owner, _ = ends()
    owner.store_word(64, 7)
    cuda.calls.clear()
    assert owner.word(64) == 7
    streams = {call[1] for call in cuda.calls}
    assert len(streams) == 1
    assert owner.stream not in streams


def test_memory_is_exported_once_opened_on_demand_closed_by_the_client_and_freed_by_the_pool() -> None:
    cuda, owner, peer = ends()
    peer.close()
    peer.close()
    owner.close()
    names = [call[0] for call in cuda.calls]
    assert names.count("export") == names.count("open") == names.count("close") == names.count("free") == 1
    assert names.count("destroy") == 4
    assert names.index("close") < names.index("free")
    assert names.count("pin") == names.count("unpin")
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


def test_the_memory_implements_the_cuda_array_interface() -> None:
    owner = CudaMemory.create(4096, "cuda:0", FakeCuda())
    interface = owner.__cuda_array_interface__
    assert (interface["shape"], interface["typestr"]) == ((4096,), "|u1")


def test_without_a_driver_the_error_says_so() -> None:
    class NoDriver(FakeCuda):
        def cuInit(self, flags: int) -> tuple[object, ...]:  # noqa: N802
            raise RuntimeError('"cuda" is an NVIDIA driver library')

    with pytest.raises(MemoryRefused, match="has no CUDA driver"):
        CudaMemory.create(64, "cuda:0", NoDriver())


def test_the_threads_context_is_restored_after_every_call() -> None:
    cuda, owner, peer = ends()
    assert cuda.contexts == []
    owner.write(0, np.arange(4, dtype=np.float32))
    owner.store_word(64, 1)
    owner.read(64, owner.staging(4))
    assert peer.word(64) == 1
    peer.flush()
    cuda.cuMemcpyHtoDAsync = lambda *_: (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)  # type: ignore[method-assign]
    with pytest.raises(MemoryRefused, match="cuMemcpyHtoDAsync failed"):
        owner.write(0, np.arange(4, dtype=np.float32))
    peer.close()
    owner.close()
    assert cuda.contexts == []
