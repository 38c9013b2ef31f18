"""From a text to passages: embedded on a thread of its own, asked of the pool, ended once whatever happens."""

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
from runtime.retrieval.passages import Passage
from runtime.retrieval.retriever import EmbeddingResult, EmbeddingThreads, RetrievalResult, Retriever
from runtime.retrieval.search.query import Query, SearchResult

SOON_S = 60.0


class Embedder:
    """Embeds a text as its length, when `gate` is open; "bad" and "broken" fail."""

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
    """Answers every vector with its first number, at the next poll."""

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
        assert poller.poll(timeout_ms), "nothing woke the sleeper"

    def close(self) -> None:
        pass


class Stand:
    def __init__(self) -> None:
        self.now_ns = 0
        self.registry, self.client = Registry(), Client()
        self.retriever = Retriever(self.registry, self.client, lambda: self.now_ns)  # type: ignore[arg-type]

    def ask(self, text: str, deadline_ns: int = 1000, wanted: bytes = b"") -> int:
        return self.retriever.submit(text, "docs", 4, stage="decode", deadline_ns=deadline_ns, filter=wanted)

    def until_embedded(self) -> list[RetrievalResult]:
        """The next vector, passed on; what has ended by it."""
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
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    made.registry.lengths.gate.set()
    made.retriever.close()


def test_who_asks_goes_on_while_the_text_is_embedded_and_is_woken_by_its_vector(stand: Stand) -> None:
    ticket = stand.ask("four")
    assert stand.retriever.poll() == []
    stand.now_ns = 7
    stand.registry.lengths.gate.set()
    (found,) = stand.until_found()
    assert (found.ticket, found.error, [p.id for p in found.passages]) == (ticket, None, ["4"])
    assert found.embedded_ns == 7


def test_every_text_comes_back_under_its_own_ticket(stand: Stand) -> None:
    tickets = {stand.ask("x" * length): str(length) for length in (3, 1, 2)}
    stand.registry.lengths.gate.set()
    assert {found.ticket: found.passages[0].id for found in stand.until_found(3)} == tickets
    assert stand.retriever.poll() == []


def test_a_text_that_is_not_embedded_in_time_ends_at_its_deadline_and_is_not_searched(stand: Stand) -> None:
    ticket = stand.ask("hangs", deadline_ns=1000)
    stand.now_ns = 999
    assert stand.retriever.poll() == []
    stand.now_ns = 1000
    (found,) = stand.retriever.poll()
    assert found.ticket == ticket
    assert isinstance(found.error, DeadlineExceeded)
    stand.registry.lengths.gate.set()
    stand.ask("later", deadline_ns=5000)
    assert [found.passages[0].id for found in stand.until_found()] == ["5"]
    assert stand.client.submitted == [5.0]


def test_a_cancelled_text_that_waits_is_not_embedded(stand: Stand) -> None:
    stand.ask("first")
    assert stand.registry.lengths.began.wait(SOON_S)
    stand.retriever.cancel(stand.ask("second"))
    last = stand.ask("third one")
    stand.registry.lengths.gate.set()
    assert last in {found.ticket for found in stand.until_found(2)}
    assert stand.registry.lengths.seen == ["first", "third one"]


def test_a_cancelled_search_is_cancelled_in_the_pool(stand: Stand) -> None:
    stand.registry.lengths.gate.set()
    ticket = stand.ask("four")
    while not stand.client.submitted:
        stand.retriever.sleep((), int(SOON_S * 1e3))
        stand.retriever.forward_embeddings()
    stand.retriever.cancel(ticket)
    assert stand.client.cancelled == [101]
    assert stand.retriever.poll() == []


@pytest.mark.parametrize(("text", "kind"), [("bad", InvalidRequest), ("broken", ModelError)])
def test_a_text_that_cannot_be_embedded_ends_and_the_next_one_is(stand: Stand, text: str, kind: type) -> None:
    stand.registry.lengths.gate.set()
    ticket = stand.ask(text)
    stand.ask("fine")
    failed, fine = sorted(stand.until_found(2), key=lambda found: found.ticket)
    assert failed.ticket == ticket
    assert isinstance(failed.error, kind)
    assert fine.error is None


def test_a_vector_that_the_pool_has_no_room_for_ends_its_query(stand: Stand) -> None:
    stand.client.full = True
    stand.registry.lengths.gate.set()
    stand.ask("four")
    (found,) = stand.until_found()
    assert isinstance(found.error, Overloaded)


def test_an_attribute_that_was_stored_a_moment_ago_is_waited_for_until_the_pools_tell_of_it(stand: Stand) -> None:
    stand.registry.stored = b"new"
    ticket = stand.ask("four", wanted=b"new")
    assert stand.until_embedded() == []
    assert (stand.retriever.poll(), stand.client.submitted) == ([], [])
    stand.client.known = b"new"
    (found,) = stand.until_found()
    assert (found.ticket, found.error, [p.id for p in found.passages]) == (ticket, None, ["4"])
    assert stand.retriever.poll() == []


@pytest.mark.parametrize(("deadline_ns", "waited_ns"), [(1 << 40, 2_000_000_000), (1000, 1000)])
def test_it_is_not_waited_for_longer_than_two_seconds_nor_beyond_the_deadline(
    stand: Stand, deadline_ns: int, waited_ns: int
) -> None:
    stand.registry.stored = b"new"
    stand.ask("four", deadline_ns, b"new")
    assert stand.until_embedded() == []
    stand.now_ns = waited_ns - 1
    assert stand.retriever.poll() == []
    stand.now_ns = waited_ns
    (found,) = stand.retriever.poll()
    assert isinstance(found.error, InvalidFilter)
    assert stand.retriever.poll() == []


def test_an_attribute_that_no_document_has_is_refused_at_once_and_a_cancelled_one_is_forgotten(stand: Stand) -> None:
    stand.ask("four", wanted=b"none has it")
    (found,) = stand.until_embedded()
    assert isinstance(found.error, InvalidFilter)
    stand.registry.stored = b"new"
    cancelled = stand.ask("four", wanted=b"new")
    assert stand.until_embedded() == []
    stand.retriever.cancel(cancelled)
    stand.client.known = b"new"
    assert (stand.retriever.poll(), stand.client.submitted) == ([], [])


def test_more_texts_than_may_wait_are_refused_with_the_limit() -> None:
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


def test_an_embedder_that_hangs_does_not_hold_up_the_end() -> None:
    embedder, thread = Embedder(), EmbeddingThreads(end_s=0.01)
    thread.submit(0, embedder, "hangs")
    thread.close()
    embedder.gate.set()


def test_an_embedder_that_waits_for_its_server_holds_up_nobody_else() -> None:
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
