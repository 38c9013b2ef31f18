"""Contract tests of KV transports from prefill to decode: through host memory and from GPU to GPU."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gpu import DeviceError
from gpu.cuda import block_copy
from ipc import HandoverSource, Offer, new_token, private_endpoint
from runtime.errors import ConfigError
from runtime.serving.kv.transport import (
    CudaTransport,
    DeviceTransfer,
    KvArray,
    KvSink,
    Transfer,
    Transport,
    kv_array,
    transport_for,
)
from tests.ipc.fake_cuda import FakeCuda

torch = pytest.importorskip("torch", reason="the model needs the extra [llm]")

LAYERS, HEADS, BLOCK, DIM = 3, 2, 4, 8
SOURCE_BLOCKS, TARGET_BLOCKS = 10, 12
BYTES = 4 * LAYERS * 2 * SOURCE_BLOCKS * HEADS * BLOCK * DIM


@dataclass
class Ends:
    """Prefill's KV, filled with random numbers, and decode's, filled with zeros."""

    source: HandoverSource
    sink: KvSink
    there: Any
    here: KvArray
    cuda: FakeCuda | None

    def offer(self, lease: int = 0) -> tuple[int, Offer]:
        number = self.source.offer(self.endpoint, lease, b"blocks")
        return number, self.received()

    def received(self) -> Offer:
        assert self.sink.socket.poll(60_000)
        (offer,) = self.sink.receive()
        return offer

    def outcomes(self) -> list[tuple[int, bool, str]]:
        while not (found := self.source.poll()):
            assert self.source.socket.poll(60_000)
        return [(outcome.offer_id, outcome.accepted, outcome.reason) for outcome in found]

    endpoint: str = ""


@pytest.fixture(params=["host", "GPU", "GPU, one copy at a time"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    cuda = None
    transport: Any = Transport()
    if request.param != "host":
        pytest.importorskip("cuda.bindings.driver")
        from tests.serving.emulated_gpu import EmulatedTransport

        cuda = FakeCuda(lazy=request.param != "GPU", copies_per_query=1)
        transport = EmulatedTransport(cuda)
    endpoint = private_endpoint(new_token(), "decode-0")
    source = transport.source("prefill-0", leases=2, kv_bytes=BYTES, epoch=5, lease_ms=60_000)
    sink = transport.sink(endpoint)
    assert isinstance(source.memory, memoryview)
    there = np.frombuffer(source.memory, np.float32).reshape(LAYERS, 2, SOURCE_BLOCKS, HEADS, BLOCK, DIM)
    there[:] = np.random.default_rng(0).normal(size=there.shape)
    here = torch.zeros(LAYERS, 2, TARGET_BLOCKS, HEADS, BLOCK, DIM)
    yield Ends(source, sink, there, here if cuda else here.numpy(), cuda, endpoint)
    source.close()
    sink.close()


def whole(step: Callable[[], bool]) -> int:
    """Call a step until it is done."""
    steps = 1
    while not step():
        steps += 1
        assert steps < 10_000
    return steps


def test_blocks_are_copied_to_their_targets_and_no_others(ends: Ends) -> None:
    number, offer = ends.offer(ends.source.lease() or 0)
    taken, given = [7, 8, 9, 2, 0], [3, 4, 5, 11, 0]
    transfer = ends.sink.pull(offer, taken, ends.here, given)
    steps = whole(lambda: transfer.step(0))
    assert steps == LAYERS if ends.cuda is None else steps >= 1, "a slice is a layer here"
    here = np.asarray(ends.here)
    assert np.array_equal(here[:, :, given], ends.there[:, :, taken])
    assert not here[:, :, [1, 2, 6, 7, 8, 9, 10]].any()
    assert transfer.bytes == here[:, :, :5].nbytes
    assert transfer.busy_ns > 0
    assert ends.sink.is_current(offer)
    assert ends.sink.acknowledge(offer)
    assert ends.outcomes() == [(number, True, "")]


def test_a_copy_stops_after_the_slice_in_which_its_time_runs_out() -> None:
    times = iter(range(0, 1000, 10))
    source = np.random.default_rng(1).normal(size=(LAYERS, 2, 12, HEADS, BLOCK, DIM)).astype(np.float32)
    target = np.zeros_like(source)
    copy = Transfer(source, range(12), target, range(12))
    assert not copy.step(15, clock=lambda: next(times))  # the clock advances 10 ns per call: two slices
    assert [bool(np.array_equal(*layers)) for layers in zip(source, target, strict=True)] == [True, True, False]


def test_blocks_of_a_released_lease_are_not_current_even_if_already_copied(ends: Ends) -> None:
    lease = ends.source.lease()
    assert lease is not None
    _, offer = ends.offer(lease)
    whole(ends.sink.pull(offer, [1], ends.here, [1]).step)
    assert ends.sink.is_current(offer)
    ends.source.release(lease)
    assert not ends.sink.is_current(offer)


def test_an_offer_withdrawn_during_its_pull_is_not_current_and_cannot_be_acknowledged(ends: Ends) -> None:
    number, offer = ends.offer()
    transfer = ends.sink.pull(offer, [0, 5], ends.here, [0, 5])
    transfer.step(0)
    assert ends.source.withdraw(number)
    assert ends.sink.socket.poll(60_000)
    assert ends.sink.receive() == []
    assert not ends.sink.is_current(offer)
    assert not ends.sink.acknowledge(offer)
    transfer.settle()
    assert transfer.settled


def test_out_of_range_blocks_are_rejected_before_anything_is_copied(ends: Ends) -> None:
    _, offer = ends.offer()
    with pytest.raises(ValueError, match=r"source blocks must be within 0\.\.9, got \[10\]"):
        ends.sink.pull(offer, [10], ends.here, [0])
    with pytest.raises(ValueError, match=r"target blocks must be within 0\.\.11, got \[12\]"):
        ends.sink.pull(offer, [0], ends.here, [12])
    with pytest.raises(ValueError, match="cannot copy 1 blocks to 2 blocks"):
        ends.sink.pull(offer, [0], ends.here, [0, 1])
    assert not np.asarray(ends.here).any()


def test_a_copy_between_other_memories_is_rejected_with_what_differs() -> None:
    kv = np.zeros((LAYERS, 2, 6, HEADS, BLOCK, DIM), np.float32)
    with pytest.raises(ValueError, match="too small for a KV block of 1536 bytes"):
        kv_array(memoryview(bytes(100)), kv.shape)
    with pytest.raises(ValueError, match="cannot copy KV of shape"):
        Transfer(kv[:, :, :, :1], [0], kv, [0])
    with pytest.raises(ValueError, match="cannot copy KV of 2-byte numbers to 4-byte numbers"):
        Transfer(kv.astype(np.float16), [0], kv, [0])


def test_a_pull_from_a_gpu_never_blocks_and_completes_with_the_device() -> None:
    pytest.importorskip("cuda.bindings.driver")
    from tests.serving.emulated_gpu import EmulatedTransport

    cuda = FakeCuda(lazy=True)
    transport, endpoint = EmulatedTransport(cuda), private_endpoint(new_token(), "decode-0")
    source = transport.source("p", leases=1, kv_bytes=BYTES, epoch=1, lease_ms=60_000)
    sink = transport.sink(endpoint)
    here = torch.zeros(LAYERS, 2, TARGET_BLOCKS, HEADS, BLOCK, DIM)
    offer = Ends(source, sink, None, here, cuda, endpoint).offer()[1]
    transfer = sink.pull(offer, [0, 1, 4], here, [6, 7, 2])
    cuda.calls.clear()
    assert not transfer.step()
    assert [call[0] for call in cuda.calls] == ["launch", "query"]
    assert not transfer.settled
    assert not np.asarray(here).any()
    cuda.run()
    assert transfer.step()
    assert [call[0] for call in cuda.calls].count("launch") == 1, "nothing is copied twice"
    source.close()
    sink.close()


@dataclass
class Gpu:
    """A KV tensor of random numbers in an emulated GPU's memory, opened with the kernel that copies blocks."""

    cuda: FakeCuda
    memory: Any
    there: Any

    @classmethod
    def of(cls, *shape: int, kind: Any = np.float32) -> "Gpu":
        from ipc.memory.cuda import CudaMemory
        from tests.serving.emulated_gpu import compiled_block_copy

        cuda = FakeCuda()
        memory = CudaMemory.create(int(np.prod(shape)) * np.dtype(kind).itemsize, "cuda:0", cuda)
        memory.load(bytes(compiled_block_copy()), block_copy.KERNEL)
        raw = memoryview((ctypes.c_uint8 * memory.size).from_address(memory.address))
        there = np.frombuffer(raw, kind).reshape(shape)
        there[:] = np.random.default_rng(1).integers(0, 1000, shape)
        return cls(cuda, memory, there)

    def pull(self, here: Any, taken: list[int], given: list[int]) -> int:
        """Copy blocks to `here`; return the number of kernels launched for it."""
        self.cuda.calls.clear()
        assert DeviceTransfer(self.memory, taken, here, given).step()
        assert {call[0] for call in self.cuda.calls} == {"launch", "query"}
        return [call[0] for call in self.cuda.calls].count("launch")


