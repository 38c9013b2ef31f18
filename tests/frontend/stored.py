"""Stored answers without a pool: the collection is searched by whoever asks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.node.config import AnswerCacheSection
from runtime.node.metrics.worker_metrics import CacheEvent
from runtime.node.placement.plan import ANSWERS
from runtime.retrieval.answer_store import AnswerStore
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.embedding.embedder import TextKind
from runtime.retrieval.live.reader import LiveReader
from runtime.retrieval.search.query import SearchResult
from runtime.serving.frontend.answer_cache import AnswerCache, CacheHit, CacheKey, Vector
from runtime.serving.frontend.requests import Piece
from runtime.testing.waiting import until
from tests.frontend.fakes import run


class Letters:
    """An embedder that sees which letters a text has."""

    name = "letters"
    dim = 26
    max_tokens = 1000
    max_concurrency = 1

    def count_tokens(self, text: str) -> int:
        return len(text)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Any:
        return np.array([[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts], np.float32)


class Now:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Direct:
    """Searches the collection as a pool does, of what is written by then; or raises what the test put into `error`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.error: Exception | None = None
        self.unavailable: dict[str, str] = {}

    async def search(
        self, vector: Vector, k: int, *, collection: str, filter: Mapping[str, Any], deadline_ms: float
    ) -> SearchResult:
        assert collection == ANSWERS
        if self.error is not None:
            raise self.error
        with LiveReader(self._directory) as reader:
            rows, distances = reader.search(np.asarray(vector)[None], k, filter=parse_filter(filter))
            found = rows[0] >= 0
            return SearchResult(0, rows[0][found], distances[0][found], identity=reader.description.identity)


class Stand:
    """A cache under a clock that stands still, and its counts. What is stored is there when `store` returns."""

    def __init__(self, directory: Path, **limits: Any) -> None:
        self.counts: Counter[CacheEvent] = Counter()
        self.now = Now()
        self.directory = directory
        self.limits = AnswerCacheSection(enabled=True, **({"threshold": 0.97, "ttl_s": 10.0, "entries": 3} | limits))
        self.client = Direct(directory)
        self.stored = AnswerStore(directory, 26, self.limits, self._count, self.now)
        self.stored.maintain()
        self.answers = AnswerCache(self.stored, Letters(), self.client)

    def _count(self, event: CacheEvent, times: int) -> None:
        if times:
            self.counts[event] += times

    def store(self, asked: CacheKey, pieces: Sequence[Piece]) -> None:
        before = self.counts["stored"]
        vector = Letters().embed([asked.question])[0]
        self.answers.store(asked, vector, pieces)
        until(lambda: self.counts["stored"] > before)

    def find(self, asked: CacheKey) -> CacheHit | None:
        _, hit = run(self.answers.find(asked))
        assert hit is None or isinstance(hit, CacheHit)
        return hit
