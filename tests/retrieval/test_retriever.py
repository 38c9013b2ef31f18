"""The retriever: embeds texts in a thread, queries the pool, and ends every query exactly once."""

from collections.abc import Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import zmq

from runtime.errors import CollectionReplaced, DeadlineExceeded, InvalidFilter, InvalidRequest, ModelError, Overloaded
from runtime.node.worker_config import PoolSection
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.retrieval_steps import RetrievalResult
from runtime.retrieval.retriever import Retriever
from runtime.retrieval.search.query import Query, SearchResult
from runtime.testing.waiting import until
from tests.queries import query_of
from tests.retrieval.embedding_harness import SOON_S, Embedder


class Registry:
    """Collections that are embedded by `lengths`."""

    def __init__(self) -> None:
        self.now, self.lengths, self.stored = 0, Embedder(self), b""
        self.rebuilds = 0  # so many more results are of a build that is not open any more
        self.dims = {"docs": 1}

    def warm_up(self) -> None:
        pass

    def has_attributes(self, collection: str, wanted: bytes) -> bool:
        if wanted == b"wrong type":
            raise InvalidFilter("it is an integer", "filter")
        return wanted == self.stored

    def follow(self, collection: str, offered: Sequence[str]) -> None:
        self.followed = tuple(offered)

    def accept(self, collection: str, embedder: str, build: str = "") -> Any:
        return lambda identity: embedder == "lengths"

    def opening(self, collection: str) -> None:
        return None

    def embedder(self, collection: str) -> Embedder:
        return self.lengths

    def build_of(self, collection: str, identity: str) -> Any:
        if self.rebuilds:
            self.rebuilds -= 1
            raise CollectionReplaced("not open any more")
        return SimpleNamespace(
            get=lambda rows, on_read: [Document(str(row), "", "") for row in rows],
            get_known=lambda rows, since_ns, now_ns: None,
        )


class Client:
    """Pool client that answers every vector with its first number at the next poll."""

    reachable = True

    def __init__(self) -> None:
        self.submitted: list[float] = []
        self.results: list[SearchResult] = []
        self.cancelled: list[int] = []
        self.full, self.holds, self.known = False, False, b""
        self.polled = 0
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
        self.polled += 1
        if self.holds:
            return []
        results, self.results = self.results, []
        return results

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)

    def sleep(self, sockets: Sequence[Any], timeout_ms: int) -> None:
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        woken = poller.poll(timeout_ms)
        assert woken or timeout_ms < SOON_S * 1e3, "nothing woke the retriever"

    def close(self) -> None:
        pass


class RetrieverHarness:
    def __init__(self, end_s: float = 1.0) -> None:
        self.now_ns = 0
        self.registry, self.client = Registry(), Client()
        registry, client = cast("Any", self.registry), cast("Any", self.client)
        self.retriever = Retriever(registry, client, lambda: self.now_ns, end_s)

    def ask(self, text: str, deadline_ns: int = 1000, wanted: bytes = b"") -> int:
        return self.retriever.submit(query_of(text, "docs", 4, "decode", deadline_ns, filter=wanted))

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
    until(lambda: bool(harness.registry.lengths.batches))
    harness.retriever.cancel(harness.ask("second"))
    last = harness.ask("third one")
    harness.registry.lengths.gate.set()
    assert last in {found.ticket for found in harness.until_found(2)}
    assert harness.registry.lengths.batches == [["first"], ["third one"]]


def test_a_cancelled_search_is_cancelled_in_the_pool(harness: RetrieverHarness) -> None:
    harness.client.holds = True
    ticket = harness.ask("four")
    assert harness.until_embedded() == []
    assert harness.client.submitted
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


@pytest.mark.parametrize(("rebuilds", "build", "searches"), [(3, "", 4), (4, "", 4), (1, "first", 1)])
def test_a_retrieval_whose_collection_is_replaced_starts_again_at_most_four_times_and_not_if_bound_to_a_build(
    harness: RetrieverHarness, rebuilds: int, build: str, searches: int
) -> None:
    harness.registry.rebuilds = rebuilds
    harness.registry.lengths.gate.set()
    ticket = harness.retriever.submit(query_of("four", "docs", 4, "decode", 1000), build)
    (found,) = harness.until_found()
    assert (found.ticket, len(harness.client.submitted)) == (ticket, searches)
    assert harness.registry.lengths.batches == [["four"]], "its vector is kept"
    assert (found.error is None) is (rebuilds == 3)
    assert found.error is None or isinstance(found.error, CollectionReplaced)


def test_a_hanging_embedder_does_not_block_close() -> None:
    harness = RetrieverHarness(end_s=0.01)
    harness.ask("hangs")
    harness.retriever.close()
    harness.registry.lengths.gate.set()
