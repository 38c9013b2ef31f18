"""Tests of stored answers in a pool: they are found through its rings, also by a new writer and after loss of files."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.node.config import AnswerCacheSection, parse_config
from runtime.node.placement.layout import lay_out
from runtime.node.placement.plan import ANSWERS, NodePlan
from runtime.pool.process import Timing
from runtime.retrieval.answer_store import AnswerStore, CachedAnswer, NewAnswer
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER, embedder_dim, load_embedder
from runtime.retrieval.search.async_client import AsyncSearchClient
from runtime.retrieval.search.client import SearchClient
from runtime.serving.frontend.answer_cache import AnswerCache, CacheKey
from runtime.serving.messages import Sampling, Tokens
from runtime.testing.waiting import until
from tests.pool.client_helpers import attached
from tests.pool.conftest import MakeClient, MakePool

DIM = embedder_dim(DEFAULT_EMBEDDER)
LIMITS = AnswerCacheSection(threshold=0.9)
IMPATIENT = Timing(control_ns=0, check_ns=1_000_000)
EAST, NORTH = np.eye(DIM, dtype=np.float32)[:2]


def plan(run_dir: Path, collection: Path | None = None, **pool: Any) -> NodePlan:
    docs = [] if collection is None else [{"name": "docs", "path": str(collection)}]
    cache = {"threshold": LIMITS.threshold}
    model = {"engine": "openai", "name": "m", "url": "http://127.0.0.1:1/v1"}
    node = {"run_dir": str(run_dir)}
    return lay_out(
        parse_config({"node": node, "model": model, "answer_cache": cache, "collections": docs, "pool": pool})
    )


@pytest.fixture
def make_stored(tmp_path: Path) -> Iterator[Callable[[], AnswerStore]]:
    made: list[AnswerStore] = []

    def make() -> AnswerStore:
        made.append(AnswerStore(plan(tmp_path).answers, DIM, LIMITS, lambda event, times: None))
        made[-1].maintain()
        return made[-1]

    yield make
    for stored in made:
        stored.close()


MakeStored = Callable[[], AnswerStore]


def find(client: SearchClient, stored: AnswerStore, key: str, vector: Any) -> CachedAnswer | None:
    return stored.resolve(client.search(vector, 1, collection=ANSWERS, filter=stored.filter(key)))


def test_an_answer_is_found_only_by_its_own_key(
    tmp_path: Path, collection: Path, make_pool: MakePool, make_client: MakeClient, make_stored: MakeStored
) -> None:
    planned = plan(tmp_path, collection)
    make_pool(planned).start()
    client, stored = attached(make_client(planned)), make_stored()
    stored.store([NewAnswer("1", "mine", EAST, "one"), NewAnswer("2", "theirs", NORTH, "two")])
    until(lambda: find(client, stored, "mine", EAST) is not None)
    assert find(client, stored, "mine", NORTH) is None
    assert find(client, stored, "theirs", EAST) is None
    with pytest.raises(InvalidRequest, match="key"):
        client.search(EAST, 1, collection=ANSWERS)


def test_answers_survive_their_frontend_and_the_pool(
    tmp_path: Path, make_pool: MakePool, make_client: MakeClient, make_stored: MakeStored
) -> None:
    planned = plan(tmp_path)
    pool = make_pool(planned).start()
    first = make_stored()
    first.store([NewAnswer("1", "k", EAST, "one")])
    first.close()
    second, client = make_stored(), attached(make_client(planned))
    until(lambda: find(client, second, "k", EAST) is not None)
    pool.close()
    client.close()
    make_pool(planned, epoch=2).start()
    again = attached(make_client(planned))
    found = find(again, second, "k", EAST)
    assert found is not None
    assert found.text == "one"


def test_a_removed_or_recreated_collection_is_served_again(
    tmp_path: Path, make_pool: MakePool, make_client: MakeClient, make_stored: MakeStored
) -> None:
    planned = plan(tmp_path)
    make_pool(planned, timing=IMPATIENT).start()
    client, stored = attached(make_client(planned)), make_stored()
    for number in range(2):
        stored.store([NewAnswer("1", "k", EAST, f"{number}")])

        def served(text: str = str(number)) -> bool:
            found = find(client, stored, "k", EAST)
            return found is not None and found.text == text

        until(served)
        shutil.rmtree(planned.answers)


def test_lookups_without_a_pool_are_misses(tmp_path: Path, make_client: MakeClient, make_stored: MakeStored) -> None:
    client = AsyncSearchClient(make_client(plan(tmp_path)))
    answers = AnswerCache(make_stored(), load_embedder(DEFAULT_EMBEDDER), client)
    key = CacheKey.of("", "m", "why?", Sampling(8), None, seeded=False)
    assert key is not None

    async def look_up() -> Any:
        running = asyncio.create_task(client.run())
        try:
            vector, hit = await answers.find(key)
            answers.store(key, vector, (Tokens("a", "one", (1,), "stop"),))
            return hit
        finally:
            running.cancel()

    assert asyncio.run(look_up()) is None
    answers.close()
