"""Times on a device: of a copy, and of each kernel of an extend, between CUDA events.

Kernels are launched separately, not replayed, so gaps between them are not included.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.devices import CPU

if TYPE_CHECKING:
    from gpu.cuda.engine import CudaEngine

_HOST_BYTES, _DEVICE_BYTES = 256 << 20, 1 << 30
_REPEAT = 5


@functools.cache
def copy_bytes_s(device: str) -> float:
    """Return the bytes/s that a copy in a device's memory reads (it writes as many): the fastest of several."""
    return _host_copy_bytes_s() if device == CPU else _device_copy_bytes_s(device)


def _host_copy_bytes_s() -> float:
    source, target = np.ones(_HOST_BYTES // 8), np.empty(_HOST_BYTES // 8)
    times = []
    for _ in range(_REPEAT):
        begin = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - begin)
    return source.nbytes / min(times)


def _device_copy_bytes_s(device: str) -> float:
    from cuda.bindings import driver as cuda

    from gpu.cuda.cuda_driver import CudaDriver

    with closing(CudaDriver(device)) as driver:
        nbytes = min(_DEVICE_BYTES, driver.memory()[0] // 4) // 256 * 256
        stream, source, target = driver.create_stream(), driver.allocate(nbytes), driver.allocate(nbytes)
        driver.fill(stream, source, 1, nbytes // 4)

        def copy() -> None:
            _checked(cuda.cuMemcpyDtoDAsync(target, source, nbytes, stream))

        best_s = min(_seconds(stream, [copy])[0] for _ in range(_REPEAT))
        for address in (source, target):
            driver.free(address)
        driver.destroy_stream(stream)
        return nbytes / best_s


@dataclass(frozen=True)
class StageTimes:
    """Times of one extend: seconds by kernel, number of advanced slots and of rows scored."""

    seconds: dict[str, float]
    slots: int
    rows: int


def time_stages(engine: "CudaEngine") -> StageTimes:
    """Make one extend of all slots that are active on the device. Synchronises.

    Not with the resident form, and no slot may have been admitted, paused or released since the last extend.
    """
    kernels, memory, stream = engine._kernels, engine.batch_memory(), engine._stream
    before = memory.device_heads()
    stages = kernels.stages(len(before))
    took = _seconds(stream, [functools.partial(kernels.launch, stream, stage) for stage in stages])
    after = memory.device_heads()
    engine.handle.host.launches = int(memory.progress[0])
    advanced = (after["ticket"] == before["ticket"]) & (after["extends"] != before["extends"])
    names = [stage.name for stage in stages]
    return StageTimes(
        dict(zip(names, took, strict=True)), int(advanced.sum()), int(before["task_count"][advanced].sum())
    )


def _seconds(stream: int, calls: Sequence[Callable[[], None]]) -> list[float]:
    """Return the device's time of each call's work on a stream, in seconds. Synchronises."""
    from cuda.bindings import driver as cuda

    flag = cuda.CUevent_flags.CU_EVENT_DEFAULT.value
    events = [_checked(cuda.cuEventCreate(flag)) for _ in range(len(calls) + 1)]
    _checked(cuda.cuEventRecord(events[0], stream))
    for call, event in zip(calls, events[1:], strict=True):
        call()
        _checked(cuda.cuEventRecord(event, stream))
    _checked(cuda.cuStreamSynchronize(stream))
    took = [_checked(cuda.cuEventElapsedTime(begin, end)) / 1e3 for begin, end in itertools.pairwise(events)]
    for event in events:
        _checked(cuda.cuEventDestroy(event))
    return took


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call, if it has one. Raises RuntimeError if it failed."""
    code, *values = result
    if int(code):
        raise RuntimeError(f"the driver failed: {code}")
    return values[0] if values else None
