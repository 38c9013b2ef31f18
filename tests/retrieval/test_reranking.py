"""Reranking of what searches find: order, candidates, limits of time, faults, turns of keys, counts."""

import threading
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import pytest
from msgspec.structs import replace

from runtime.errors import DeadlineExceeded, RerankerUnreachable, Unavailable
from runtime.retrieval.passages import RERANKED, Passage
from runtime.retrieval.reranking.reranker import Batch, Scored
from runtime.retrieval.reranking.reranking import DEPTH, MAX_CANDIDATES, Reranking
from runtime.retrieval.retrieval_steps import Until
from runtime.retrieval.retriever import Retriever
from runtime.retrieval.search.query import Query, Rerank
from tests.clock import Clock
from tests.queries import query_of
from tests.retrieval.embedding_harness import SOON_S
from tests.retrieval.test_retriever import Client, Registry

R = TypeVar("R")
WANTED = Rerank(1.0)


class ByLength:
    """Scores a text by its length, two at a time; waits for `gate`, then for one of `permits` if there are any."""

    name = "by-length"

    def __init__(self, max_concurrency: int = 1) -> None:
        self.max_concurrency = max_concurrency
        self.gate = threading.Event()
        self.gate.set()
        self.permits: threading.Semaphore | None = None
        self.begun = threading.Semaphore(0)
        self.error: Exception | None = None
        self.scored: list[tuple[str, ...]] = []
        self.prepared: list[int] = []

    def batches(self, query: str, texts: Sequence[str]) -> list[Batch]:
        self.prepared.append(len(texts))
        rows = [list(range(len(texts)))[first : first + 2] for first in range(0, len(texts), 2)]
        return [Batch(batch, partial(self.score, [texts[row] for row in batch])) for batch in rows]

    def score(self, texts: list[str], until_ns: int) -> Scored:
        self.begun.release()
        assert self.gate.wait(SOON_S)
        assert self.permits is None or self.permits.acquire(timeout=SOON_S)
        if self.error is not None:
            raise self.error
        self.scored.append(tuple(texts))
        return Scored([float(len(text)) for text in texts], len(texts))


class Harness:
    """Reranking with a virtual clock. `ended`: what was counted."""

    def __init__(self, max_concurrency: int = 1, max_k: int = 128, threads: int = 1) -> None:
        self.clock = Clock()
        self.reranker = ByLength(max_concurrency)
        self.ended: list[tuple[str, int]] = []
        self.reranking = Reranking(self.reranker, max_k, self.count, threads, self.clock)

    def count(self, outcome: str, pairs: int, seconds: float) -> None:
        self.ended.append((outcome, pairs))

    def drive(self, steps: Generator[Until, Any, R], begun: Until | None = None) -> R:
        """Run steps to their end, each to the end of its future unless its time is over. begun: the first of them."""
        try:
            step = begun or next(steps)
            while True:
                if step.until_ns <= self.clock():
                    step.future.cancel()
                    step = steps.throw(DeadlineExceeded("late"))
                    continue
                try:
                    outcome = step.future.result(SOON_S)
                except Exception as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(outcome)
        except StopIteration as end:
            return cast("R", end.value)

    def rank(self, query: Query, texts: Sequence[str]) -> tuple[list[tuple[str, float | None]], str]:
        found = [Passage(str(number), "", 0.1 * number, text) for number, text in enumerate(texts)]
        passages, ranking = self.drive(self.reranking.rank(query, found))
        return [(one.text, one.score) for one in passages], ranking


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.reranker.gate.set()
    made.reranking.close()


def wanting(k: int = 2, rerank: Rerank = WANTED, **options: Any) -> Query:
    return replace(query_of("question", k=k, **options), rerank=rerank)


def test_the_best_passages_are_returned_with_their_scores_ties_in_the_order_of_the_search(harness: Harness) -> None:
    assert harness.rank(wanting(3), ["b", "aaa", "c", "aa"]) == ([("aaa", 3.0), ("aa", 2.0), ("b", 1.0)], RERANKED)
    assert harness.ended == [("reranked", 4)]


@pytest.mark.parametrize(
    ("k", "max_k", "candidates"), [(1, 128, 4), (16, 128, 64), (20, 128, 64), (100, 128, 100), (8, 20, 20)]
)
def test_four_times_as_many_passages_are_searched_for_up_to_a_limit(k: int, max_k: int, candidates: int) -> None:
    assert (DEPTH, MAX_CANDIDATES) == (4, 64)
    assert Harness(max_k=max_k).reranking.candidates(wanting(k)).spec.k == candidates


