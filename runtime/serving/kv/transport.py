"""KV transport from prefill (`HandoverSource`) to decode (`KvSink`), through host memory or CUDA IPC.

```
prefill (HandoverSource)                                decode (KvSink)
  memory: holds the KV         ◀── mapped by the sink ──
  lease() ─▶ one of a few                                  receive()
  offer(endpoint, lease, message) ────────────────▶        … reserves blocks …
                                                           pull(offer, …) ─▶ Transfer: step, step, step
                                                           current(offer)? the copy is valid
  poll() ◀──────────────────── accepted or not ────        acknowledge(offer) | reject(offer, reason)
  release(lease): blocks may be overwritten
```
A lease covers all blocks of one prompt: they are not overwritten until it is released. A prompt that decode computes
is announced: that carries no memory. A prompt of several passes is also offered after the first pass: decode pulls the
part that is `written` meanwhile.
`withdraw` revokes an offer; a pull in progress is then no longer current.

The two transports differ in the memory that holds KV: host memory, or memory of a GPU that is copied to another GPU
through CUDA IPC. Workers on CPUs use the first, workers on GPUs the second. Both ends must use the same one; placement
ensures it. The protocol (offers, leases, withdrawal, staleness) is the same for both: `ipc.handover.messages`.

KV arrays are [layers, 2, blocks, kv_heads, block_tokens, head_dim], float32 in host memory and of the model's type on a
GPU: the tensor of a model or of another process. Copies are in slices, so that the caller can do other work in between.
A `Transfer` through host memory copies layer by layer, at most 1 MiB a slice; blocks of a slice that are adjacent on
both sides are copied at once. A `DeviceTransfer` launches one kernel a slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from gpu import DeviceError
from gpu.cuda import block_copy
from ipc import HandoverSink, HandoverSource, IpcError, KvArena, Offer
from ipc.handover.source import LEASE_MS
from ipc.memory.device import CudaReference, DeviceMemory
from runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ipc.memory.cuda import CudaMemory
    from runtime.serving.model.model_info import Kernels

_SLICE_BYTES = 1 << 20
_DEVICE_SLICE_BYTES = 32 << 20  # 16 µs of an H200's memory; .1 ms of NVLink


# ---- block copies in slices


class KvArray(Protocol):
    """Interface of numpy arrays and torch tensors that copying uses, so that torch is not imported for numpy."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def itemsize(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


def kv_array(memory: memoryview, shape: Sequence[int]) -> NDArray[np.float32]:
    """Return a float32 KV array over `memory`, with `shape[2]` replaced by the number of blocks that it holds. Raises
    ValueError if it holds none."""
    fitted = kv_shape(memory.nbytes, shape, 4)
    return np.frombuffer(memory, np.float32, count=int(np.prod(fitted))).reshape(fitted)


