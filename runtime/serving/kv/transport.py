"""KV's way from prefill to decode: its two ends, `KvSource` and `KvSink`, and the two ways that there are.

```
prefill (KvSource)                                      decode (KvSink)
  memory: KV lies here         ◀── mapped by the sink ──
  lease() ─▶ one of a few                                  receive()
  offer(endpoint, lease, message) ────────────────▶        … finds room …
                                                           pull(offer, …) ─▶ Transfer: step, step, step
                                                           current(offer)? the copy is whole
  poll() ◀──────────────────── accepted or not ────        acknowledge(offer) | reject(offer, reason)
  release(lease): blocks may be written anew
```
A lease covers all blocks of one prompt: until it is released they are not written. In order "decode first" an
announcement goes ahead of the offer; it has no memory to pull, its acknowledgement means that there is room.
`withdraw` takes an offer back; what is being pulled then is no longer current.

The ways differ in whose memory KV lies in: the host's, or one GPU's, from which it is copied into another's through
CUDA IPC. A worker on a CPU uses the first, one on a GPU the second; both ends must use the same one, and placement
sees to that. What is said, leased, withdrawn or found stale is the same, and is `ipc.handover.messages`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ipc import HandoverSink, HandoverSource, IpcError, KvArena, Offer
from ipc.handover.arena import OpenDevice
from ipc.memory.device import CudaArray, CudaReference, DeviceMemory
from runtime.errors import ConfigError
from runtime.serving.kv.device_transfer import DeviceTransfer
from runtime.serving.kv.transfer import KvArray, Transfer, kv_array

if TYPE_CHECKING:
    from runtime.serving.network.paged_cache import Kernels


class KvSource(HandoverSource):
    """Prefill's end. One thread; nothing blocks.

    memory: where the model's KV tensor must lie, the arena's payload. The arena's slots are the leases, and one more
    that announcements are made with.
    """

    def __init__(self, name: str, arena: KvArena, memory: memoryview | CudaArray, *, lease_ms: float) -> None:
        super().__init__(name, arena, lease_ms=lease_ms)
        self.memory = memory
        self._announcing = arena.slots - 1  # never begun anew
        self._free = list(range(self._announcing))

    def lease(self) -> int | None:
        """A lease for one prompt's blocks, or None while all are out."""
        return self._free.pop() if self._free else None

    def release(self, lease: int) -> None:
        """The prompt's blocks may be written anew; whoever still pulls them finds that out."""
        self._arena.begin(lease)
        self._free.append(lease)

    @property
    def free_leases(self) -> int:
        """Leases that are not out."""
        return len(self._free)

    def announce(self, endpoint: str, message: bytes) -> int:
        """Ask the sink at `endpoint` to keep room; the id of the outcome."""
        return self.offer(endpoint, self._announcing, message)


Pull = Callable[[HandoverSink, Offer, Sequence[int], KvArray, Sequence[int]], Transfer]
"""How blocks are pulled out of an arena: see `KvSink.pull`."""


class KvSink(HandoverSink):
    """Decode's end. One thread; nothing blocks."""

    def __init__(self, endpoint: str, pull: Pull, open_device: OpenDevice | None = None) -> None:
        super().__init__(endpoint, open_device)
        self._pull = pull

    def pull(self, offer: Offer, taken: Sequence[int], kv: KvArray, given: Sequence[int]) -> Transfer:
        """The copy of the source's blocks `taken` into `given` of `kv`. Raises IpcError, ValueError."""
        return self._pull(self, offer, taken, kv, given)


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
