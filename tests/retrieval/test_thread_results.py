"""Results of threads in an event loop."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from runtime.errors import Overloaded
from runtime.retrieval.async_retriever import ThreadResults


async def test_futures_that_end_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    results, loop, calls = ThreadResults(), asyncio.get_running_loop(), list[Any]()
    futures: list[Future[int]] = [Future() for _ in range(8)]
    tasks = [asyncio.create_task(results.of(future)) for future in futures]
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "call_soon_threadsafe", calls.append)
    for number, future in enumerate(futures):
        future.set_result(number)
    (deliver,) = calls
    deliver()
    assert await asyncio.gather(*tasks) == list(range(8))
    late: Future[int] = Future()
    task = asyncio.create_task(results.of(late))
    await asyncio.sleep(0)
    late.set_exception(Overloaded("full"))
    assert len(calls) == 2
    calls[1]()
    with pytest.raises(Overloaded):
        await task


async def test_a_future_that_has_ended_is_not_waited_for() -> None:
    future: Future[int] = Future()
    future.set_result(3)
    waiting = ThreadResults().of(future)
    with pytest.raises(StopIteration, match="3"):
        waiting.send(None)


async def test_a_cancelled_task_cancels_its_future_and_the_other_way_round() -> None:
    results = ThreadResults()
    futures: list[Future[int]] = [Future(), Future()]
    tasks = [asyncio.create_task(results.of(future)) for future in futures]
    await asyncio.sleep(0)
    tasks[0].cancel()
    futures[1].cancel()
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task
    assert all(future.cancelled() for future in futures)
