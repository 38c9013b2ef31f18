"""The retriever: embeds texts in a thread, queries the pool, and ends every query exactly once."""

import select
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zmq

from runtime.errors import DeadlineExceeded, InvalidFilter, InvalidRequest, ModelError, Overloaded
from runtime.node.config import PoolSection
from runtime.retrieval.embedding.embedder import TextKind
from runtime.retrieval.embedding_threads import EmbeddingResult, EmbeddingThreads
from runtime.retrieval.passages import Passage
from runtime.retrieval.retriever import RetrievalResult, Retriever
from runtime.retrieval.search.query import Query, SearchResult

SOON_S = 60.0


class Embedder:
    """Embeds a text as its length once `gate` is open; "bad" and "broken" fail."""

    name, dim, max_tokens = "lengths", 1, 1000

    def __init__(self, name: str = "lengths", max_concurrency: int = 1) -> None:
        self.name, self.max_concurrency = name, max_concurrency
        self.gate = threading.Event()
        self.began = threading.Event()
        self.seen: list[str] = []

    def count_tokens(self, text: str) -> int:
        return len(text)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> npt.NDArray[np.float32]:
        self.began.set()
        assert self.gate.wait(SOON_S)
        self.seen += texts
        if texts[0] == "bad":
            raise InvalidRequest("a bad text")
        if texts[0] == "broken":
            raise RuntimeError("a broken library")
        return np.array([[len(text)] for text in texts], np.float32)


class Registry:
    def __init__(self) -> None:
        self.lengths, self.stored = Embedder(), b""

    def has_attributes(self, collection: str, wanted: bytes) -> bool:
        if wanted == b"wrong type":
            raise InvalidFilter("it is an integer", "filter")
        return wanted == self.stored

    def follow(self, collection: str, offered: Sequence[str]) -> None:
        self.followed = tuple(offered)

    def accept(self, collection: str, embedder: str, build: str = "") -> Any:
        return lambda identity: embedder == "lengths"

    def embedder(self, collection: str) -> Embedder:
        return self.lengths

    def passages(self, collection: str, result: SearchResult) -> tuple[Passage, ...]:
        return tuple(Passage(str(row), "", 0.0, "") for row in result.ids)


class Client:
    """Pool client that answers every vector with its first number at the next poll."""

    remote = frozenset[str]()

    def __init__(self) -> None:
        self.submitted: list[float] = []
        self.results: list[SearchResult] = []
        self.cancelled: list[int] = []
        self.full, self.known = False, b""
        self.tickets, self.settings = count(101), PoolSection()

    @property
    def dispatcher(self) -> "Client":
        return self

    def submit(self, query: Query) -> None:
        if self.full:
            raise Overloaded("the ring is full")
        if query.spec.filter != self.known:
            raise InvalidFilter("there is no such attribute", "filter")
        assert isinstance(query.vector, np.ndarray)
        first = query.vector[0]
        self.submitted.append(float(first))
        self.results.append(SearchResult(query.ticket, np.array([int(first)]), np.zeros(1, np.float32)))

    def identities(self, collection: str) -> tuple[str, ...]:
        return ("first",)

    def poll(self) -> list[SearchResult]:
        results, self.results = self.results, []
        return results

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)

    def sleep(self, sockets: Sequence[Any], timeout_ms: int) -> None:
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        assert poller.poll(timeout_ms), "nothing woke the retriever"

    def close(self) -> None:
        pass


class RetrieverHarness:
    def __init__(self) -> None:
        self.now_ns = 0
        self.registry, self.client = Registry(), Client()
        self.retriever = Retriever(self.registry, self.client, lambda: self.now_ns)  # type: ignore[arg-type]

    def ask(self, text: str, deadline_ns: int = 1000, wanted: bytes = b"") -> int:
        return self.retriever.submit(text, "docs", 4, stage="decode", deadline_ns=deadline_ns, filter=wanted)

    def until_embedded(self) -> list[RetrievalResult]:
        """Forward the next vector; return the queries that ended."""
        self.registry.lengths.gate.set()
        self.retriever.sleep((), int(SOON_S * 1e3))
        return self.retriever.poll()

    def until_found(self, count: int = 1) -> list[RetrievalResult]:
        found: list[RetrievalResult] = []
        while len(found) < count:
            found += self.retriever.poll()
            if len(found) < count and not self.client.results:
                self.retriever.sleep((), int(SOON_S * 1e3))
        return found


