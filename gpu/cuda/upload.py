"""From the arrays of an index to device memory: measured against what is free first, then copied in pinned chunks."""

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.cuda.driver import Driver
from gpu.errors import OutOfDeviceMemory
from gpu.index.data import IndexData

Progress = Callable[[str, float], None]
Arrays = Mapping[str, npt.NDArray[Any]]

CHUNK_BYTES = 16 << 20
STEP_BYTES = 1 << 20  # for the host some .2 ms
_ALIGNMENT = 256
_KEPT_FREE = 64 << 20  # for the driver's own needs: modules, graphs, printf and stacks


def device_arrays(data: IndexData) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an index that a search reads on the device, by their names in `gpu.cuda.layout.COLLECTION`.

    Ids stay on the host: results come back as row numbers. Sketches are left out: see `layout.without_sketch`.
    """
    arrays: dict[str, npt.NDArray[Any]] = {"rows": data.rows.codes, "graph": data.graph, "seeds": data.seeds}
    if data.rows.full is not None:
        arrays["full"] = data.rows.full
    return arrays


def padded_bytes(nbytes: int) -> int:
    """Bytes that an array takes on the device."""
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


def check_fits(driver: Driver, needed: Mapping[str, int]) -> None:
    """Raise OutOfDeviceMemory unless all of `needed` (bytes by what they are for) fits beside what is there.

    The message lists needed and free bytes, and which of them would fit, smallest first.
    """
    free, total = driver.memory()
    usable = max(free - _KEPT_FREE, 0)
    wanted = {name: padded_bytes(nbytes) for name, nbytes in needed.items()}
    if sum(wanted.values()) <= usable:
        return
    fitting, left = [], usable
    for name in sorted(wanted, key=lambda name: wanted[name]):
        if wanted[name] <= left:
            left -= wanted[name]
            fitting.append(name)
    parts = ", ".join(f"{name} {nbytes}" for name, nbytes in wanted.items())
    raise OutOfDeviceMemory(
        f"{sum(wanted.values())} bytes are needed ({parts}), {usable} of {total} are free on {driver.name} "
        f"({_KEPT_FREE} more are kept for the driver); what would fit: {', '.join(fitting) or 'none of it'}"
    )


class DeviceArrays:
    """Arrays in one piece of device memory; `address[name]` is where each begins, on a multiple of 256 bytes."""

    def __init__(
        self, driver: Driver, arrays: Arrays, progress: Progress | None = None, *, in_steps: bool = False
    ) -> None:
        """Copy `arrays`, any of which may be a memory map. progress: called with a name and the part of it done, 0..1.
        in_steps: nothing is copied but by `step`, in smaller chunks.

        Raises OutOfDeviceMemory; what was allocated is given back then.
        """
        self._driver = driver
        self._waits_for = 0  # a stream
        sizes = {name: padded_bytes(array.nbytes) for name, array in arrays.items()}
        self.nbytes = sum(sizes.values())
        self._base = driver.allocate(self.nbytes)
        self.address: dict[str, int] = {}
        place = self._base
        for name, size in sizes.items():
            self.address[name] = place
            place += size
        chunk_bytes = STEP_BYTES if in_steps else CHUNK_BYTES
        self._copying = _copy(driver, arrays, self.address, progress or (lambda name, fraction: None), chunk_bytes)
        try:
            for _ in () if in_steps else self._copying:
                pass
        except BaseException:
            self.close()
            raise

    def step(self) -> bool:
        """Copy a chunk, if the device has taken the one before; never waits for it. Whether all is there."""
        if self._waits_for and not self._driver.idle(self._waits_for):
            return False
        self._waits_for = next(self._copying, 0)
        return not self._waits_for

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._copying.close()
        if self._base:
            base, self._base = self._base, 0
            self._driver.free(base)


def _copy(
    driver: Driver, arrays: Arrays, address: Mapping[str, int], progress: Progress, chunk_bytes: int
) -> Generator[int, None, None]:
    """Two pinned buffers take turns, each with a stream: one is filled from the file while the other is copied.

    Yields a stream before it waits for that, so that whoever must not wait can look whether it is idle first.
    """
    chunk = min(chunk_bytes, max(array.nbytes for array in arrays.values()))
    buffers, streams = [], []
    try:
        for _ in range(2):
            buffers.append(driver.allocate_pinned(max(chunk, 1)))
            streams.append(driver.create_stream())
        turn = 0
        for name, array in arrays.items():
            raw = array.reshape(-1).view(np.uint8)
            progress(name, 0.0)
            for begin in range(0, raw.nbytes, chunk):
                part = raw[begin : begin + chunk]
                yield streams[turn]
                driver.synchronise(streams[turn])
                buffers[turn].view[: part.nbytes] = part
                driver.copy_to_device(streams[turn], address[name] + begin, buffers[turn].view[: part.nbytes])
                turn = 1 - turn
                progress(name, (begin + part.nbytes) / raw.nbytes)
        for stream in streams:
            yield stream
            driver.synchronise(stream)
    finally:
        for stream in streams:
            driver.destroy_stream(stream)
        for buffer in buffers:
            driver.free_pinned(buffer)
