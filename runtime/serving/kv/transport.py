"""The two ways of KV from prefill to decode: through the host's memory, or from one GPU's memory into another's.

A worker on a CPU uses the first, one on a GPU the second. Both ends must use the same one; placement sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ipc import HandoverSink, IpcError, KvArena, Offer
from ipc.memory.device import CudaReference, DeviceMemory
from runtime.errors import ConfigError
from runtime.serving.kv.connector import KvSink, KvSource
from runtime.serving.kv.device_transfer import DeviceTransfer
from runtime.serving.kv.transfer import Transfer, kv_array

if TYPE_CHECKING:
    from runtime.serving.network.paged_cache import Kernels


class Transport(Protocol):
    """What a worker needs to know of its way: where its model is, how that computes, and its end of the hand-over."""

    @property
    def device(self) -> str:
        """torch's name of where the model and its KV are."""

    @property
    def kernels(self) -> Kernels:
        """See `LanguageModel.load`."""

    def source(self, name: str, *, leases: int, kv_bytes: int, epoch: int, lease_ms: float) -> KvSource:
        """Prefill's end: `leases` prompts at once, `kv_bytes` of memory. Raises ConfigError if it cannot be had."""

    def sink(self, endpoint: str) -> KvSink:
        """Decode's end."""


def transport_of(device: str) -> Transport:
    """The way of a worker on "cpu" or "cuda:N". Raises ConfigError."""
    return HostTransport() if device == "cpu" else CudaTransport(device)


class HostTransport:
    """Sources share memory of the host; sinks map it read-only and copy slice by slice."""

    device = "cpu"
    kernels: Kernels = "cpu"

    def source(self, name: str, *, leases: int, kv_bytes: int, epoch: int, lease_ms: float) -> KvSource:
        arena = KvArena.create(leases + 1, kv_bytes, epoch)
        return KvSource(name, arena, arena.payload, lease_ms=lease_ms)

    def sink(self, endpoint: str) -> KvSink:
        return KvSink(endpoint, _from_host)


def _from_host(sink: HandoverSink, offer: Offer, taken: Sequence[int], kv: Any, given: Sequence[int]) -> Transfer:
    return Transfer(kv_array(sink.memory(offer), kv.shape), taken, kv, given)


class CudaTransport:
    """Sources export memory of their GPU; sinks open it through CUDA IPC and copy device to device.

    The memory comes from the driver itself, because torch's allocator may hand out memory that cannot be exported. It
    is not given back before the process ends: who has it open might still be copying.
    """

    kernels: Kernels = "torch"

    def __init__(self, device: str) -> None:
        try:
            from ipc.memory.cuda import CudaMemory
        except IpcError as error:
            raise ConfigError(f"a model on {device!r}: {error}") from error
        self.device = device
        self._memory = CudaMemory

    def source(self, name: str, *, leases: int, kv_bytes: int, epoch: int, lease_ms: float) -> KvSource:
        try:
            memory = self._memory.create(kv_bytes, self.device)
            arena = KvArena.create_on(memory, leases + 1, epoch)
        except IpcError as error:
            raise ConfigError(f"{kv_bytes / 2**30:.1f} GiB of KV to share on {self.device!r}: {error}") from error
        return KvSource(name, arena, memory, lease_ms=lease_ms)

    def sink(self, endpoint: str) -> KvSink:
        return KvSink(endpoint, _from_device, self._open)

    def _open(self, reference: CudaReference) -> DeviceMemory:
        return self._memory.open(reference, self.device)


def _from_device(sink: HandoverSink, offer: Offer, taken: Sequence[int], kv: Any, given: Sequence[int]) -> Transfer:
    return DeviceTransfer(sink.device_memory(offer), taken, kv, given)
