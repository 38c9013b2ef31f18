"""What goes on beside a test or a benchmark until a block ends: load, mostly."""

import threading
from collections.abc import Callable, Iterable
from typing import Self

_JOIN_S = 330.0  # bounds the wait for a request that is still under way


class Background:
    """Runs each function in a thread of its own while its block lasts; they look at `ended` and return."""

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
