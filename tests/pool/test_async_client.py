"""Tests of the search client in asyncio's event loop and uvloop: same answers, and a cancelled task's query ends."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gpu import GraphIndex
from runtime import AsyncSearchClient
from runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded, TrinityError, Unavailable
from runtime.node.run_dir import NodeInfo, RunDir
from runtime.retrieval.search.pool_session import Replicas
from runtime.retrieval.search.query import QueueLimits
from runtime.testing.pool import InProcessPool, plan_of
from tests.pool.client_helpers import Vectors
from tests.pool.conftest import MakePool

Run = Callable[[Callable[[AsyncSearchClient], Awaitable[None]]], None]


@pytest.fixture
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop, the frontend's, or asyncio's own if a test asks for it."""
    return asyncio.new_event_loop if getattr(request, "param", "uvloop") == "asyncio" else uvloop.new_event_loop


BOTH_LOOPS = pytest.mark.parametrize("loop_factory", ["asyncio", "uvloop"], indirect=True)


@pytest.fixture
def pools(collection: Path, make_pool: MakePool, tmp_path: Path) -> list[InProcessPool]:
    """Two pools of a node that clients find by its run directory."""
    plan = plan_of(collection, workers=2, ring_slots=8)
    return [make_pool(plan, f"pool-{number}").start() for number in range(2)]


@pytest.fixture
def run(
    pools: list[InProcessPool],
    tmp_path: Path,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Return a function that runs a coroutine with a client of the pools in a new event loop.

    No query is sent to a second pool because its own has not run for half a second on a busy machine.
    """
    monkeypatch.setattr(Replicas, "stalled", lambda *told: False)

    def run(body: Callable[[AsyncSearchClient], Awaitable[None]]) -> None:
        async def main() -> None:
            async with await AsyncSearchClient.connect(tmp_path / "run", timeout_s=60) as client:
                await asyncio.wait_for(body(client), 60)

        held = RunDir.acquire(tmp_path / "run")
        held.write(NodeInfo("n", os.getpid(), "", "", tuple(pool.endpoint for pool in pools), ("docs",)))
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(main())
        finally:
            held.release()

    return run


@BOTH_LOOPS
def test_each_of_many_concurrent_tasks_gets_its_own_answer(run: Run, queries: Vectors, index: GraphIndex) -> None:
    expected = index.search(queries, 4, top_m=32, search_width=2)[0].tolist()

    async def body(client: AsyncSearchClient) -> None:
        for _ in range(5):
            searches = (client.search(query, 4, top_m=32, search_width=2) for query in queries[:8])
            found = await asyncio.gather(*searches)
            assert [result.ids.tolist() for result in found] == expected[:8]

    run(body)


def test_large_batches_and_single_searches_share_a_client(run: Run, queries: Vectors, index: GraphIndex) -> None:
    expected = index.search(queries, 4, top_m=32, search_width=2)[0].tolist()

    async def body(client: AsyncSearchClient) -> None:
        first, second = await asyncio.gather(
            client.search_batch(queries, 4, top_m=32, search_width=2),
            client.search_batch(queries[::-1], 4, top_m=32, search_width=2),
        )
        assert first.checked().ids.tolist() == second.checked().ids.tolist()[::-1] == expected
        assert (await client.search(queries[3], 4, top_m=32, search_width=2)).ids.tolist() == expected[3]
        assert sum(pool.answered for pool in client.statistics().pools) == 2 * len(queries) + 1

    run(body)


async def cancelled(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


@BOTH_LOOPS
def test_a_cancelled_task_cancels_its_query(run: Run, pools: list[InProcessPool], queries: Vectors) -> None:
    async def body(client: AsyncSearchClient) -> None:
        with pools[0].held(), pools[1].held():
            searches = [asyncio.ensure_future(client.search(query, 4)) for query in queries[:4]]
            await asyncio.sleep(0)
            await cancelled(*searches)
        while any(pool.outstanding for pool in client.statistics().pools):
            await asyncio.sleep(0.001)
        assert sum(pool.errors.get("cancelled", 0) for pool in client.statistics().pools) == 4
        with pools[0].held(), pools[1].held():
            batch = asyncio.ensure_future(client.search_batch(queries, 4))  # more than fit into the rings
            await asyncio.sleep(0)
            await cancelled(batch)
        while any(pool.outstanding for pool in client.statistics().pools):
            await asyncio.sleep(0.001)
        assert len((await client.search(queries[0], 3)).ids) == 3

    run(body)


def test_errors_are_raised_in_the_task_that_caused_them(run: Run, queries: Vectors) -> None:
    async def body(client: AsyncSearchClient) -> None:
        with pytest.raises(InvalidRequest, match="no collection 'nope'"):
            await client.search(queries[0], collection="nope")
        with pytest.raises(InvalidRequest, match="shape"):
            await client.search_batch(queries[0])
        with pytest.raises(InvalidRequest, match="not finite"):
            await client.search([float("nan")] * 16)
        with pytest.raises(InvalidRequest, match="deadline_ms is 0"):
            await client.search(queries[0], deadline_ms=0)
        assert not (await client.search_batch(queries[:3], 2)).errors

    run(body)


def test_closing_the_client_fails_outstanding_searches(run: Run, pools: list[InProcessPool], queries: Vectors) -> None:
    async def body(client: AsyncSearchClient) -> None:
        with pools[0].held(), pools[1].held():
            search = asyncio.ensure_future(client.search(queries[0]))
            batch = asyncio.ensure_future(client.search_batch(queries))
            await asyncio.sleep(0)
            await client.close()
            ends = await asyncio.gather(search, batch, return_exceptions=True)
        assert all(isinstance(end, Unavailable) for end in ends)
        assert all(isinstance(end, TrinityError) for end in ends)

    run(body)


def test_searches_beyond_the_rings_capacity_wait_for_room(run: Run, queries: Vectors, index: GraphIndex) -> None:
    expected = index.search(queries, 4, top_m=32, search_width=2)[0].tolist()
    limit = QueueLimits().parked
    many = [*queries] * (limit // len(queries) + 2)

    async def body(client: AsyncSearchClient) -> None:
        searches = (client.search(query, 4, top_m=32, search_width=2) for query in queries)
        assert [result.ids.tolist() for result in await asyncio.gather(*searches)] == expected
        ends = await asyncio.gather(*(client.search(query, 4) for query in many), return_exceptions=True)
        refused = [end for end in ends if isinstance(end, Overloaded)]
        # A pool whose thread has been slow is avoided: its ring may be empty.
        assert len(many) - 2 * 8 - limit <= len(refused) <= len(many) - limit
        assert all(f"the limit is {limit}" in str(end) for end in refused)

    run(body)


def test_a_search_that_waits_for_room_ends_at_its_deadline(
    run: Run, pools: list[InProcessPool], queries: Vectors
) -> None:
    async def body(client: AsyncSearchClient) -> None:
        with pools[0].held(), pools[1].held():
            waiting = [asyncio.ensure_future(client.search(query)) for query in queries[: 2 * 8]]
            await asyncio.sleep(0)
            with pytest.raises(DeadlineExceeded):
                await client.search(queries[0], deadline_ms=1)
        await asyncio.gather(*waiting)

    run(body)
