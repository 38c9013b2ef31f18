"""Remote collections searched by `SearchClient` and by the retrievers of workers."""

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime import AsyncSearchClient, SearchClient
from runtime.errors import ConfigError, DeadlineExceeded, InvalidFilter, InvalidRequest, Overloaded, Unavailable
from runtime.node.remote_config import RemoteSection
from runtime.retrieval.passages import Passage, ignore_size
from runtime.retrieval.remote_collections import RemoteCollection
from runtime.retrieval.retrieval_steps import RetrievalResult
from runtime.retrieval.retriever import Retriever
from runtime.retrieval.search.query import QueueLimits
from tests.frontend.fake_workers import WAIT, run
from tests.frontend.remote_nodes import DOCUMENTS, HASHING, KEY, SOME_FILTER, UNREACHABLE_URL, raw_server, url_of
from tests.queries import query_of

TEXTS = ["cats purr", "dogs bark", "fish swim", "birds sing"]
STORE = b'{"status": "completed", "metadata": {"embedder": "hashing-64", "dimensions": "64", "metric": "cosine"}}'
SILENT = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(STORE) + STORE  # and to what comes next nothing


@contextlib.contextmanager
def client(tmp_path: Path, *nodes: str, limits: QueueLimits | None = None, **options: Any) -> Iterator[SearchClient]:
    (tmp_path / "key").write_text(KEY)
    options = {"timeout_s": WAIT} | options
    section = RemoteSection("all", nodes, "docs", api_key_file=str(tmp_path / "key"), **options)
    with SearchClient((), "test", remote=(section,), limits=limits) as made:
        yield made


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """A node that returns its collection's summary and answers no search."""
    reported_summary: queue.Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        stopped = asyncio.Event()
        async with await raw_server(SILENT, b"GET") as server:
            reported_summary.put((url_of(server), asyncio.get_running_loop(), stopped))
            await stopped.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url, loop, stopped = reported_summary.get(timeout=WAIT)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(WAIT)


def nearest(start_node: Any, query: str | None, **asked: Any) -> list[Passage]:
    """Return the results of one index over a node's documents."""
    wanted = query_of(query, **({"k": 10} | asked))
    found: list[Passage] = asyncio.run(
        start_node.search(wanted, on_embedded=lambda: None, on_read=ignore_size, timeout_s=60.0)
    )
    return sorted(found, key=lambda passage: passage.distance)


def vector(text: str) -> Any:
    return HASHING.embed([text], "query")[0]


def test_a_search_over_two_nodes_equals_a_search_of_one_index(start_node: Any, tmp_path: Path) -> None:
    whole, (_, even), (_, odd) = start_node(DOCUMENTS)[0], start_node(DOCUMENTS[::2]), start_node(DOCUMENTS[1::2])
    with client(tmp_path, even, odd) as asked:
        for text in TEXTS:
            one = nearest(whole, text)
            for given in (text, vector(text), vector(text).tolist()):
                found = asked.search(given, 10, collection="all")
                assert list(found.passages) == one
                assert found.distances.tolist() == np.array([passage.distance for passage in one], np.float32).tolist()
                assert set(found.ids.tolist()) == {-1}
                assert not found.partial
        assert list(asked.search("cats", 10, filter=SOME_FILTER).passages) == nearest(whole, "cats", filter=SOME_FILTER)
        ticket, ended = asked.submit("dogs", 3, deadline_ns=(1 << 62)), list[Any]()
        while not ended:
            asked.sleep((), 1000)
            ended = asked.poll()
        assert [(result.ticket, list(result.passages)) for result in ended] == [(ticket, nearest(whole, "dogs", k=3))]
        assert asked.poll() == []


def test_a_batch_beyond_the_concurrency_limit_returns_all_results_in_order(start_node: Any, tmp_path: Path) -> None:
    whole, (_, even), (_, odd) = start_node(DOCUMENTS)[0], start_node(DOCUMENTS[::2]), start_node(DOCUMENTS[1::2])
    with client(tmp_path, even, odd) as asked:
        found = asked.search_batch([vector(TEXTS[number % 4]) for number in range(150)], 5, collection="all").checked()
    wanted = [nearest(whole, text, k=5) for text in TEXTS]
    assert [list(result.passages) for result in found] == [wanted[number % 4] for number in range(150)]
    assert found.distances.shape == (150, 5)


def test_concurrent_async_searches_work_and_cancelling_one_ends_its_search(start_node: Any, tmp_path: Path) -> None:
    whole, url_of_whole = start_node(DOCUMENTS)
    wanted = {text: nearest(whole, text) for text in TEXTS}

    async def test(url: str) -> None:
        with client(tmp_path, url_of_whole) as ours, client(tmp_path, url) as other:
            async with AsyncSearchClient(ours) as asked, AsyncSearchClient(other) as waiting:
                found = await asyncio.gather(*(asked.search(text, 10) for text in TEXTS))
                assert [list(result.passages) for result in found] == list(wanted.values())
                hanging = asyncio.create_task(waiting.search("cats", 10))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(hanging), 0.05)
                hanging.cancel()
                await asyncio.gather(hanging, return_exceptions=True)
                assert other.poll() == []

    with silent() as url:
        run(test(url))


def test_a_search_ends_at_its_deadline_and_the_node_stays_up(tmp_path: Path) -> None:
    with silent() as url, client(tmp_path, url) as asked:
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match=url):
                asked.search("cats", 10, deadline_ms=50)


