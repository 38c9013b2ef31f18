"""What a device's memory can do: a plain copy, timed by events."""

from gpu.cuda.driver import Driver

_COPY_BYTES = 1 << 30
_REPEAT = 5
_MICROSECOND = 1e-3


def device_copy_bytes_s(driver: Driver) -> float:
    """Bytes read a second while some are copied on the device (as many are written): the fastest of some copies."""
    nbytes = min(_COPY_BYTES, driver.memory()[0] // 4) // 256 * 256
    stream, begin, end = driver.create_stream(), driver.create_event(), driver.create_event()
    source, target = driver.allocate(nbytes), driver.allocate(nbytes)
    try:
        driver.fill(stream, source, 1, nbytes // 4)
        best = float("inf")
        for _ in range(_REPEAT):
            driver.record(stream, begin)
            driver.copy_on_device(stream, target, source, nbytes)
            driver.record(stream, end)
            driver.synchronise(stream)
            best = min(best, driver.elapsed_ms(begin, end))
        return nbytes / max(best, _MICROSECOND) * 1e3
    finally:
        driver.free(source)
        driver.free(target)
        driver.destroy_event(begin)
        driver.destroy_event(end)
        driver.destroy_stream(stream)