def kv_shape(nbytes: int, shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Return `shape` with the number of blocks that `nbytes` bytes hold. Raises ValueError if they hold none."""
    block_bytes = item_bytes * int(np.prod([*shape[:2], *shape[3:]]))
    blocks = nbytes // block_bytes
    if blocks == 0:
        raise ValueError(f"memory of {nbytes} bytes is too small for a KV block of {block_bytes} bytes")
    return (*shape[:2], blocks, *shape[3:])


class Run(NamedTuple):
    """Blocks that are adjacent in source and target: first source block, first target block, number of blocks."""

    source: int
    target: int
    blocks: int


class Transfer:
    """Copies the blocks `source_blocks` of one KV array to the blocks `target_blocks` of another. `step` until `done`.

    A slice is copied completely when `step` returns. Raises ValueError for arrays of different models or types, and for
    invalid block numbers.
    """

    def __init__(
        self, source: KvArray, source_blocks: Sequence[int], target: KvArray, target_blocks: Sequence[int]
    ) -> None:
        if source.itemsize != target.itemsize:
            raise ValueError(f"cannot copy KV of {source.itemsize}-byte numbers to {target.itemsize}-byte numbers")
        self._check(tuple(source.shape), source_blocks, target, target_blocks)
        self._source, self._target = source, target
        slice_blocks = max(1, _SLICE_BYTES // (2 * self._side_bytes))
        parts = [
            list(_runs(source_blocks[begin : begin + slice_blocks], target_blocks[begin : begin + slice_blocks]))
            for begin in range(0, len(source_blocks), slice_blocks)
        ]
        self._slices: list[Callable[[], None]] = [
            partial(self._copy_runs, layer, runs) for layer in range(target.shape[0]) for runs in parts
        ]

    def _check(
        self, source_shape: tuple[int, ...], source_blocks: Sequence[int], target: KvArray, target_blocks: Sequence[int]
    ) -> None:
        shape = tuple(target.shape)
        if source_shape[:2] + source_shape[3:] != shape[:2] + shape[3:]:
            raise ValueError(f"cannot copy KV of shape {source_shape} to shape {shape}")
        if len(source_blocks) != len(target_blocks):
            raise ValueError(f"cannot copy {len(source_blocks)} blocks to {len(target_blocks)} blocks")
        for name, blocks, count in (("source", source_blocks, source_shape[2]), ("target", target_blocks, shape[2])):
            if blocks and not 0 <= min(blocks) <= max(blocks) < count:
                raise ValueError(f"{name} blocks must be within 0..{count - 1}, got {sorted(blocks)}")
        self._side_bytes = target.itemsize * int(np.prod(shape[3:]))  # K or V of a block in one layer
        self._next = 0
        self.bytes = len(source_blocks) * 2 * self._side_bytes * shape[0]
        self.busy_ns = 0

    @property
    def done(self) -> bool:
        """Whether the copy is complete. May raise IpcError."""
        return self._next == len(self._slices)

    @property
    def settled(self) -> bool:
        """Whether no write is in flight, so that the target blocks of an aborted copy can be freed."""
        return True

    def settle(self) -> None:
        """Wait until `settled`."""

    def step(self, for_ns: int | None = None, clock: Callable[[], int] = time.monotonic_ns) -> bool:
        """Copy for about `for_ns`, at least one slice (None: the rest). Return whether the copy is complete.

        May raise IpcError.
        """
        begin_ns = clock()
        while self._next < len(self._slices):
            self._slices[self._next]()
            self._next += 1
            if for_ns is not None and clock() - begin_ns >= for_ns:
                break
        self.busy_ns += clock() - begin_ns
        return self.done

    def _copy_runs(self, layer: int, runs: Sequence[Run]) -> None:
        source, target = self._source[layer], self._target[layer]
        for first_source, first_target, count in runs:
            for side in (0, 1):  # K and V: each is contiguous in source and target
                target[side, first_target : first_target + count] = source[side, first_source : first_source + count]


def _runs(source: Sequence[int], target: Sequence[int]) -> Iterator[Run]:
    begin = 0
    for end in range(1, len(source) + 1):
        if end == len(source) or (source[end], target[end]) != (source[end - 1] + 1, target[end - 1] + 1):
            yield Run(source[begin], target[begin], end - begin)
            begin = end


class DeviceTransfer(Transfer):
    """A `Transfer` by a kernel: `step` launches one for each slice, polls for completion and never blocks.

    A slice is at most 32 MiB and 256 blocks, whose list is the kernel's argument, in as many layers as fit. The floor
    is one read and one write of each byte, and a launch for each slice, whatever the number of layers and however the
    blocks are scattered: four for 128 MiB, plus a query for each step. A driver call for each run of blocks, layer and
    side took 26 times as long as a plain copy for blocks in order and 82 times for scattered ones (H200, 128 MiB), all
    of it host time. `cuMemcpyBatchAsync` would need no kernel, but reportedly it does not merge copies within one GPU
    (NVIDIA/nccl#1932), and copy engines have a twentieth of a kernel's bandwidth there (NVIDIA/nccl#2177).

    It uses `memory`'s own stream, concurrently with the model's kernels. The streams need no ordering: no kernel uses
    the target blocks when a copy starts (a forward pass is complete when it returns) or before the copy is seen to be
    complete, and the owner of an aborted copy keeps its blocks until it is `settled`.
    """

    def __init__(
        self, memory: CudaMemory, source_blocks: Sequence[int], target: torch.Tensor, target_blocks: Sequence[int]
    ) -> None:
        """`memory` has the kernel loaded. Also raises ValueError for blocks that are no multiple of 16 bytes."""
        source = kv_shape(memory.size, target.shape, target.itemsize)
        if not target.is_contiguous():
            raise ValueError(f"the KV tensor of shape {tuple(target.shape)} is not contiguous")
        self._check(source, source_blocks, target, target_blocks)
        if self._side_bytes % block_copy.CHUNK_BYTES:
            raise ValueError(f"a KV block of {self._side_bytes} bytes is no multiple of {block_copy.CHUNK_BYTES} bytes")
        self._memory, self._address = memory, target.data_ptr()
        self._strides = source[2], int(target.shape[2])
        self._blocks, planes = (source_blocks, target_blocks), 2 * int(target.shape[0])
        count = block_copy.MAX_BLOCKS
        at_once = max(1, _DEVICE_SLICE_BYTES // (self._side_bytes * min(count, max(1, len(source_blocks)))))
        self._slices = [
            partial(self._launch, first, min(at_once, planes - first), slice(begin, begin + count))
            for begin in range(0, len(source_blocks), count)
            for first in range(0, planes, at_once)
        ]
        self._began_ns: int | None = None

    @property
    def done(self) -> bool:
        return super().done and self._memory.idle()

    @property
    def settled(self) -> bool:
        with suppress(IpcError):  # a failed device does not write any more
            return self._memory.idle()
        return True

    def settle(self) -> None:
        with suppress(IpcError):
            self._memory.flush()

    def step(self, for_ns: int | None = None, clock: Callable[[], int] = time.monotonic_ns) -> bool:
        """Launch for about `for_ns`; return whether the copy is complete. `busy_ns` counts from the first step."""
        if self._began_ns is None:
            self._began_ns = clock()
        done = super().step(for_ns, clock)
        self.busy_ns = clock() - self._began_ns
        return done

    def _launch(self, first_plane: int, planes: int, part: slice) -> None:
        size, strides = self._side_bytes, self._strides
        source, target = (
            base + first_plane * blocks * size
            for base, blocks in zip((self._memory.address, self._address), strides, strict=True)
        )
        source_blocks, target_blocks = (blocks[part] for blocks in self._blocks)
        copy = block_copy.BlockCopy.of(source, target, strides, size, planes, source_blocks, target_blocks)
        self._memory.launch(block_copy.KERNEL, copy.grid, block_copy.THREADS, copy)


# ---- sinks and transports


class KvSink(HandoverSink):
    """Decode's end of the transport. Single-threaded and non-blocking."""

    def pull(self, offer: Offer, source_blocks: Sequence[int], kv: Any, target_blocks: Sequence[int]) -> Transfer:
        """Return a copy of the offered memory's blocks to blocks of `kv`. Raises IpcError, ValueError."""
        if self.on_device:
            memory = cast("CudaMemory", self.device_memory(offer))  # opened by `CudaTransport`
            return DeviceTransfer(memory, source_blocks, kv, target_blocks)
        return Transfer(kv_array(self.memory(offer), kv.shape), source_blocks, kv, target_blocks)


class Transport:
    """KV transport of a worker: the device and kernels of its model, and the factories of both ends. This one is
    through shared host memory, which sinks map read-only and copy slice by slice."""

    device = "cpu"
    """torch device name of the model and its KV."""
    kernels: Kernels = "cpu"
    """See `LanguageModel.load`."""

    def source(
        self, name: str, *, leases: int, kv_bytes: int, epoch: int, lease_ms: float = LEASE_MS
    ) -> HandoverSource:
        """Create prefill's end, for `leases` prompts at once and `kv_bytes` of memory. Raises ConfigError if allocation
        fails."""
        arena = KvArena.create(leases + 1, kv_bytes, epoch)
        return HandoverSource(name, arena, lease_ms=lease_ms)

    def sink(self, endpoint: str) -> KvSink:
        """Create decode's end."""
        return KvSink(endpoint)


def transport_for(device: str) -> Transport:
    """Return the transport for a worker on "cpu" or "cuda:N". Raises ConfigError."""
    return Transport() if device == "cpu" else CudaTransport(device)


class CudaTransport(Transport):
    """Transport through CUDA IPC: sources export memory of their GPU, sinks open it and copy device to device.

    The memory is allocated from the driver, because memory of torch's allocator cannot always be exported. It is not
    freed before the process ends, because a process that has it open may still be copying.
    """

    kernels: Kernels = "paged"

    def __init__(self, device: str) -> None:
        try:
            from ipc.memory.cuda import CudaMemory
        except IpcError as error:
            raise ConfigError(f"a model on {device!r}: {error}") from error
        self.device = device
        self._memory = CudaMemory

    def source(
        self, name: str, *, leases: int, kv_bytes: int, epoch: int, lease_ms: float = LEASE_MS
    ) -> HandoverSource:
        try:
            memory = self._memory.create(kv_bytes, self.device)
            arena = KvArena.create_on(memory, leases + 1, epoch)
        except IpcError as error:
            raise ConfigError(
                f"cannot allocate {kv_bytes / 2**30:.1f} GiB of shareable KV memory on {self.device!r}: {error}"
            ) from error
        return HandoverSource(name, arena, lease_ms=lease_ms)

    def sink(self, endpoint: str) -> KvSink:
        """Also raises ConfigError if the kernel that copies blocks cannot be compiled."""
        try:
            image = self._compile()
        except (DeviceError, IpcError) as error:
            raise ConfigError(f"KV hand-over to {self.device!r}: {error}") from error

        def open_with_kernel(reference: CudaReference) -> DeviceMemory:
            memory = self._memory.open(reference, self.device)
            memory.load(image, block_copy.KERNEL)
            return memory

        return KvSink(endpoint, open_with_kernel)

    def _compile(self) -> bytes:
        from ipc.memory.cuda import architecture

        return block_copy.compile_block_copy(architecture(self.device))
