"""Work on a thread of its own while a worker starts: what waits for files or needs no interpreter's lock."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def beside(work: Callable[[], T]) -> Callable[[], T]:
    """Begin `work` on a thread of its own. What is returned waits for it, and returns or raises what it did."""
    threads = ThreadPoolExecutor(1, "start")
    future = threads.submit(work)
    threads.shutdown(wait=False)
    return future.result