def test_a_deadline_during_a_nodes_summary_names_that_node() -> None:
    class Told:
        status = 200

        @property
        def content(self) -> Any:
            return self

        async def iter_any(self) -> AsyncIterator[bytes]:
            loop, until = asyncio.get_running_loop(), asyncio.get_running_loop().time() + 0.01
            while loop.time() < until:  # block the loop past the deadline, before its timer can fire
                pass
            yield STORE

    class Session:
        @contextlib.asynccontextmanager
        async def request(self, method: str, url: str, **_: Any) -> AsyncIterator[Told]:
            if method == "POST":
                await asyncio.sleep(WAIT)
            yield Told()

    remote = RemoteCollection(RemoteSection("all", (UNREACHABLE_URL,), "docs"), lambda: Session())  # type: ignore[arg-type,return-value]
    with pytest.raises(DeadlineExceeded, match=f"node {UNREACHABLE_URL} did not answer within 0 s"):
        run(remote.search({"query": "cats", "k": 3}, timeout_s=0.005))
    assert remote.nodes == {UNREACHABLE_URL: ""}


def test_a_missing_node_is_an_error_or_a_partial_result_by_configuration(start_node: Any, tmp_path: Path) -> None:
    half, even = start_node(DOCUMENTS[::2])
    with client(tmp_path, even, UNREACHABLE_URL) as asked, pytest.raises(Unavailable, match=UNREACHABLE_URL):
        asked.search("cats", 10)
    with client(tmp_path, even, UNREACHABLE_URL, missing="partial") as asked:
        found = asked.search("cats", 10)
        assert found.partial
        assert list(found.passages) == nearest(half, "cats")


def test_an_unsupported_query_is_a_typed_error(start_node: Any, tmp_path: Path) -> None:
    _, url = start_node(DOCUMENTS)
    with client(tmp_path, url, limits=QueueLimits(parked=2)) as asked:
        with pytest.raises(InvalidFilter, match="no document has the attribute 'm'"):
            asked.search("cats", 10, filter={"type": "eq", "key": "m", "value": 1})
        with pytest.raises(InvalidRequest, match="vector is a text, and collection 'docs' is not on other nodes"):
            asked.search("cats", 10, collection="docs")
        with pytest.raises(InvalidRequest, match="3 numbers"):
            asked.search([1.0, 2.0, 3.0], 10)
        with pytest.raises(InvalidRequest, match="not an array"):
            asked.search("", 10)
        for _ in range(2):
            asked.submit("cats", 10)
        with pytest.raises(Overloaded, match="2 queries wait for other nodes, the limit is 2"):
            asked.submit("cats", 10)
    with pytest.raises(Unavailable, match="closed"):
        asked.submit("cats", 10)
    missing = RemoteSection("all", (url,), api_key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="remote all: the key cannot be read"):
        SearchClient((), "test", remote=(missing,))


# ---- the retriever of a worker


@contextlib.contextmanager
def retriever(tmp_path: Path, *nodes: str, **options: Any) -> Iterator[Retriever]:
    with client(tmp_path, *nodes, **options) as asked:
        registry: Any = SimpleNamespace(dims={}, warm_up=lambda: None)
        made = Retriever(registry, asked)
        try:
            yield made
        finally:
            made.close()


def ended(asker: Retriever) -> RetrievalResult:
    while True:
        for found in asker.poll():
            return found
        asker.sleep((), 1000)


LATE = 1 << 62


def test_a_worker_sends_the_text_to_the_nodes_and_returns_their_passages(start_node: Any, tmp_path: Path) -> None:
    whole, (_, even), (_, odd) = start_node(DOCUMENTS)[0], start_node(DOCUMENTS[::2]), start_node(DOCUMENTS[1::2])
    with retriever(tmp_path, even, odd) as asker:
        asker.warm_up()
        for text, wanted in itertools.product(TEXTS, (None, SOME_FILTER)):
            ticket = asker.submit(query_of(text, "all", 10, "decode", LATE, filter=wanted))
            found = ended(asker)
            assert (found.ticket, found.error, found.build, found.partial) == (ticket, None, "", False)
            assert list(found.passages) == nearest(whole, text, filter=wanted)
            assert found.embedded_ns > 0


def test_missing_nodes_are_reported_to_the_worker(start_node: Any, tmp_path: Path) -> None:
    _, even = start_node(DOCUMENTS[::2])
    with retriever(tmp_path, even, UNREACHABLE_URL, missing="partial") as asker:
        asker.submit(query_of("cats", "all", 10, "prefill", LATE))
        assert ended(asker).partial
    with retriever(tmp_path, even, UNREACHABLE_URL) as asker:
        asker.submit(query_of("cats", "all", 10, "prefill", LATE))
        assert isinstance(ended(asker).error, Unavailable)
        with pytest.raises(InvalidRequest, match="on other nodes") as caught:
            asker.submit(query_of("cats", "all", 10, "prefill", LATE, hybrid=0.5))
        assert caught.value.param == "hybrid"


def test_a_cancelled_query_is_never_returned(tmp_path: Path, start_node: Any) -> None:
    _, even = start_node(DOCUMENTS)
    with retriever(tmp_path, even) as asker:
        dropped = asker.submit(query_of("cats", "all", 10, "decode", LATE))
        asker.cancel(dropped)
        kept = asker.submit(query_of("dogs", "all", 10, "decode", LATE))
        assert ended(asker).ticket == kept
        assert asker.poll() == []
