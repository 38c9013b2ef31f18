"""The floor under a query that wakes its pool: one process sleeps in a read of an eventfd, another writes to it.

Nothing of Trinity runs here. What is measured is the machine's: the write, the wake-up of a core that has gone idle (in
a virtual machine the hypervisor's too), and the return from the read, until the writer, which spins, sees the answer.
"""

import mmap
import os
import time
from multiprocessing.connection import Connection

import numpy as np

_WARM = 5  # first rounds, which are not counted


def wake_main(rate: float, seconds: float, sleeper_core: int, writer_core: int, pipe: Connection) -> None:
    """Says that it is ready, waits for an order, then sends the median µs of wake-ups, `rate` a second on average."""
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
