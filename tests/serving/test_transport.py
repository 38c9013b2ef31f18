"""Contract tests of KV transports from prefill to decode: through host memory and from GPU to GPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ipc import HandoverSource, Offer, new_token, private_endpoint
from runtime.errors import ConfigError
from runtime.serving.kv.transport import CudaTransport, HostTransport, KvArray, KvSink, transport_for
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
    transport: Any = HostTransport()
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
    assert steps >= LAYERS
    here = np.asarray(ends.here)
    assert np.array_equal(here[:, :, given], ends.there[:, :, taken])
    assert not here[:, :, [1, 2, 6, 7, 8, 9, 10]].any()
    assert transfer.bytes == here[:, :, :5].nbytes
    assert transfer.busy_ns > 0
    assert ends.sink.is_current(offer)
    assert ends.sink.acknowledge(offer)
    assert ends.outcomes() == [(number, True, "")]


def test_blocks_of_a_released_lease_are_not_current_even_if_already_copied(ends: Ends) -> None:
    lease = ends.source.lease()
    assert lease is not None
    _, offer = ends.offer(lease)
    whole(ends.sink.pull(offer, [1], ends.here, [1]).step)
    assert ends.sink.is_current(offer)
    ends.source.release(lease)
    assert not ends.sink.is_current(offer)


def test_leases_are_limited_and_reusable(ends: Ends) -> None:
    first, second = ends.source.lease(), ends.source.lease()
    assert {first, second} == {0, 1}
    assert ends.source.lease() is None
    ends.source.release(first or 0)
    assert ends.source.free_leases == 1


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


def test_an_announcement_is_answered_and_has_no_lease(ends: Ends) -> None:
    number = ends.source.announce(ends.endpoint, b"room?")
    ends.sink.reject(ends.received(), "no room")
    assert ends.outcomes() == [(number, False, "no room")]
    assert ends.source.free_leases == 2


def test_out_of_range_blocks_are_rejected_before_anything_is_copied(ends: Ends) -> None:
    _, offer = ends.offer()
    with pytest.raises(ValueError, match=r"source blocks must be within 0\.\.9, got \[10\]"):
        ends.sink.pull(offer, [10], ends.here, [0])
    with pytest.raises(ValueError, match=r"target blocks must be within 0\.\.11, got \[12\]"):
        ends.sink.pull(offer, [0], ends.here, [12])
    with pytest.raises(ValueError, match="cannot copy 1 blocks to 2 blocks"):
        ends.sink.pull(offer, [0], ends.here, [0, 1])
    assert not np.asarray(ends.here).any()


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
    copies = [call for call in cuda.calls if call[0] == "on device"]
    assert len(copies) == LAYERS * 2 * 2, "K and V of a layer in two runs of blocks"
    assert len({stream for _, stream, _ in copies}) == 1
    assert not [call for call in cuda.calls if call[0] == "synchronise"]
    assert not transfer.settled
    cuda.run(len(copies) - 1)
    assert not transfer.step()
    cuda.run()
    assert transfer.step()
    assert len([call for call in cuda.calls if call[0] == "on device"]) == len(copies), "nothing is copied twice"
    source.close()
    sink.close()


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
    assert isinstance(transport_for("cpu"), HostTransport)
    pytest.importorskip("cuda.bindings.driver")
    on_gpu = transport_for("cuda:0")
    assert isinstance(on_gpu, CudaTransport)
    assert (on_gpu.device, on_gpu.kernels) == ("cuda:0", "paged")
