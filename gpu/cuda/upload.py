"""Upload of an index to device memory: a check of free memory, then a copy in pinned chunks."""

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.cuda.driver import Driver
from gpu.errors import OutOfDeviceMemory
from gpu.index.data import IndexData

Arrays = Mapping[str, npt.NDArray[Any]]

CHUNK_BYTES = 16 << 20
STEP_BYTES = 1 << 20  # takes the host about 0.2 ms
_ALIGNMENT = 256
_KEPT_FREE = 64 << 20  # reserved for the driver: modules, graphs, printf and stacks


def device_arrays(data: IndexData) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an index that searches read on the device, by their names in `gpu.cuda.layout.COLLECTION`.

    Ids stay on the host, since results are row numbers.
    """
    return {"rows": data.rows.codes, "graph": data.graph, "seeds": data.seeds}


def padded_bytes(nbytes: int) -> int:
    """Return the size of an array on the device in bytes."""
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


def check_fits(driver: Driver, needed: Mapping[str, int]) -> None:
    """Raise OutOfDeviceMemory unless all of `needed` (bytes by name) fits into the device's free memory.

    The message lists needed and free bytes, and the arrays that would fit, smallest first.
    """
    free, total = driver.memory()
    usable = max(free - _KEPT_FREE, 0)
    required = {name: padded_bytes(nbytes) for name, nbytes in needed.items()}
    if sum(required.values()) <= usable:
        return
    fitting, left = [], usable
    for name in sorted(required, key=lambda name: required[name]):
        if required[name] <= left:
            left -= required[name]
            fitting.append(name)
    parts = ", ".join(f"{name} {nbytes}" for name, nbytes in required.items())
    raise OutOfDeviceMemory(
        f"{sum(required.values())} bytes are needed ({parts}), {usable} of {total} are free on {driver.name} "
        f"({_KEPT_FREE} more are reserved for the driver); what would fit: {', '.join(fitting) or 'none of it'}"
    )


class DeviceArrays:
    """Arrays in one allocation of device memory; `address[name]`: address of each, aligned to 256 bytes."""

    def __init__(self, driver: Driver, arrays: Arrays, *, in_steps: bool = False) -> None:
        """Copy `arrays`, which may be memory maps.

        in_steps: copy nothing here; each call of `step` copies a smaller chunk.
        Raises OutOfDeviceMemory, after freeing what was allocated.
        """
        self._driver = driver
        self._pending_stream = 0  # a stream
        sizes = {name: padded_bytes(array.nbytes) for name, array in arrays.items()}
        self._base = driver.allocate(sum(sizes.values()))
        self.address: dict[str, int] = {}
        address = self._base
        for name, size in sizes.items():
            self.address[name] = address
            address += size
        chunk_bytes = STEP_BYTES if in_steps else CHUNK_BYTES
        self._copying = _copy(driver, arrays, self.address, chunk_bytes)
        try:
            for _ in () if in_steps else self._copying:
                pass
        except BaseException:
            self.close()
            raise

    def step(self) -> bool:
        """Copy a chunk if the previous copy is complete, without waiting. Returns whether all is copied."""
        if self._pending_stream and not self._driver.idle(self._pending_stream):
            return False
        self._pending_stream = next(self._copying, 0)
        return not self._pending_stream

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._copying.close()
        if self._base:
            base, self._base = self._base, 0
            self._driver.free(base)


def _copy(driver: Driver, arrays: Arrays, address: Mapping[str, int], chunk_bytes: int) -> Generator[int, None, None]:
    """Copy with two pinned buffers, each with its own stream: one is filled while the other is copied.

    Yields a stream before synchronising with it, so that a caller that must not block can check whether it is idle.
    """
    chunk = min(chunk_bytes, max(array.nbytes for array in arrays.values()))
    buffers, streams = [], []
    try:
        for _ in range(2):
            buffers.append(driver.allocate_pinned(max(chunk, 1)))
            streams.append(driver.create_stream())
        current = 0
        for name, array in arrays.items():
            raw = array.reshape(-1).view(np.uint8)
            for begin in range(0, raw.nbytes, chunk):
                part = raw[begin : begin + chunk]
                yield streams[current]
                driver.synchronise(streams[current])
                buffers[current].view[: part.nbytes] = part
                driver.copy_to_device(streams[current], address[name] + begin, buffers[current].view[: part.nbytes])
                current = 1 - current
        for stream in streams:
            yield stream
            driver.synchronise(stream)
    finally:
        for stream in streams:
            driver.destroy_stream(stream)
        for buffer in buffers:
            driver.free_pinned(buffer)
