"""KV's way from prefill to decode: its two ends, `HandoverSource` and `KvSink`, and the two ways that there are.

```
prefill (HandoverSource)                                decode (KvSink)
  memory: KV lies here         ◀── mapped by the sink ──
  lease() ─▶ one of a few                                  receive()
  offer(endpoint, lease, message) ────────────────▶        … finds room …
                                                           pull(offer, …) ─▶ Transfer: step, step, step
                                                           current(offer)? the copy is whole
  poll() ◀──────────────────── accepted or not ────        acknowledge(offer) | reject(offer, reason)
  release(lease): blocks may be written anew
```
A lease covers all blocks of one prompt: until it is released they are not written. In order "decode first" an
announcement goes ahead of the offer; it has no memory to pull, its acknowledgement means that there is room. A prompt
of several passes is offered after the first one, too: decode pulls what is `written` of it meanwhile.
`withdraw` takes an offer back; what is being pulled then is no longer current.

The ways differ in whose memory KV lies in: the host's, or one GPU's, from which it is copied into another's through
CUDA IPC. A worker on a CPU uses the first, one on a GPU the second; both ends must use the same one, and placement
sees to that. What is said, leased, withdrawn or found stale is the same, and is `ipc.handover.messages`'s.

KV arrays are [layers, 2, blocks, kv_heads, block_tokens, head_dim], float32 in the host's memory and of a model's own
type on a GPU: a model's tensor, the same in another process's memory, or a tier's. A copy (`Transfer`) goes layer by
layer, as a model reads them, and within a layer in slices of at most 1 MiB, so that who copies can do something else
in between. In a slice blocks that lie one behind the other on both sides are copied in one go, straight from there to
here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ipc import HandoverSink, HandoverSource, IpcError, KvArena, Offer
from ipc.memory.device import CudaReference, DeviceMemory, DeviceSpan
from runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from runtime.serving.model.model_info import Kernels

_SLICE_BYTES = 1 << 20


# ---- copies of blocks, slice by slice


class KvArray(Protocol):
    """A numpy array or a torch tensor: what copying needs of either, so that neither is imported for the other."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def itemsize(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


def kv_array(memory: memoryview, shape: Sequence[int]) -> NDArray[np.float32]:
    """float32 KV in someone's memory; `shape[2]` is replaced by as many blocks as it has. Raises ValueError if it has
    none."""
    there = kv_shape(memory.nbytes, shape, 4)
    return np.frombuffer(memory, np.float32, count=int(np.prod(there))).reshape(there)


