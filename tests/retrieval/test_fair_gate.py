"""Places shared between API keys: turns, and limits that leave room for others."""

import asyncio

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


async def test_a_key_with_many_waiting_goes_after_one_that_has_used_less() -> None:
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


async def test_a_cancelled_task_gives_up_its_turn() -> None:
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


async def test_a_task_that_is_cancelled_when_its_turn_has_come_passes_it_on() -> None:
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


async def test_a_key_may_have_as_many_in_progress_as_are_left_and_others_of_it_wait() -> None:
    limit, entered, release = FairLimit(8, "searches", patience_s=1e6), list[int](), asyncio.Event()

    async def hold(flow: int) -> None:
        async with limit.counted(flow):
            entered.append(flow)
            await release.wait()

    tasks = [asyncio.create_task(hold(1)) for _ in range(6)]
    await settle()
    assert entered == [1] * 4
    tasks += [asyncio.create_task(hold(2)) for _ in range(3)]
    await settle()
    assert entered == [1] * 4 + [2] * 2, "as many as are left"
    tasks[4].cancel()
    release.set()
    await asyncio.gather(*tasks[:4], *tasks[5:])
    assert sorted(entered) == [1] * 5 + [2] * 3
    async with limit.counted(1), limit.counted(1), limit.counted(1), limit.counted(1):
        pass  # all places are free again


async def test_a_key_that_has_its_share_is_refused_after_a_while_or_if_too_many_wait() -> None:
    limit = FairLimit(2, "searches", patience_s=0.0)
    async with limit.counted(1):
        with pytest.raises(Overloaded, match="1 searches of this API key are in progress, and 1 in all"):
            async with limit.counted(1):
                pass
        async with limit.counted(0):
            pass
    patient = FairLimit(2, "searches", patience_s=1e6)
    async with patient.counted(1):
        tasks = [asyncio.create_task(patient.counted(1).__aenter__()) for _ in range(2)]
        await settle()
        with pytest.raises(Overloaded):
            await patient.counted(1).__aenter__()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_node_with_one_key_may_use_the_whole_limit() -> None:
    limit = FairLimit(3, "writes")
    async with limit.counted(0), limit.counted(0), limit.counted(0):
        with pytest.raises(Overloaded, match="3 writes are in progress; the limit is 3"):
            async with limit.counted(0):
                pass
