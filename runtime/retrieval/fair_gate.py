"""Sharing of places between flows (API keys) in an event loop: in turns, and without one flow taking all."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

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
        waiter = self._waiting.pop()
        while waiter is not None and waiter[1].done():  # cancelled
            waiter = self._waiting.pop()
        if waiter is None:
            self._free += 1
        else:
            waiter[1].set_result(None)


class FairLimit:
    """Limits how many are in progress at once: a flow may have as many as are free, so that one leaves room for others.

    Those of a flow beyond that wait, up to `patience_s`: a client that repeats what is refused at once would cost more.
    Flow 0 is that of a node with one key or none: it may have all.
    """

    def __init__(self, limit: int, noun: str, patience_s: float = 1.0) -> None:
        self._limit, self._noun, self._patience_s = limit, noun, patience_s
        self._count: Counter[int] = Counter()
        self._total = 0  # of the counts
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.arrived = 0
        """How many have arrived, whether they are in progress, wait or have not entered yet."""

    @property
    def full(self) -> bool:
        """Whether one that arrives now would be refused, whatever its flow."""
        return max(self._total, self.arrived - len(self._waiting)) >= self._limit

    def refusal(self) -> Overloaded:
        """Return the error of one that is refused."""
        return Overloaded(f"{self._limit} {self._noun} are in progress; the limit is {self._limit}")

    def counted(self, flow: int) -> "_Counted":
        """Return a context that counts one for as long as it lasts. Entering it raises `Overloaded`."""
        return _Counted(self, flow)

    def _has_room(self, flow: int) -> bool:
        left = self._limit - self._total
        return left > 0 and (not flow or self._count[flow] < left)

    async def enter(self, flow: int) -> None:
        """Count one, after waiting for it. Raises `Overloaded`."""
        if not self.entered(flow):
            await self._wait(flow)

    def entered(self, flow: int) -> bool:
        """Count one at once; return False if it has to wait, by `enter`. Raises `Overloaded`."""
        if self._total >= self._limit:
            raise self.refusal()
        if not self._has_room(flow):
            return False
        self._count[flow] += 1
        self._total += 1
        return True

    async def _wait(self, flow: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        own, waiting = self._count[flow], (flow, turn)
        refusal = Overloaded(
            f"{own} {self._noun} of this API key are in progress, and {self._total} in all; a key may have as "
            f"many as are left of the limit of {self._limit}"
        )
        if len(self._waiting) >= self._limit:
            raise refusal
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._patience_s):
                await turn
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not turn.cancelled():  # its turn had come
                self.leave(flow)
            if isinstance(error, TimeoutError):
                raise refusal from None
            raise

    def leave(self, flow: int) -> None:
        """Undo `enter`."""
        self._count[flow] -= 1
        self._total -= 1
        if not self._waiting:
            return
        for waiting in [waiting for waiting in self._waiting if not waiting[1].done()]:
            if self._has_room(waiting[0]):
                self._waiting.remove(waiting)
                self._count[waiting[0]] += 1
                self._total += 1
                waiting[1].set_result(None)


class _Counted:
    """See `FairLimit.counted`. A generator would take three times as long."""

    def __init__(self, limit: FairLimit, flow: int) -> None:
        self._limit, self._flow = limit, flow

    async def __aenter__(self) -> None:
        await self._limit.enter(self._flow)

    async def __aexit__(self, *_: object) -> None:
        self._limit.leave(self._flow)