@pytest.mark.parametrize("layers", [1, 40])
@pytest.mark.parametrize("order", ["in order", "scattered"])
def test_the_number_of_launches_depends_on_neither_layers_nor_runs(layers: int, order: str) -> None:
    pytest.importorskip("cuda.bindings.driver")
    gpu, count = Gpu.of(layers, 2, 700, 1, 8, 4), 600
    here = torch.zeros(layers, 2, 650, 1, 8, 4)
    taken, given = list(range(50, 650)), list(range(count))
    if order == "scattered":
        random = np.random.default_rng(2)
        taken, given = (random.permutation(size)[:count].tolist() for size in (700, 650))
    assert gpu.pull(here, taken, given) == 3, "one for each 256 blocks"
    assert np.array_equal(here[:, :, given].numpy(), gpu.there[:, :, taken])
    assert not here[:, :, sorted(set(range(650)) - set(given))].any()


def test_a_launch_copies_at_most_32_mib_of_whole_planes() -> None:
    pytest.importorskip("cuda.bindings.driver")
    gpu, here = Gpu.of(3, 2, 12, 8, 256, 128), torch.zeros(3, 2, 12, 8, 256, 128)
    assert gpu.pull(here, list(range(12)), list(range(11, -1, -1))) == 3, "12 MiB a plane, two planes a launch"
    assert np.array_equal(here.numpy()[:, :, ::-1], gpu.there)


