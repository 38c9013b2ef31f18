"""Background threads of a test or benchmark, mostly load generators."""

import threading
from collections.abc import Callable, Iterable
from typing import Self

_JOIN_S = 330.0  # timeout for requests that are still running


class Background:
    """Runs each function in its own thread for the duration of the block; they return when `ended` is set."""

    def __init__(self, runs: Iterable[Callable[[], None]]) -> None:
        self.ended = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in runs]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join(timeout=_JOIN_S)
