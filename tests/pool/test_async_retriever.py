"""Searches of the frontend: its event loop waits for no document, and keys take turns with filters and keywords."""

import asyncio
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from runtime.errors import ResponseTooLarge
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.async_retriever import AsyncRetriever
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.retriever import Retriever
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.search.query import Rerank
from runtime.testing.pool import InProcessPool, plan_of
from runtime.testing.waiting import until as eventually
from tests.pool.conftest import MakePool
from tests.pool.test_filter_waits import Evaluations, number_is
from tests.queries import query_of
from tests.retrieval.test_reranking import ByLength


@pytest.fixture
def plan(numbered: Path, tmp_path: Path) -> NodePlan:
    return plan_of(shutil.copytree(numbered, tmp_path / "docs"))


@pytest.fixture
def pool(plan: NodePlan, make_pool: MakePool) -> InProcessPool:
    return make_pool(plan).start()


@pytest.fixture
def search(plan: NodePlan, pool: InProcessPool) -> Iterator[AsyncRetriever]:
    client = SearchClient.of_plan(plan, "test")
    yield AsyncRetriever(CollectionRegistry(plan), client)
    client.close()


async def found(search: AsyncRetriever, flow: int = 0, text: str | None = "text", **options: Any) -> list[str]:
    query = query_of(text, k=1, flow=flow, **options)
    return [
        one.id for one in await search.search(query, on_embedded=lambda: None, on_read=lambda size: None, timeout_s=60)
    ]