@pytest.mark.parametrize(("heads", "block", "dim"), [(1, 8, 2), (3, 9, 16), (2, 16, 40), (5, 24, 72)])
def test_blocks_of_any_multiple_of_16_bytes_are_copied(heads: int, block: int, dim: int) -> None:
    pytest.importorskip("cuda.bindings.driver")
    random = np.random.default_rng(block)
    gpu, here = Gpu.of(5, 2, 23, heads, block, dim, kind=np.int16), torch.zeros(5, 2, 29, heads, block, dim)
    here = here.to(torch.int16)
    taken, given = random.permutation(23)[:17].tolist(), random.permutation(29)[:17].tolist()
    gpu.pull(here, taken, given)
    assert np.array_equal(here[:, :, given].numpy(), gpu.there[:, :, taken])
    assert not here[:, :, sorted(set(range(29)) - set(given))].any()


def test_blocks_of_other_sizes_are_rejected_on_a_gpu() -> None:
    pytest.importorskip("cuda.bindings.driver")
    with pytest.raises(ValueError, match="a KV block of 24 bytes is no multiple of 16 bytes"):
        Gpu.of(1, 2, 4, 1, 3, 2).pull(torch.zeros(1, 2, 4, 1, 3, 2), [0], [0])


def test_a_kernel_that_does_not_compile_is_a_configuration_error_at_the_start() -> None:
    pytest.importorskip("cuda.bindings.driver")
    from tests.serving.emulated_gpu import EmulatedTransport

    class Broken(EmulatedTransport):
        def _compile(self) -> bytes:
            raise DeviceError("the kernels do not compile for sm_90")

    with pytest.raises(ConfigError, match="KV hand-over to 'cpu': the kernels do not compile for sm_90"):
        Broken(FakeCuda()).sink(private_endpoint(new_token(), "decode-0"))


def test_too_little_gpu_memory_is_a_configuration_error_with_the_amount() -> None:
    pytest.importorskip("cuda.bindings.driver")
    from cuda.bindings import driver

    from tests.serving.emulated_gpu import EmulatedTransport

    class FullGpu(FakeCuda):
        def cuMemAlloc(self, size: int) -> tuple[Any, ...]:  # noqa: N802
            return (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0)

    with pytest.raises(ConfigError, match=r"8\.0 GiB of shareable KV memory on .*OUT_OF_MEMORY"):
        EmulatedTransport(FullGpu()).source("p", leases=1, kv_bytes=8 << 30, epoch=1, lease_ms=1)


def test_the_device_selects_the_transport() -> None:
    assert type(transport_for("cpu")) is Transport
    pytest.importorskip("cuda.bindings.driver")
    on_gpu = transport_for("cuda:0")
    assert isinstance(on_gpu, CudaTransport)
    assert (on_gpu.device, on_gpu.kernels) == ("cuda:0", "paged")
