"""Bandwidth of a copy on a device."""

import functools
import time
from contextlib import closing

import numpy as np

from gpu.devices import CPU

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
    from gpu.cuda.cuda_driver import CudaDriver

    with closing(CudaDriver(device)) as driver:
        nbytes = min(_DEVICE_BYTES, driver.memory()[0] // 4) // 256 * 256
        stream, begin, end = driver.create_stream(), driver.create_event(), driver.create_event()
        source, target = driver.allocate(nbytes), driver.allocate(nbytes)
        driver.fill(stream, source, 1, nbytes // 4)
        times_ms = []
        for _ in range(_REPEAT):
            driver.record(stream, begin)
            driver.copy_on_device(stream, target, source, nbytes)
            driver.record(stream, end)
            driver.synchronise(stream)
            times_ms.append(driver.elapsed_ms(begin, end))
        for address in (source, target):
            driver.free(address)
        for event in (begin, end):
            driver.destroy_event(event)
        driver.destroy_stream(stream)
        return nbytes / min(times_ms) * 1e3
