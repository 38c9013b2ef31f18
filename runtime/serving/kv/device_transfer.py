"""Copies of KV blocks out of another process's GPU memory: put on a stream, and done when the device says so."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ipc import IpcError
from ipc.memory.device import DeviceMemory, DeviceSpan
from runtime.serving.kv.transfer import Run, Transfer, kv_shape

if TYPE_CHECKING:
    import torch


class DeviceTransfer(Transfer):
    """A `Transfer` by the copy engines: `step` queues slices and asks whether all are done, and waits for nothing.

    The stream is `memory`'s own, so the model's kernels go on beside it. Nothing orders the two, and nothing must: the
    target's blocks are not in use by any kernel when a copy is begun (a forward pass has ended when it returns), nor
    before all of it is seen to be done; and who gives a copy up keeps its blocks until it is `settled`.

    A run of blocks is two copies a layer, K and V: some microseconds of the host each.
    """

    def __init__(
        self, memory: DeviceMemory, taken: Sequence[int], target: "torch.Tensor", given: Sequence[int]
    ) -> None:
        source = kv_shape(memory.size, target.shape)
        if not target.is_contiguous():
            raise ValueError(f"the KV tensor of shape {tuple(target.shape)} is not contiguous")
        self._memory, self._address = memory, target.data_ptr()
        self._plan(source, taken, tuple(target.shape), given)
        self._strides = source[2], int(target.shape[2])
        self._side_bytes = 4 * int(np.prod(target.shape[3:]))
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
