"""Places shared between API keys: turns, and limits that leave room for others."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from runtime.errors import Overloaded
from runtime.retrieval.fair_gate import FairGate, FairLimit


class Harness:
    """A gate of one place, on a clock of its own, and tasks that hold it until they are released."""

    def __init__(self) -> None:
        self.now = 0.0
        self.gate = FairGate(1, lambda: self.now)
        self.entered: list[str] = []
        self._releases: dict[str, asyncio.Event] = {}

    def start(self, name: str, flow: int) -> "asyncio.Task[None]":
        self._releases[name] = asyncio.Event()

        async def hold() -> None:
            async with self.gate.place(flow):
                self.entered.append(name)
                await self._releases[name].wait()

        return asyncio.create_task(hold())

    async def release(self, name: str, used: float) -> None:
        self.now += used
        self._releases[name].set()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await body()

    asyncio.run(main())


def test_a_key_with_many_waiting_goes_after_one_that_has_used_less() -> None:
    async def body() -> None:
        harness = Harness()
        tasks = [harness.start(f"storm {n}", 1) for n in range(3)]
        await settle()
        tasks += [harness.start(f"other {n}", 2) for n in range(2)]
        await settle()
        await harness.release("storm 0", 10.0)
        assert harness.entered == ["storm 0", "other 0"]
        await harness.release("other 0", 1.0)
        await harness.release("other 1", 1.0)
        await harness.release("storm 1", 10.0)
        await harness.release("storm 2", 10.0)
        assert harness.entered == ["storm 0", "other 0", "other 1", "storm 1", "storm 2"]
        await asyncio.gather(*tasks)

    run(body)


def test_a_cancelled_task_gives_up_its_turn() -> None:
    async def body() -> None:
        harness = Harness()
        first, second, third, fourth = (harness.start(name, 1) for name in ("first", "second", "third", "fourth"))
        await settle()
        second.cancel()
        await settle()
        await harness.release("first", 1.0)
        assert harness.entered == ["first", "third"]
        await harness.release("third", 1.0)
        await harness.release("fourth", 1.0)
        assert harness.entered == ["first", "third", "fourth"]
        fifth = harness.start("fifth", 1)
        await settle()
        assert harness.entered[-1] == "fifth", "the place is free again"
        await harness.release("fifth", 1.0)
        await asyncio.gather(first, third, fourth, fifth)

    run(body)


def test_a_task_that_is_cancelled_when_its_turn_has_come_passes_it_on() -> None:
    async def body() -> None:
        harness = Harness()
        first, second, third = (harness.start(name, 1) for name in ("first", "second", "third"))
        await settle()
        first.cancel()
        await asyncio.sleep(0)  # the first has left; the second has its turn but has not run
        second.cancel()
        await settle()
        assert harness.entered == ["first", "third"]
        await harness.release("third", 1.0)
        await asyncio.gather(third)

    run(body)


def test_a_key_may_have_as_many_in_progress_as_are_left() -> None:
    limit = FairLimit(8, "searches")
    held = [limit.counted(1) for _ in range(4)]
    for one in held:
        one.__enter__()
    with pytest.raises(Overloaded, match="4 searches of this API key are in progress"), limit.counted(1):
        pass
    with limit.counted(2), limit.counted(2):
        with pytest.raises(Overloaded, match="of this API key"), limit.counted(2):
            pass
        with limit.counted(3), pytest.raises(Overloaded), limit.counted(3):
            pass
    for one in held:
        one.__exit__(None, None, None)
    with limit.counted(1):
        pass


def test_a_node_with_one_key_may_use_the_whole_limit() -> None:
    limit = FairLimit(3, "writes")
    refused = pytest.raises(Overloaded, match="3 writes are in progress; the limit is 3")
    with limit.counted(0), limit.counted(0), limit.counted(0), refused, limit.counted(0):
        pass
