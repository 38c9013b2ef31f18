"""No filter is evaluated on the pool's loop, a worker's loop or the frontend's event loop, which serve everyone."""

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc import SearchSpec
from runtime.retrieval.async_retriever import AsyncRetriever
from runtime.retrieval.attributes import evaluation
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.collection_registry import CollectionRegistry
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.retrieval_steps import RetrievalResult, search_keywords
from runtime.retrieval.retriever import Retriever
from runtime.retrieval.search.client import SearchClient
from runtime.retrieval.writer_service import WriterService
from runtime.testing.pool import plan_of
from runtime.testing.waiting import until
from tests.pool.client_helpers import attached
from tests.pool.conftest import MakeClient, MakePool
from tests.queries import query_of

DIM = 16
HASHING = HashingEmbedder(DIM)


def above(number: int) -> dict[str, Any]:
    return {"type": "gt", "key": "unique", "value": f"u{number:04}"}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that evaluate filters, one for each time."""
    found = list[str]()

    def evaluate(*told: Any) -> Any:
        found.append(threading.current_thread().name.partition("_")[0])
        return evaluation.evaluate(*told)

    monkeypatch.setattr("runtime.retrieval.attributes.columns.evaluate", evaluate)
    return found


async def _embed(embedder: Any, texts: Any, kind: Any, flow: int) -> Any:
    return embedder.embed(texts, kind), 0


def test_filters_of_searches_chats_hybrid_searches_and_deletes_are_evaluated_on_threads_of_their_own(
    tmp_path: Path, make_pool: MakePool, make_client: MakeClient, threads: list[str]
) -> None:
    path = tmp_path / "docs"
    create(path, DIM, metric="l2", embedder=HASHING.name)
    plan, writes = plan_of(path), WriterService({"docs": path}, _embed, lambda name: HASHING)
    documents = [
        UpsertDocument(f"d{n}", f"text n{n}", attributes={"unique": f"u{n:04}"}, vector=np.full(DIM, n, np.float32))
        for n in range(40)
    ]

    async def write() -> None:
        await writes.upsert("docs", documents[:30])
        await writes.flush("docs")
        await writes.upsert("docs", documents[30:])

    asyncio.run(write())
    make_pool(plan).start()
    registry = CollectionRegistry(plan)
    client = attached(make_client(plan))

    async def searches_and_deletes() -> None:
        search = AsyncRetriever(registry, client)
        serving = asyncio.create_task(search.run())
        for number, hybrid in enumerate((0.0, 0.5, 0.0, 0.5)):
            query = query_of("text n35", k=3, filter=above(number), hybrid=hybrid)
            found = await search.search(query, on_embedded=lambda: None, on_read=lambda size: None, timeout_s=60)
            assert found
        assert await writes.delete_where("docs", parse_filter(above(37))) == 2
        serving.cancel()

    chats = Retriever(registry, SearchClient.of_plan(plan, "prefill-0"))
    with closing(writes), closing(chats):
        keywords = "text", np.zeros(DIM, np.float32), SearchSpec("docs", 1)
        until(lambda: search_keywords(registry.current("docs"), *keywords) or True)
        asyncio.run(searches_and_deletes())
        until(lambda: chats.client.live, chats.client.poll)
        ended: list[RetrievalResult] = []
        for number, hybrid in enumerate((0.0, 0.5), 10):
            chats.submit(query_of("text n35", k=3, filter=above(number), hybrid=hybrid))
        until(lambda: len(ended) == 2, lambda: ended.extend(chats.poll()))
        assert [one.error for one in ended] == [None, None]
    assert set(threads) == {"filters", "keyword search", "filters of writes", "writes"}