@pytest.fixture
def harness() -> Iterator[RetrieverHarness]:
    made = RetrieverHarness()
    yield made
    made.registry.lengths.gate.set()
    made.retriever.close()


def test_embedding_does_not_block_the_caller_and_wakes_it(harness: RetrieverHarness) -> None:
    ticket = harness.ask("four")
    assert harness.retriever.poll() == []
    harness.now_ns = 7
    harness.registry.lengths.gate.set()
    (found,) = harness.until_found()
    assert (found.ticket, found.error, [p.id for p in found.passages]) == (ticket, None, ["4"])
    assert found.embedded_ns == 7


def test_every_text_returns_with_its_ticket(harness: RetrieverHarness) -> None:
    tickets = {harness.ask("x" * length): str(length) for length in (3, 1, 2)}
    harness.registry.lengths.gate.set()
    assert {found.ticket: found.passages[0].id for found in harness.until_found(3)} == tickets
    assert harness.retriever.poll() == []


def test_a_text_not_embedded_by_its_deadline_is_not_searched(harness: RetrieverHarness) -> None:
    ticket = harness.ask("hangs", deadline_ns=1000)
    harness.now_ns = 999
    assert harness.retriever.poll() == []
    harness.now_ns = 1000
    (found,) = harness.retriever.poll()
    assert found.ticket == ticket
    assert isinstance(found.error, DeadlineExceeded)
    harness.registry.lengths.gate.set()
    harness.ask("later", deadline_ns=5000)
    assert [found.passages[0].id for found in harness.until_found()] == ["5"]
    assert harness.client.submitted == [5.0]


def test_a_cancelled_queued_text_is_not_embedded(harness: RetrieverHarness) -> None:
    harness.ask("first")
    assert harness.registry.lengths.began.wait(SOON_S)
    harness.retriever.cancel(harness.ask("second"))
    last = harness.ask("third one")
    harness.registry.lengths.gate.set()
    assert last in {found.ticket for found in harness.until_found(2)}
    assert harness.registry.lengths.seen == ["first", "third one"]


def test_a_cancelled_search_is_cancelled_in_the_pool(harness: RetrieverHarness) -> None:
    harness.registry.lengths.gate.set()
    ticket = harness.ask("four")
    while not harness.client.submitted:
        harness.retriever.sleep((), int(SOON_S * 1e3))
        harness.retriever.forward_embeddings()
    harness.retriever.cancel(ticket)
    assert harness.client.cancelled == [101]
    assert harness.retriever.poll() == []


@pytest.mark.parametrize(("text", "kind"), [("bad", InvalidRequest), ("broken", ModelError)])
def test_a_failed_embedding_ends_its_query_and_the_next_one_works(
    harness: RetrieverHarness, text: str, kind: type
) -> None:
    harness.registry.lengths.gate.set()
    ticket = harness.ask(text)
    harness.ask("fine")
    failed, fine = sorted(harness.until_found(2), key=lambda found: found.ticket)
    assert failed.ticket == ticket
    assert isinstance(failed.error, kind)
    assert fine.error is None


def test_a_vector_refused_by_the_pool_ends_its_query(harness: RetrieverHarness) -> None:
    harness.client.full = True
    harness.registry.lengths.gate.set()
    harness.ask("four")
    (found,) = harness.until_found()
    assert isinstance(found.error, Overloaded)


def test_a_new_attribute_is_awaited_until_the_pools_offer_it(harness: RetrieverHarness) -> None:
    harness.registry.stored = b"new"
    ticket = harness.ask("four", wanted=b"new")
    assert harness.until_embedded() == []
    assert (harness.retriever.poll(), harness.client.submitted) == ([], [])
    harness.client.known = b"new"
    (found,) = harness.until_found()
    assert (found.ticket, found.error, [p.id for p in found.passages]) == (ticket, None, ["4"])
    assert harness.retriever.poll() == []