def kv_shape(nbytes: int, shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """`shape` with as many blocks as so many bytes hold. Raises ValueError if they hold none."""
    block_bytes = item_bytes * int(np.prod([*shape[:2], *shape[3:]]))
    blocks = nbytes // block_bytes
    if blocks == 0:
        raise ValueError(f"a memory of {nbytes} bytes holds no KV block of {block_bytes}")
    return (*shape[:2], blocks, *shape[3:])


class Run(NamedTuple):
    """Blocks that lie one behind the other on both sides: where in the source, where in the target, how many."""

    taken: int
    given: int
    blocks: int


class Transfer:
    """One copy, of `source`'s blocks `taken` to `target`'s blocks `given`, in that order. `step` until `done`.

    Each slice is copied when `step` returns. Raises ValueError for arrays of different models or types, and for blocks
    that one of them does not have.
    """

    def __init__(self, source: KvArray, taken: Sequence[int], target: KvArray, given: Sequence[int]) -> None:
        self._source, self._target = source, target
        if source.itemsize != target.itemsize:
            raise ValueError(f"KV of {source.itemsize} bytes a number does not fit into one of {target.itemsize}")
        self._plan(tuple(source.shape), taken, target, given)

    def _plan(self, source: tuple[int, ...], taken: Sequence[int], into: KvArray, given: Sequence[int]) -> None:
        target = tuple(into.shape)
        if source[:2] + source[3:] != target[:2] + target[3:]:
            raise ValueError(f"KV of shape {source} does not fit into {target}")
        if len(taken) != len(given):
            raise ValueError(f"{len(taken)} blocks to copy into {len(given)}")
        for name, blocks, shape in (("source", taken, source), ("target", given, target)):
            if blocks and not 0 <= min(blocks) <= max(blocks) < shape[2]:
                raise ValueError(f"the {name} has blocks 0..{shape[2] - 1}, asked for {sorted(blocks)}")
        block_bytes = into.itemsize * int(np.prod([2, *target[3:]]))  # of one layer
        each = max(1, _SLICE_BYTES // block_bytes)
        parts = [
            list(_runs(taken[begin : begin + each], given[begin : begin + each]))
            for begin in range(0, len(taken), each)
        ]
        self._slices = [(layer, runs) for layer in range(target[0]) for runs in parts]
        self._next = 0
        self.bytes = len(taken) * block_bytes * target[0]
        self.busy_ns = 0

    @property
    def done(self) -> bool:
        """Whether all is copied. May raise IpcError."""
        return self._next == len(self._slices)

    @property
    def settled(self) -> bool:
        """Whether nothing is being written just now: blocks of a copy that is given up are free from then on."""
        return True

    def settle(self) -> None:
        """Wait until it is."""

    def step(self, for_ns: int | None = None, clock: Callable[[], int] = time.monotonic_ns) -> bool:
        """Copy for about `for_ns`, at least one slice (None: all that is left); whether all is copied now.

        May raise IpcError.
        """
        begin_ns = clock()
        while self._next < len(self._slices):
            self._copy(*self._slices[self._next])
            self._next += 1
            if for_ns is not None and clock() - begin_ns >= for_ns:
                break
        self.busy_ns += clock() - begin_ns
        return self.done

    def _copy(self, layer: int, runs: Sequence[Run]) -> None:
        source, target = self._source[layer], self._target[layer]
        for taken, given, count in runs:
            for side in (0, 1):  # each is one piece of memory, there and here
                target[side, given : given + count] = source[side, taken : taken + count]


def _runs(taken: Sequence[int], given: Sequence[int]) -> Iterator[Run]:
    begin = 0
    for end in range(1, len(taken) + 1):
        if end == len(taken) or (taken[end], given[end]) != (taken[end - 1] + 1, given[end - 1] + 1):
            yield Run(taken[begin], given[begin], end - begin)
            begin = end


class DeviceTransfer(Transfer):
    """A `Transfer` by the copy engines: `step` queues slices and asks whether all are done, and waits for nothing.

    The stream is `memory`'s own, so the model's kernels go on beside it. Nothing orders the two, and nothing must: the
    target's blocks are not in use by any kernel when a copy is begun (a forward pass has ended when it returns), nor
    before all of it is seen to be done; and who gives a copy up keeps its blocks until it is `settled`.

    A run of blocks is two copies a layer, K and V: some microseconds of the host each.
    """

    def __init__(self, memory: DeviceMemory, taken: Sequence[int], target: torch.Tensor, given: Sequence[int]) -> None:
        source = kv_shape(memory.size, target.shape, target.itemsize)
        if not target.is_contiguous():
            raise ValueError(f"the KV tensor of shape {tuple(target.shape)} is not contiguous")
        self._memory, self._address = memory, target.data_ptr()
        self._plan(source, taken, target, given)
        self._strides = source[2], int(target.shape[2])
        self._side_bytes = target.itemsize * int(np.prod(target.shape[3:]))
        self._began_ns: int | None = None

    @property
    def done(self) -> bool:
        return super().done and self._memory.idle()

    @property
    def settled(self) -> bool:
        with suppress(IpcError):  # a device at fault writes nothing any more
            return self._memory.idle()
        return True

    def settle(self) -> None:
        with suppress(IpcError):
            self._memory.flush()

    def step(self, for_ns: int | None = None, clock: Callable[[], int] = time.monotonic_ns) -> bool:
        """Queue for about `for_ns`; whether all is copied now. `busy_ns` is the time since the first step."""
        if self._began_ns is None:
            self._began_ns = clock()
        done = super().step(for_ns, clock)
        self.busy_ns = clock() - self._began_ns
        return done

    def _copy(self, layer: int, runs: Sequence[Run]) -> None:
        size, (source_blocks, target_blocks) = self._side_bytes, self._strides
        for side in (2 * layer, 2 * layer + 1):
            source, target = side * source_blocks, self._address + side * target_blocks * size
            for taken, given, count in runs:
                self._memory.read((source + taken) * size, DeviceSpan(target + given * size, count * size))


# ---- the two ends, and the two ways


class KvSink(HandoverSink):
    """Decode's end. One thread; nothing blocks."""

    def pull(self, offer: Offer, taken: Sequence[int], kv: Any, given: Sequence[int]) -> Transfer:
        """The copy of the source's blocks `taken` into `given` of `kv`. Raises IpcError, ValueError."""
        if self.on_device:
            return DeviceTransfer(self.device_memory(offer), taken, kv, given)
        return Transfer(kv_array(self.memory(offer), kv.shape), taken, kv, given)


class Transport(Protocol):
    """What a worker needs to know of its way: where its model is, how that computes, and its end of the hand-over."""

    @property
    def device(self) -> str:
        """torch's name of where the model and its KV are."""

    @property
    def kernels(self) -> Kernels:
        """See `LanguageModel.load`."""

    def source(self, name: str, *, leases: int, kv_bytes: int, epoch: int, lease_ms: float) -> HandoverSource:
        """Prefill's end: `leases` prompts at once, `kv_bytes` of memory. Raises ConfigError if it cannot be had."""

    def sink(self, endpoint: str) -> KvSink:
        """Decode's end."""


def transport_for(device: str) -> Transport:
    """The way of a worker on "cpu" or "cuda:N". Raises ConfigError."""
    return HostTransport() if device == "cpu" else CudaTransport(device)


class HostTransport:
    """Sources share memory of the host; sinks map it read-only and copy slice by slice."""

    device = "cpu"
    kernels: Kernels = "cpu"

    def source(self, name: str, *, leases: int, kv_bytes: int, epoch: int, lease_ms: float) -> HandoverSource:
        arena = KvArena.create(leases + 1, kv_bytes, epoch)
        return HandoverSource(name, arena, lease_ms=lease_ms)

    def sink(self, endpoint: str) -> KvSink:
        return KvSink(endpoint)


class CudaTransport:
    """Sources export memory of their GPU; sinks open it through CUDA IPC and copy device to device.

    The memory comes from the driver itself, because torch's allocator may hand out memory that cannot be exported. It
    is not given back before the process ends: who has it open might still be copying.
    """

    kernels: Kernels = "paged"

    def __init__(self, device: str) -> None:
        try:
            from ipc.memory.cuda import CudaMemory
        except IpcError as error:
            raise ConfigError(f"a model on {device!r}: {error}") from error
        self.device = device
        self._memory = CudaMemory

    def source(self, name: str, *, leases: int, kv_bytes: int, epoch: int, lease_ms: float) -> HandoverSource:
        try:
            memory = self._memory.create(kv_bytes, self.device)
            arena = KvArena.create_on(memory, leases + 1, epoch)
        except IpcError as error:
            raise ConfigError(f"{kv_bytes / 2**30:.1f} GiB of KV to share on {self.device!r}: {error}") from error
        return HandoverSource(name, arena, lease_ms=lease_ms)

    def sink(self, endpoint: str) -> KvSink:
        return KvSink(endpoint, self._open)

    def _open(self, reference: CudaReference) -> DeviceMemory:
        return self._memory.open(reference, self.device)