def test_a_failure_leaves_the_passages_in_the_order_of_the_search(harness: Harness) -> None:
    harness.reranker.error = RerankerUnreachable("down")
    assert harness.rank(wanting(2, Rerank(1.0, 5.0)), ["b", "aaa", "c"]) == (
        [("b", None), ("aaa", None)],
        "reranker_unreachable",
    )
    harness.reranker.error = ZeroDivisionError("of a library")
    assert harness.rank(wanting(), ["b", "aaa"])[1] == "reranker_failed"
    assert harness.ended == [("failed", 3), ("failed", 2)]


def test_so_does_the_end_of_the_time_and_what_waits_is_dropped(harness: Harness) -> None:
    harness.clock.advance(1)
    assert harness.rank(wanting(2, Rerank(0.0)), ["b", "aaa", "c"]) == (
        [("b", None), ("aaa", None)],
        "deadline_exceeded",
    )
    assert harness.ended == [("late", 3)]
    assert harness.rank(wanting(), ["b"])[1] == RERANKED
    assert harness.reranker.scored == [("b",)], "the first list was not scored"


@pytest.mark.parametrize(("max_concurrency", "threads"), [(1, 3), (3, 1)])
def test_batches_run_at_once_on_as_many_threads_as_there_are_or_a_server_takes(
    max_concurrency: int, threads: int
) -> None:
    harness = Harness(max_concurrency, threads=threads)
    harness.reranker.gate.clear()
    running = threading.Thread(target=harness.rank, args=(wanting(), ["a"] * 12))
    running.start()
    for _ in range(3):
        assert harness.reranker.begun.acquire(timeout=SOON_S)
    harness.reranker.gate.set()
    running.join(SOON_S)
    assert sum(map(len, harness.reranker.scored)) == 12
    harness.reranking.close()


def test_a_short_list_of_one_key_does_not_wait_for_a_long_one_of_another(harness: Harness) -> None:
    reranker = harness.reranker
    reranker.permits = permits = threading.Semaphore(0)
    long = threading.Thread(target=harness.rank, args=(wanting(flow=1), ["long"] * 20))
    long.start()
    assert reranker.begun.acquire(timeout=SOON_S)
    short = harness.reranking.score("question", ["short"], 2, 1 << 62)
    preparing = next(short)
    permits.release()
    scoring = short.send(preparing.future.result(SOON_S))
    permits.release(10)
    harness.drive(short, scoring)
    long.join(SOON_S)
    assert reranker.scored.index(("short",)) <= 2
    assert len(reranker.scored) == 11


def test_long_texts_are_prepared_in_parts(harness: Harness) -> None:
    texts = ["a" * 40_000, "b" * 40_000, "c", "d"]
    scored = harness.drive(harness.reranking.score("q", texts, 0, 1 << 62))
    assert scored == Scored([40_000.0, 40_000.0, 1.0, 1.0], 4)
    assert harness.reranker.prepared == [1, 3]


def test_a_closed_reranking_leaves_the_order_of_the_search(harness: Harness) -> None:
    harness.reranking.close()
    assert harness.rank(wanting(), ["b", "aaa"])[1] == Unavailable.code


# ---- in a worker's loop


@pytest.fixture
def retriever(harness: Harness) -> Iterator[Retriever]:
    registry, client = Registry(), Client()
    registry.lengths.gate.set()
    made = Retriever(cast("Any", registry), cast("Any", client), harness.clock, reranking=harness.reranking)
    yield made
    made.close()


def until_ended(retriever: Retriever) -> Any:
    while True:
        if found := retriever.poll():
            return found[0]
        retriever.sleep((), int(SOON_S * 1e3))


def test_a_worker_gets_reranked_passages_and_the_time_before(retriever: Retriever, harness: Harness) -> None:
    ticket = retriever.submit(wanting(1))
    found = until_ended(retriever)
    assert (found.ticket, found.ranking, found.times.read_ns) == (ticket, RERANKED, harness.clock())
    assert [one.score is not None for one in found.passages] == [True]
    retriever.submit(replace(wanting(1), rerank=None))
    found = until_ended(retriever)
    assert (found.ranking, found.times.read_ns, found.passages[0].score) == ("", 0, None)


def test_a_worker_goes_on_without_a_reranker_that_hangs_and_ignores_its_late_result(
    retriever: Retriever, harness: Harness
) -> None:
    harness.reranker.gate.clear()
    retriever.submit(wanting(1, deadline_ns=harness.clock() + 60_000_000_000))
    while not harness.reranker.begun.acquire(blocking=False):
        assert retriever.poll() == []
    harness.clock.advance(0.999)
    assert retriever.poll() == []
    harness.clock.advance(0.001)
    (found,) = retriever.poll()
    assert (found.error, found.ranking, len(found.passages)) == (None, "deadline_exceeded", 1)
    harness.reranker.gate.set()
    retriever.submit(replace(wanting(1), rerank=None))
    assert until_ended(retriever).error is None
    assert retriever.poll() == []