@pytest.mark.parametrize(("deadline_ns", "waited_ns"), [(1 << 40, 2_000_000_000), (1000, 1000)])
def test_a_new_attribute_is_awaited_at_most_two_seconds_and_until_the_deadline(
    harness: RetrieverHarness, deadline_ns: int, waited_ns: int
) -> None:
    harness.registry.stored = b"new"
    harness.ask("four", deadline_ns, b"new")
    assert harness.until_embedded() == []
    harness.now_ns = waited_ns - 1
    assert harness.retriever.poll() == []
    harness.now_ns = waited_ns
    (found,) = harness.retriever.poll()
    assert isinstance(found.error, InvalidFilter)
    assert harness.retriever.poll() == []


def test_an_unknown_attribute_is_refused_at_once_and_a_cancelled_wait_ends(harness: RetrieverHarness) -> None:
    harness.ask("four", wanted=b"none has it")
    (found,) = harness.until_embedded()
    assert isinstance(found.error, InvalidFilter)
    harness.registry.stored = b"new"
    cancelled = harness.ask("four", wanted=b"new")
    assert harness.until_embedded() == []
    harness.retriever.cancel(cancelled)
    harness.client.known = b"new"
    assert (harness.retriever.poll(), harness.client.submitted) == ([], [])


def test_a_value_of_the_wrong_type_for_a_new_attribute_is_refused_as_such(harness: RetrieverHarness) -> None:
    harness.ask("four", wanted=b"wrong type")  # the pools say that there is no such attribute
    (found,) = harness.until_embedded()
    assert str(found.error) == "it is an integer"


def test_queued_texts_are_bounded() -> None:
    embedder, thread = Embedder(), EmbeddingThreads(limit=2)
    thread.submit(0, embedder, "taken up")
    assert embedder.began.wait(SOON_S)
    thread.submit(1, embedder, "waits")
    thread.submit(2, embedder, "waits")
    with pytest.raises(Overloaded, match="2 texts wait"):
        thread.submit(3, embedder, "too many")
    embedder.gate.set()
    found: list[EmbeddingResult] = []
    while len(found) < 3:
        assert select.select([thread], [], [], SOON_S)[0]
        found += thread.poll()
    assert [embedded.ticket for embedded in found] == [0, 1, 2]
    thread.close()


def test_texts_of_several_keys_are_embedded_in_turns() -> None:
    embedder, thread = Embedder(), EmbeddingThreads()
    for ticket in range(5):
        thread.submit(ticket, embedder, "storm", flow=1)
    assert embedder.began.wait(SOON_S)
    thread.submit(5, embedder, "other", flow=2)
    embedder.gate.set()
    found: list[EmbeddingResult] = []
    while len(found) < 6:
        assert select.select([thread], [], [], SOON_S)[0]
        found += thread.poll()
    assert [embedded.ticket for embedded in found].index(5) == 1
    thread.close()


def test_a_hanging_embedder_does_not_block_close() -> None:
    embedder, thread = Embedder(), EmbeddingThreads(end_s=0.01)
    thread.submit(0, embedder, "hangs")
    thread.close()
    embedder.gate.set()


def test_an_embedder_waiting_for_its_server_does_not_block_others() -> None:
    slow, quick, threads = Embedder("slow", max_concurrency=2), Embedder("quick"), EmbeddingThreads()
    quick.gate.set()
    for ticket in range(3):
        threads.submit(ticket, slow, "waits")
    threads.submit(7, quick, "four")
    assert select.select([threads], [], [], SOON_S)[0]
    assert [embedded.ticket for embedded in threads.poll()] == [7]
    slow.gate.set()
    found: set[int] = set()
    while len(found) < 3:
        assert select.select([threads], [], [], SOON_S)[0]
        found |= {embedded.ticket for embedded in threads.poll()}
    assert found == {0, 1, 2}
    threads.close()
