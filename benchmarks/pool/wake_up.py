"""Floor of the latency of a query that wakes its pool: a process sleeps in a read of an eventfd, another writes to it.

Nothing of Trinity runs here. Measured are the write, the wake-up of an idle core (in a virtual machine also the
hypervisor's part), and the return from the read, until the spinning writer sees the answer.
"""

import mmap
import os
import time
from multiprocessing.connection import Connection

import numpy as np

_WARM = 5  # warm-up rounds, which are not counted


def wake_up_main(rate: float, seconds: float, sleeper_core: int, writer_core: int, pipe: Connection) -> None:
    """Wake-up process: for each order send the median µs of wake-ups, `rate` per second on average."""
    pipe.send("ready")
    while pipe.recv() is not None:
        pipe.send(_median_us(rate, max(int(rate * seconds), 3 * _WARM), sleeper_core, writer_core))


def _median_us(rate: float, count: int, sleeper_core: int, writer_core: int) -> float:
    shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    bell = os.eventfd(0)
    sleeper = os.fork()
    if sleeper == 0:
        os.sched_setaffinity(0, {sleeper_core})
        for number in range(count):
            os.eventfd_read(bell)
            shared[0] = number + 1
        os._exit(0)
    os.sched_setaffinity(0, {writer_core})
    random = np.random.default_rng(0)
    took = []
    for number in range(count):
        time.sleep(random.exponential(1 / rate))
        begin = time.monotonic_ns()
        os.eventfd_write(bell, 1)
        while shared[0] <= number:
            pass
        took.append(time.monotonic_ns() - begin)
    os.waitpid(sleeper, 0)
    os.close(bell)
    return float(np.median(took[_WARM:])) / 1e3