def run(search: AsyncRetriever, body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        serving = asyncio.create_task(search.run())
        await body()
        serving.cancel()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_passages_are_reranked_for_the_queries_that_want_it(plan: NodePlan, pool: InProcessPool) -> None:
    client = SearchClient.of_plan(plan, "test")
    with closing(Reranking(ByLength(), 64, lambda outcome, pairs, seconds: None)) as reranking, closing(client):
        search = AsyncRetriever(CollectionRegistry(plan), client, reranking=reranking)

        async def body() -> None:
            for rerank, longest in ((None, False), (Rerank(60.0), True)):
                query = replace(query_of("text n5", k=4, filter=number_is(5)), rerank=rerank)
                (one,) = await search.search(query, on_embedded=lambda: None, on_read=lambda size: None, timeout_s=60)
                assert (one.id, one.score) == ("d5", float(len("text n5")) if longest else None)

        run(search, body)


def test_the_event_loop_goes_on_while_documents_are_read(
    search: AsyncRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, reading, real = threading.Event(), threading.Event(), CollectionDocuments.get

    def get(self: CollectionDocuments, rows: Any, on_read: Any) -> Any:
        reading.set()
        assert released.wait(60)
        return real(self, rows, on_read)

    async def body() -> None:
        await found(search)
        monkeypatch.setattr(CollectionDocuments, "get", get)
        asked = asyncio.create_task(found(search, filter=number_is(5)))
        await until(reading.is_set)  # in the loop's thread: it would not come here before the end
        assert not asked.done()
        released.set()
        assert await asked == ["d5"]

    run(search, body)


def test_a_passage_that_was_read_lately_is_not_read_again(
    search: AsyncRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(self: CollectionDocuments, rows: Any, on_read: Any) -> Any:
        raise AssertionError(f"{rows} is read again")

    async def body() -> None:
        assert await found(search, filter=number_is(5)) == ["d5"]
        monkeypatch.setattr(CollectionDocuments, "get", get)
        assert await found(search, filter=number_is(5)) == ["d5"]

    run(search, body)


def test_the_bytes_of_passages_are_told_and_limited_whether_they_are_read_or_in_memory(
    search: AsyncRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    async def ask(number: int) -> None:
        await search.search(
            query_of("text", k=1, filter=number_is(number)), on_embedded=lambda: None, on_read=told.append, timeout_s=60
        )

    async def body() -> None:
        await ask(5)
        await ask(5)
        assert told[0] == told[1] > 0
        monkeypatch.setattr("runtime.retrieval.passages.MAX_PASSAGES_BYTES", told[0] - 1)
        for number in (5, 6):
            with pytest.raises(ResponseTooLarge, match=f"the limit is {told[0] - 1}"):
                await ask(number)
        assert len(told) == 2

    run(search, body)


def test_the_event_loop_goes_on_while_a_build_is_opened_and_the_search_waits_for_it(
    plan: NodePlan, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, opening = threading.Event(), threading.Event()

    def held(*told: Any) -> CollectionDocuments:
        opening.set()
        assert released.wait(60)
        return CollectionDocuments(*told)

    (collection,) = plan.config.collections
    plan = replace(plan, config=replace(plan.config, collections=(replace(collection, verify="never"),)))
    path = Path(collection.path)
    path.rename(path.with_name("away"))  # as if the frontend had started before the collection existed
    client = SearchClient.of_plan(plan, "test")
    search = AsyncRetriever(CollectionRegistry(plan), client)
    path.with_name("away").rename(path)
    make_pool(plan).start()  # only now: it verifies the files in the background
    monkeypatch.setattr("runtime.retrieval.collection_builds.CollectionDocuments", held)

    async def body() -> None:
        await until(lambda: bool(client.identities("docs")))
        asked = asyncio.create_task(found(search, filter=number_is(5)))
        await until(opening.is_set)  # in the loop's thread: it would not come here before the end
        assert not asked.done()
        released.set()
        assert await asked == ["d5"]

    run(search, body)
    client.close()


def test_keys_take_turns_with_filters_that_are_new_to_the_pools(pool: InProcessPool, search: AsyncRetriever) -> None:
    slow = Evaluations(pool, 0)

    async def body() -> None:
        try:
            storm = [asyncio.create_task(found(search, 1, filter=number_is(number))) for number in range(6)]
            await until(lambda: len(pool.pool.loop.filtered) == 6)
            other = asyncio.create_task(found(search, 2, filter=number_is(9)))
            await found(search)  # without a filter: it waits for nobody
            await until(lambda: len(pool.pool.loop.filtered) == 7)
        finally:
            slow.release()
        assert await asyncio.gather(*storm, other) == [[f"d{number}"] for number in (0, 1, 2, 3, 4, 5, 9)]
        assert slow.order.index(9) == 1

    run(search, body)


def test_a_chat_s_keyword_search_delays_no_embedding_and_keys_take_turns(
    pool: InProcessPool, plan: NodePlan, search: AsyncRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, order, real = threading.Event(), list[str](), CollectionDocuments.search_keywords

    def search_keywords(self: CollectionDocuments, text: str, *options: Any) -> Any:
        order.append(text)
        assert released.wait(60)
        return real(self, text, *options)

    monkeypatch.setattr(CollectionDocuments, "search_keywords", search_keywords)
    with closing(Retriever(search.registry, SearchClient.of_plan(plan, "prefill-0"))) as chats:
        deadline_ns, ended = time.monotonic_ns() + 60 * 10**9, list[int]()

        def poll() -> None:
            ended.extend(one.ticket for one in chats.poll() if one.error is None)

        def start(text: str, flow: int, hybrid: float) -> int:
            return chats.submit(query_of(text, "docs", 1, "prefill", deadline_ns, hybrid=hybrid, flow=flow))

        eventually(lambda: chats.client.live, chats.client.poll)
        storm = [start(f"storm n{number}", 1, 0.5) for number in range(5)]
        eventually(lambda: bool(order), poll)
        plain, other = start("no keywords", 1, 0.0), start("other n7", 2, 1.0)
        eventually(lambda: bool(ended), poll)
        assert ended == [plain]  # embedded after all others, of which none has ended
        released.set()
        eventually(lambda: len(ended) == 7, poll)
        assert set(ended) == {*storm, plain, other}
    assert order.index("other n7") == 1
