"""The time limit that many tasks share."""

import asyncio

import pytest

from runtime.serving.http.time_limit import TimeLimit


async def wait(limit: TimeLimit, event: asyncio.Event) -> None:
    with limit.limit():
        await event.wait()


async def test_tasks_that_take_too_long_end_with_a_timeout_and_others_do_not() -> None:
    never, soon = asyncio.Event(), asyncio.Event()
    limit = TimeLimit(0.001)
    soon.set()
    tasks = [asyncio.create_task(wait(limit, event)) for event in (never, soon, never)]
    assert [type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)] == [
        TimeoutError,
        type(None),
        TimeoutError,
    ]
    with pytest.raises(TimeoutError):
        await wait(limit, never)


async def test_a_task_that_is_cancelled_ends_as_such() -> None:
    task = asyncio.create_task(wait(TimeLimit(1e6), asyncio.Event()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_task_may_go_on_after_its_timeout() -> None:
    with pytest.raises(TimeoutError):
        await wait(TimeLimit(0.0), asyncio.Event())
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
