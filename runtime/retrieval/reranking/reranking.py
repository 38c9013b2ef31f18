"""Reranking of the passages that searches find, within a deadline, in turns by API key.

```
query, k ──▶ search for `candidates` of it ──▶ score each against the query ──▶ the k best, by score
                                                    └─ not in time, or failed ──▶ the k nearest, as they were
```
Like `RetrievalSteps` it yields what it waits for, so nothing here waits or knows a loop.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from runtime.errors import DeadlineExceeded, RerankerFailed, TrinityError
from runtime.node.metrics.table import WorkerTable
from runtime.node.metrics.worker_metrics import RerankOutcome, RetrievingMetrics
from runtime.node.placement.plan import NodePlan
from runtime.retrieval.embedding.embedder import embedding_text
from runtime.retrieval.fair_threads import FairThreads
from runtime.retrieval.passages import RERANKED, Passage
from runtime.retrieval.reranking.reranker import Batch, Reranker, Scored, load_reranker
from runtime.retrieval.retrieval_steps import Steps, Until
from runtime.retrieval.search.query import Query

DEPTH = 4
"""So many times the passages wanted are searched for …"""
MAX_CANDIDATES = 64
"""… up to this number: each is a pass through the model."""
_SHARE = 0.9  # of the time that a request has left: the rest is for its answer
_PART_CHARACTERS = 65_536  # of texts that are prepared at once

log = logging.getLogger(__name__)
OnEnd = Callable[[RerankOutcome, int, float], None]
T = TypeVar("T")


class Reranking:
    """A reranker, and the threads that all searches of a process share.

    `max_k`: maximum of a search's k. `on_end` is called with the outcome, the number of pairs and the seconds.
    `threads`: of a reranker that computes in this process.
    """

    def __init__(
        self,
        reranker: Reranker,
        max_k: int,
        on_end: OnEnd,
        threads: int = 1,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.name = reranker.name
        self._reranker, self._max_k, self._on_end, self._clock = reranker, max_k, on_end, clock
        self._concurrency = reranker.max_concurrency if reranker.max_concurrency > 1 else threads
        self._threads = FairThreads(self._concurrency, "reranking")
        self._failing = False

    load = staticmethod(load_reranker)

    @classmethod
    def of_plan(cls, plan: NodePlan, reranker: Reranker | None, table: WorkerTable, threads: int) -> "Reranking | None":
        """Return the reranking of a node's process, counted in its table; None without a reranker."""
        if reranker is None:
            return None

        def on_end(outcome: RerankOutcome, pairs: int, seconds: float) -> None:
            table.add(RetrievingMetrics.RERANKS[outcome])
            table.add(RetrievingMetrics.RERANK_PAIRS, pairs)
            table.observe(RetrievingMetrics.RERANK_TIME, seconds)

        return cls(reranker, plan.max_k, on_end, threads)

    def candidates(self, query: Query) -> Query:
        """Return the query for the passages to rerank."""
        k = query.spec.k
        wanted = max(k, min(DEPTH * k, MAX_CANDIDATES, self._max_k))
        return replace(query, spec=replace(query.spec, k=wanted))

    def retrieve(self, query: Query, retrieve: Callable[[Query], Steps]) -> Steps:
        """Return the steps of a retrieval with reranking, if the query wants it, from those of one without."""
        if query.rerank is None:
            return (yield from retrieve(query))
        retrieved = yield from retrieve(self.candidates(query))
        times = replace(retrieved.times, read_ns=self._clock())
        passages, ranking = yield from self.rank(query, retrieved.passages)
        return replace(retrieved, passages=tuple(passages), ranking=ranking, times=times)

    def rank(self, query: Query, passages: Sequence[Passage]) -> Generator[Until, Any, tuple[list[Passage], str]]:
        """Return the steps to the passages of a query in their final order, and whether they were reranked
        (`FoundPassages.ranking`)."""
        assert query.rerank is not None, "it wants it"
        k, now = query.spec.k, self._clock()
        limit_ns = query.rerank.timeout_s * 1e9
        if query.spec.deadline_ns:
            limit_ns = min(limit_ns, _SHARE * (query.spec.deadline_ns - now))
        texts = [embedding_text(passage.title, passage.text) for passage in passages]
        try:
            scored = yield from self.score(query.text, texts, query.spec.flow, now + int(limit_ns))
        except TrinityError as error:
            self._report(error)
            return list(passages[:k]), error.code
        self._failing = False
        best = sorted(zip(scored.scores, passages, strict=True), key=lambda pair: -pair[0])[:k]
        least = query.rerank.min_score
        return [replace(one, score=score) for score, one in best if score >= least], RERANKED

    def score(self, query: str, texts: Sequence[str], flow: int, until_ns: int) -> Generator[Until, Any, Scored]:
        """Return the steps to the scores of texts, in their order. Raises `TrinityError`: after `until_ns`
        `DeadlineExceeded`."""
        begin_ns = self._clock()
        scores, tokens = [0.0] * len(texts), 0
        running: deque[tuple[Sequence[int], Future[Scored]]] = deque()
        outcome: RerankOutcome | None = None  # of one that is cancelled
        try:
            for part in _parts(texts):
                prepare = partial(self._reranker.batches, query, texts[part])
                batches: Sequence[Batch] = yield Until(self._submit(flow, prepare), until_ns)
                for batch in batches:
                    rows = [part.start + row for row in batch.rows]
                    running.append((rows, self._submit(flow, partial(batch.score, until_ns))))
                    if len(running) == self._concurrency:
                        tokens += yield from _collect(running, scores, until_ns)
            while running:
                tokens += yield from _collect(running, scores, until_ns)
            outcome = "reranked"
            return Scored(scores, tokens)
        except DeadlineExceeded:
            outcome = "late"
            raise
        except TrinityError:
            outcome = "failed"
            raise
        finally:
            for _, future in running:
                future.cancel()
            if outcome is not None:
                self._on_end(outcome, len(texts), (self._clock() - begin_ns) / 1e9)

    def close(self) -> None:
        """Stop the threads, without waiting for one that is in a call. Idempotent."""
        self._threads.close(0.0)

    def _submit(self, flow: int, job: Callable[[], T]) -> Future[T]:
        def run() -> T:
            try:
                return job()
            except TrinityError:
                raise
            except Exception as error:  # of a library we do not know: the next texts may be fine
                raise RerankerFailed(f"the reranker {self.name} failed: {error}") from error

        return self._threads.submit(flow, run)

    def _report(self, error: TrinityError) -> None:
        """Log the first of several failures in a row. Those for lack of time are only counted."""
        if not isinstance(error, DeadlineExceeded):
            if not self._failing:
                log.warning("passages stay in the order of their search: %s", error.message)
            self._failing = True


def _collect(
    running: deque[tuple[Sequence[int], Future[Scored]]], scores: list[float], until_ns: int
) -> Generator[Until, Any, int]:
    """Wait for the first batch that runs; store its scores and return its number of tokens."""
    rows, future = running.popleft()
    scored: Scored = yield Until(future, until_ns)
    for row, score in zip(rows, scored.scores, strict=True):
        scores[row] = score
    return scored.tokens


def _parts(texts: Sequence[str]) -> Iterator[slice]:
    """Yield the parts of texts that are prepared at once: between two of them, others have their turn."""
    begin = characters = 0
    for number, text in enumerate(texts):
        if number > begin and characters + len(text) > _PART_CHARACTERS:
            yield slice(begin, number)
            begin, characters = number, 0
        characters += len(text)
    if texts:
        yield slice(begin, len(texts))
