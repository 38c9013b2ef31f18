"""Sharing of places between flows (API keys) in an event loop: in turns, and without one flow taking all."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from runtime.errors import Overloaded
from runtime.retrieval.fair_queue import FairQueue


class FairGate:
    """Lets `places` tasks through at once. Of those that wait, the one goes first whose flow has used least time."""

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free, self._clock = places, clock
        self._waiting: FairQueue[int, asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def place(self, flow: int) -> AsyncIterator[None]:
        """Hold a place, after waiting for it."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(flow)
        begin = self._clock()
        try:
            yield
        finally:
            self._waiting.charge(flow, self._clock() - begin)
            self._leave()

    async def _wait(self, flow: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(flow, turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove(flow, turn)
            if not turn.cancelled():  # its turn had come
                self._leave()
            raise

    def _leave(self) -> None:
        found = self._waiting.pop()
        while found is not None and found[1].done():  # cancelled
            found = self._waiting.pop()
        if found is None:
            self._free += 1
        else:
            found[1].set_result(None)


class FairLimit:
    """Limits how many are in progress at once: a flow may have as many as are free, so that one leaves room for others.

    Flow 0 is that of a node with one key or none: it may have all.
    """

    def __init__(self, limit: int, noun: str) -> None:
        self._limit, self._noun = limit, noun
        self._count: Counter[int] = Counter()

    @contextmanager
    def counted(self, flow: int) -> Iterator[None]:
        """Count one for as long as the context lasts. Raises `Overloaded`."""
        total, own = self._count.total(), self._count[flow]
        if total >= self._limit:
            raise Overloaded(f"{total} {self._noun} are in progress; the limit is {self._limit}")
        if flow and own >= self._limit - total:
            raise Overloaded(
                f"{own} {self._noun} of this API key are in progress, and {total} in all; a key may have as many as "
                f"are left of the limit of {self._limit}"
            )
        self._count[flow] += 1
        try:
            yield
        finally:
            self._count[flow] -= 1
            if not self._count[flow]:
                del self._count[flow]
