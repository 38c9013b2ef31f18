"""Limits shared between API keys leave room for others."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from runtime.errors import Overloaded
from runtime.retrieval.fair_gate import FairLimit


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await body()

    asyncio.run(main())


def test_a_key_may_have_as_many_in_progress_as_are_left_and_others_of_it_wait() -> None:
    async def body() -> None:
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

    run(body)


def test_a_key_that_has_its_share_is_refused_after_a_while_or_if_too_many_wait() -> None:
    async def body() -> None:
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

    run(body)


def test_a_node_with_one_key_may_use_the_whole_limit() -> None:
    async def body() -> None:
        limit = FairLimit(3, "writes")
        async with limit.counted(0), limit.counted(0), limit.counted(0):
            with pytest.raises(Overloaded, match="3 writes are in progress; the limit is 3"):
                async with limit.counted(0):
                    pass

    run(body)
