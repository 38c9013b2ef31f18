"""Threads that flows (API keys) share: of what waits, that of the flow goes first that has used least time."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from runtime.errors import Overloaded, Unavailable
from runtime.retrieval.fair_queue import FairQueue

T = TypeVar("T")
MAX_WAITING = 1024
NO_THREAD_LEFT = "the limit of processes and threads is reached; try again later"


def no_thread_left(error: Exception) -> bool:
    """Whether an error, such as one of a `ThreadPoolExecutor`, is that the system permits no more threads."""
    return isinstance(error, RuntimeError) and error.args == ("can't start new thread",)


def start_thread(run: Callable[..., None], name: str, *arguments: Any) -> threading.Thread:
    """Start a daemon thread. Raises `Overloaded` if the system permits no more."""
    thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise Overloaded(f"{name}: {error}: {NO_THREAD_LEFT}") from error
    return thread


def start_missing(threads: list[threading.Thread], count: int, start: Callable[[int], threading.Thread]) -> None:
    """Start threads by their numbers until there are `count`. If the system permits no more, those that there are do
    all the work until the next call; raises `Overloaded` if there is none."""
    while len(threads) < count:
        try:
            threads.append(start(len(threads)))
        except Overloaded:
            if not threads:
                raise
            return


class Threads(ThreadPoolExecutor):
    """An executor of up to `count` threads (None: Python's default). If the system permits no more threads, those that
    there are do all jobs; a job for which there is none is not done. A `ThreadPoolExecutor` refuses a job and does it.
    """

    def __init__(self, count: int | None, name: str) -> None:
        self._began = threading.Event()
        super().__init__(count, name, self._began.set)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `Executor.submit`. Raises `Overloaded` if there is no thread."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                outcome = fn(*args, **kwargs)
            except BaseException as error:  # it is the waiting caller's
                future.set_exception(error)
            else:
                future.set_result(outcome)

        try:
            super().submit(run).add_done_callback(lambda job: job.cancelled() and future.cancel())  # by `shutdown`
        except RuntimeError as error:
            if not no_thread_left(error):
                raise
            if not self._began.is_set() and future.cancel():
                raise Overloaded(NO_THREAD_LEFT) from error
        return future


class FairThreads:
    """`count` threads, which start with the first job. Thread-safe.

    `submit` refuses more than `limit` waiting jobs. A job that hangs occupies its thread; `clock` measures use.
    """

    def __init__(
        self, count: int, name: str, *, limit: int = MAX_WAITING, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._name, self._limit, self._clock = count, name, limit, clock
        self._waiting: FairQueue[int, tuple[Future[Any], Callable[[], Any]]] = FairQueue()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, flow: int, job: Callable[[], T]) -> Future[T]:
        """Queue a job; cancelling its future before it begins drops it. Raises `Overloaded`, `Unavailable` (closed)."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise Unavailable("the node is stopping")
            if len(self._waiting) >= self._limit:
                raise Overloaded(f"{self._limit} requests wait for {self._name}, the limit; try again later")
            start_missing(self._threads, self._count, lambda number: start_thread(self._run, f"{self._name}_{number}"))
            self._waiting.push(flow, (future, job))
            self._changed.notify()
        return future

    async def run(self, flow: int, job: Callable[[], T]) -> T:
        """Wait in an event loop for what a job returns or raises. Raises as `submit`."""
        return await asyncio.wrap_future(self.submit(flow, job))

    def close(self, timeout_s: float | None = None) -> bool:
        """Drop what waits and stop; return whether all threads have ended in time. Those that hang end with the
        process. Idempotent."""
        with self._changed:
            self._closed = True
            while (taken := self._waiting.pop()) is not None:
                taken[1][0].cancel()
            self._changed.notify_all()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if until is None else max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._waiting))
                if self._closed:
                    return
                taken = self._waiting.pop()
            assert taken is not None, "one was waiting"
            flow, (future, job) = taken
            if not future.set_running_or_notify_cancel():
                continue
            begin, error, outcome = self._clock(), None, None
            try:
                outcome = job()
            except BaseException as raised:  # it is the waiting caller's
                error = raised
            with self._changed:
                self._waiting.charge(flow, self._clock() - begin)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(outcome)
            del taken, future, job, outcome, error  # nothing is kept alive while the thread waits
