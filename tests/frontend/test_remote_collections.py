"""Collections whose shards are on other nodes: real frontends over HTTP, each with a part of the documents."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from runtime.checks.remote import findings
from runtime.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidFilter,
    InvalidRequest,
    ResponseTooLarge,
    TrinityError,
    Unavailable,
)
from runtime.node.config import NodeConfig
from runtime.node.remote_config import RemoteSection
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.passages import FoundPassages, OnRead, Passage, ignore_size
from runtime.retrieval.search.query import Query
from runtime.serving.http.remote_collections import CollectionRouter
from runtime.serving.http.service import NoCollections, Settings
from tests.frontend.cluster import Cluster
from tests.frontend.fake_workers import run
from tests.frontend.remote_nodes import DOCUMENTS, HASHING, KEY, SOME_FILTER, UNREACHABLE_URL, raw_server, url_of
from tests.queries import query_of


@contextlib.asynccontextmanager
async def remote(tmp_path: Path, *nodes: str, **options: Any) -> AsyncIterator[CollectionRouter]:
    (tmp_path / "key").write_text(KEY)
    options = {"timeout_s": 60.0} | options
    section = RemoteSection("all", nodes, "docs", api_key_file=str(tmp_path / "key"), **options)
    found = CollectionRouter(NoCollections(), [section])
    looking = asyncio.create_task(found.remote.run())
    try:
        yield found
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def ask(
    search: Any,
    query: str | None = "cats purr",
    *,
    timeout_s: float = 60.0,
    on_read: OnRead = ignore_size,
    **changed: Any,
) -> Awaitable[list[Passage]]:
    options: dict[str, Any] = {"collection": "all", "k": 10, "text": query} | changed
    found: Awaitable[list[Passage]] = search.search(
        query_of(**options), on_embedded=lambda: None, on_read=on_read, timeout_s=timeout_s
    )
    return found


def test_a_collection_on_two_nodes_is_searched_like_one_index(start_node: Any, tmp_path: Path) -> None:
    whole, (_, even), (_, odd) = start_node(DOCUMENTS)[0], start_node(DOCUMENTS[::2]), start_node(DOCUMENTS[1::2])

    async def test() -> None:
        async with remote(tmp_path, even, odd + "/v1") as found:
            for changed in (
                {},
                {"query": "dogs bark", "k": 25},
                {"filter": SOME_FILTER},
                {"query": None, "vector": HASHING.embed(["birds sing"], "query")[0].tolist()},
            ):
                one = await ask(whole, **({"filter": None} | changed))
                assert len(one) == changed.get("k", 10)
                assert await ask(found, **changed) == sorted(one, key=lambda passage: passage.distance)
            assert found.unavailable() == {}
            assert (found.summary("all").metric, found.summary("all").dim) == ("cosine", 64)

    run(test())


def test_a_hybrid_search_is_refused(start_node: Any, tmp_path: Path) -> None:
    _, url = start_node(DOCUMENTS)

    async def test() -> None:
        async with remote(tmp_path, url) as both:
            with pytest.raises(InvalidRequest, match="other nodes") as caught:
                await ask(both, hybrid=0.5)
            assert caught.value.param == "hybrid"
            assert len(await ask(both, hybrid=0.0)) == 10

    run(test())


def test_a_search_without_a_node_is_refused_and_names_the_node(start_node: Any, tmp_path: Path) -> None:
    _, even = start_node(DOCUMENTS[::2])

    async def test() -> None:
        async with remote(tmp_path, even, UNREACHABLE_URL) as found:
            with pytest.raises(Unavailable, match=UNREACHABLE_URL):
                await ask(found)
            assert list(found.unavailable()) == ["all"]

    run(test())


def test_with_partial_results_enabled_the_answer_of_the_remaining_nodes_is_marked_partial(
    start_node: Any, tmp_path: Path
) -> None:
    half, even = start_node(DOCUMENTS[::2])

    async def test() -> None:
        async with remote(tmp_path, UNREACHABLE_URL, even, missing="partial") as found:
            answered = await ask(found)
            assert FoundPassages.of(answered).partial
            assert answered == await ask(half, filter=None)
            assert found.unavailable() == {}
        async with remote(tmp_path, UNREACHABLE_URL, missing="partial") as found:
            with pytest.raises(Unavailable, match=UNREACHABLE_URL):
                await ask(found)

    run(test())


def test_doctor_reports_which_nodes_of_a_collection_are_up(start_node: Any, tmp_path: Path) -> None:
    _, even = start_node(DOCUMENTS[::2])
    (tmp_path / "key").write_text(KEY)
    key = str(tmp_path / "key")
    section = RemoteSection("all", (even + "/", UNREACHABLE_URL), "docs", api_key_file=key, timeout_s=60.0)
    for missing, level in (("refuse", "error"), ("partial", "warning")):
        reported_summary = list(findings(NodeConfig(remote=(replace(section, missing=missing),))))
        assert [(one.level, one.subject) for one in reported_summary] == [
            ("ok", f"remote all at {even}"),
            (level, f"remote all at {UNREACHABLE_URL}"),
        ]
        assert reported_summary[0].text == "hashing-64, 64 dimensions, cosine"


def test_a_recovered_node_is_used_again(start_node: Any, tmp_path: Path) -> None:
    half, even = start_node(DOCUMENTS[::2])
    ready, half.reported_summary = (
        half.reported_summary,
        CollectionSummary(dim=64, metric="cosine", embedder="hashing-64"),
    )

    async def test() -> None:
        async with remote(tmp_path, even) as found:
            with pytest.raises(Unavailable, match="its documents cannot be used"):
                await ask(found)
            half.reported_summary = ready
            await found.remote.probe()
            assert len(await ask(found)) == 10

    run(test())


def test_nodes_with_different_embedders_are_not_merged(start_node: Any, tmp_path: Path) -> None:
    (_, even), (other, odd) = start_node(DOCUMENTS[::2]), start_node(DOCUMENTS[1::2])
    other.reported_summary = CollectionSummary(True, dim=64, metric="cosine", embedder="another")

    async def test() -> None:
        async with remote(tmp_path, even, odd) as found:
            with pytest.raises(Unavailable, match=r"the others have (hashing-64|another), 64 dimensions"):
                await ask(found)

    run(test())


def test_a_silent_node_costs_one_timeout_and_a_short_deadline_does_not_mark_it_down(tmp_path: Path) -> None:
    async def test() -> None:
        store = (
            b'{"status": "completed", "metadata": {"embedder": "hashing-64", "dimensions": "64", "metric": "cosine"}}'
        )
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(store)
        silent = await raw_server(head + store, b"GET")  # and to a search nothing
        async with silent, remote(tmp_path, url_of(silent), timeout_s=0.5) as found:
            while found.unavailable():  # not probed yet, or not in time
                await found.remote.probe()
            with pytest.raises(DeadlineExceeded, match=url_of(silent)):
                await ask(found, timeout_s=0.01)
            assert found.unavailable() == {}
            with pytest.raises(DeadlineExceeded, match=url_of(silent)):
                await ask(found)
            with pytest.raises(Unavailable, match=url_of(silent)):
                await ask(found)

    run(test())


@pytest.mark.parametrize(
    "content",
    [
        b"SSH-2.0\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 500 No\r\ncontent-length: 3\r\n\r\nno!",
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 40000000\r\n\r\n" + b" " * 40_000_000,
    ],
    ids=["no http", "no store", "500", "redirect", "too long"],
)
def test_a_node_with_invalid_answers_is_down(content: bytes, start_node: Any, tmp_path: Path) -> None:
    _, even = start_node(DOCUMENTS[::2])

    async def test() -> None:
        server = await raw_server(content)
        async with server, remote(tmp_path, even, url_of(server)) as found:
            with pytest.raises(Unavailable, match=url_of(server)):
                await ask(found)

    run(test())


def test_a_request_refused_by_a_node_is_the_callers_error_and_the_node_stays_up(
    start_node: Any, tmp_path: Path
) -> None:
    (_, even), (_, odd) = start_node(DOCUMENTS[::2]), start_node(DOCUMENTS[1::2])

    async def test() -> None:
        async with remote(tmp_path, even, odd) as found:
            with pytest.raises(InvalidFilter, match="no document has the attribute 'm'"):
                await ask(found, filter={"type": "eq", "key": "m", "value": 1})
            assert len(await ask(found)) == 10

    run(test())


def test_what_all_nodes_send_together_is_bounded(
    start_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, even), (_, odd) = start_node(DOCUMENTS[::2]), start_node(DOCUMENTS[1::2])
    sizes: list[int] = []

    async def test() -> None:
        async with remote(tmp_path, even, odd) as found:
            assert len(await ask(found, on_read=sizes.append)) == 10
            received = max(sizes)  # of both nodes
            assert received > 1.5 * sizes[0]
            monkeypatch.setattr("runtime.retrieval.passages.MAX_PASSAGES_BYTES", received - 1)
            with pytest.raises(ResponseTooLarge, match=f"{received:,} bytes or more"):
                await ask(found)
            monkeypatch.undo()
            assert len(await ask(found)) == 10  # both nodes are still up

    run(test())


def test_a_wrong_key_is_reported_and_an_unreadable_key_file_is_an_error_at_start(
    start_node: Any, tmp_path: Path
) -> None:
    _, even = start_node(DOCUMENTS[::2])

    async def test() -> None:
        found = CollectionRouter(NoCollections(), [RemoteSection("all", (even,), "docs", timeout_s=60.0)])
        looking = asyncio.create_task(found.remote.run())
        with pytest.raises(TrinityError, match="API key"):
            await ask(found)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    run(test())
    with pytest.raises(ConfigError, match="remote all: the key cannot be read"):
        CollectionRouter(NoCollections(), [RemoteSection("all", (even,), api_key_file=str(tmp_path / "none"))])


def test_over_http_an_answer_without_some_nodes_is_marked_partial() -> None:
    class Some:
        async def search(self, asked: Query, **options: object) -> list[Passage]:
            return FoundPassages([Passage("a", "A", 0.5, "text")], partial=asked.text == "some")

        def summary(self, collection: str) -> CollectionSummary:
            return CollectionSummary(True, metric="cosine")

        def missing(self) -> list[str]:
            return []

        def unavailable(self) -> dict[str, str]:
            return {}

    settings = Settings(collections={"all": 0})
    search: Any = Some()
    with (
        Cluster(prefills=0, decodes=0, settings=settings, search=search, catalogue=search) as node,
        node.http() as http,
    ):
        for path in ("/v1/retrieval", "/v1/vector_stores/all/search"):
            assert http.post(path, json={"query": "some"}).json()["partial"] is True
            assert "partial" not in http.post(path, json={"query": "every"}).json()
