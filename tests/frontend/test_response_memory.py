"""Responses that nobody reads: their memory is bounded over all connections, and other clients are served."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from runtime.errors import Overloaded, ResponseTooLarge
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.passages import MAX_PASSAGES_BYTES, OnRead, Passage, check_size
from runtime.retrieval.search.query import Query
from runtime.serving.frontend.requests import MAX_UNREAD_PIECES, Request
from runtime.serving.http.request_context import RequestContextMiddleware
from runtime.serving.http.response_memory import (
    CONNECTION_BYTES,
    MAX_RESPONSE_BYTES,
    SLOW_BYTES_S,
    ResponseMemory,
    UnsentResponse,
)
from runtime.serving.http.service import Settings
from runtime.serving.messages import Generation, Sampling, Tokens
from runtime.testing.waiting import eventually
from tests.frontend.cluster import Cluster, FakeSearch
from tests.frontend.fake_workers import WAIT

MIB = 1 << 20
HEAD = b"POST /v1/retrieval HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TEXT = "x" * MIB


# ---- the count


@dataclass
class Memory:
    """A memory of 10 MiB with a clock, and the numbers of the responses that were disconnected."""

    now_s: float = 100.0
    dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = ResponseMemory(10 * MIB, clock=lambda: self.now_s)

    def response(self, number: int, size: int = 0, *, sending: bool = True) -> UnsentResponse:
        made = self.memory.begin(lambda: self.dropped.append(number))
        made.reserve(size)
        if sending:
            self.memory.start_sending(made)
        return made


def test_responses_count_until_they_are_released_and_beyond_the_limit_they_are_refused() -> None:
    held = Memory()
    first, _ = held.response(1, 6 * MIB), held.response(2, 3 * MIB)
    with pytest.raises(Overloaded, match=r"9,437,184 bytes wait .* this one needs 2,097,152; the limit is 10,485,760"):
        held.response(3, 2 * MIB)
    first.reserve(7 * MIB)  # as many more as there is room for
    first.reserve(MIB)
    held.response(3, 6 * MIB)
    assert held.memory.unsent_bytes == 10 * MIB
    first.release()
    first.release()
    assert (held.memory.unsent_bytes, held.dropped) == (9 * MIB, [])


def test_clients_that_read_too_slowly_are_disconnected_when_others_need_the_memory() -> None:
    held = Memory()
    silent, reading, _ = (held.response(number, 3 * MIB) for number in (1, 2, 3))
    held.now_s += 2.0
    reading.sent_bytes = SLOW_BYTES_S  # within one second more than the second of grace
    held.response(4, MIB)
    assert held.dropped == []  # there was room
    held.response(5, 2 * MIB)
    assert held.dropped == [1]  # no more than necessary
    silent.release()
    assert held.memory.unsent_bytes == 9 * MIB
    held.response(6, 4 * MIB)
    assert held.dropped == [1, 3]
    with pytest.raises(Overloaded):
        held.response(7, 8 * MIB)


def test_a_response_over_its_limit_is_refused_with_both_sizes() -> None:
    with pytest.raises(ResponseTooLarge, match=r"67,108,865 bytes, the limit is 67,108,864: ask for less"):
        ResponseMemory().begin(lambda: None).reserve(MAX_RESPONSE_BYTES + 1)


# ---- connections


class LongTexts(FakeSearch):
    """A search whose passages have a megabyte each."""

    read = 0

    def passages(self, query: Query, on_read: OnRead) -> list[Passage]:
        for number in range(query.spec.k):
            self.read += 1
            check_size((number + 1) * len(TEXT), query.spec.k)
            on_read((number + 1) * len(TEXT))
        return [Passage(str(number), "", 0.0, TEXT) for number in range(query.spec.k)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    settings = Settings(model="tiny", collections={"docs": 4}, max_unsent_bytes=80 * MIB)
    with Cluster(
        settings=settings, search=LongTexts(about=CollectionSummary(True, metric="cosine")), send_buffer=4096
    ) as cluster:
        yield cluster


def search(http: httpx.Client, k: int) -> httpx.Response:
    return http.post("/v1/retrieval", json={"collection": "docs", "query": "q", "k": k})


def ask(cluster: Cluster, k: int) -> socket.socket:
    """Send a search and read nothing."""
    body = json.dumps({"collection": "docs", "query": "q", "k": k}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(WAIT)
    connection.connect(("127.0.0.1", int(cluster.url.rsplit(":", 1)[1])))
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def test_silent_clients_take_bounded_memory_and_others_are_served(cluster: Cluster) -> None:
    with contextlib.ExitStack() as silent, cluster.http() as http:
        for _ in range(60):
            silent.enter_context(ask(cluster, 8))
        eventually(
            lambda: len(cluster.search.calls) >= 60, WAIT, "all to have asked"
        )  # the first may be cut off by then
        assert len(search(http, 1).json()["passages"][0]["text"]) == MIB
        assert http.get("/v1/models").status_code == 200

        def served() -> bool:
            """A large response finds room, once silent clients are slow enough to be disconnected."""
            return search(http, 8).status_code == 200

        eventually(served, WAIT, "room for a large response")
        assert cluster.connections < 61
        kept = cluster.on_loop(lambda: [protocol.transport.get_write_buffer_size() for protocol in cluster.protocols])
        assert max(kept) <= 3 * CONNECTION_BYTES  # a part, and what the transport may hold before it asks for no more


def test_a_response_beyond_the_limit_is_refused_before_its_texts_are_read(cluster: Cluster) -> None:
    with cluster.http() as http:
        refused = search(http, 64).json()["error"]
        assert (refused["code"], refused["param"]) == ("response_too_large", "k")
        assert (
            f"the 64 passages have {33 * MIB:,} bytes or more, the limit is {MAX_PASSAGES_BYTES:,}"
            in refused["message"]
        )
        assert cluster.search.read == 33
        assert search(http, 1).status_code == 200
    cluster.wait(lambda: not cluster.held())


def test_a_part_of_a_stream_counts_only_until_it_was_read() -> None:
    memory, held = ResponseMemory(), list[int]()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for size in (MIB, 10):
            await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
            held.append(memory.unsent_bytes)
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Message) -> None:
        held.append(memory.unsent_bytes)

    async def receive() -> Message:
        raise AssertionError

    app = RequestContextMiddleware(stream, str, lambda: False, lambda *response: None, memory)
    asyncio.run(app({"type": "http", "path": "/x", "headers": []}, receive, send))
    parts = MIB // CONNECTION_BYTES
    assert held == [*[MIB] * (1 + parts), 0, 0, 0, 0]


def test_a_store_searched_for_several_texts_counts_them_all(cluster: Cluster) -> None:
    with cluster.http() as http:
        body = {"query": list("abcdefgh"), "max_num_results": 5}
        refused = http.post("/v1/vector_stores/docs/search", json=body).json()["error"]
        assert refused["code"] == "response_too_large"
        assert "the limit is 67,108,864: ask for less in one request" in refused["message"]


# ---- answers


def test_an_answer_whose_citations_are_too_long_is_refused_and_its_workers_are_free(cluster: Cluster) -> None:
    with cluster.http() as http:
        body = {"model": "tiny", "prompt": "cite=400000 say=3", "retrieval": {"collection": "docs", "k": 2}}
        assert len(http.post("/v1/completions", json=body).content) > 800_000
        refused = http.post("/v1/completions", json=body | {"prompt": "cite=600000 say=3"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "response_too_large")
        assert "bytes, the limit of an answer is 1,048,576" in refused.json()["error"]["message"]
    cluster.wait(lambda: not cluster.held())


async def test_an_engine_waits_for_the_reader_of_its_pieces() -> None:
    asked = Request("r", Generation(Sampling(16), 0, 1, prompt="x"))
    for _ in range(MAX_UNREAD_PIECES + 1):
        await asked.wait_for_reader()
        asked.put(Tokens("r", "a", (1,)))
    waiting = asyncio.create_task(asked.wait_for_reader())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(await asked.next_batch()) == MAX_UNREAD_PIECES + 1
    await waiting
