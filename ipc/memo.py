"""A dictionary that works a missing value out and keeps it, within bounds."""

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """memo[key] is `work_out(key)`, done once; after `most` different keys all are forgotten and worked out anew."""

    def __init__(self, work_out: Callable[[K], V], most: int = 4096) -> None:
        super().__init__()
        self._work_out = work_out
        self._most = most

    def __missing__(self, key: K) -> V:
        if len(self) >= self._most:
            self.clear()
        value = self[key] = self._work_out(key)
        return value
