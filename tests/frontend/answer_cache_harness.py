"""An answer cache without a pool: its client searches the collection in-process."""

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
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.embedding.embedder import COMPUTED, TextKind
from runtime.retrieval.search.query import SearchResult
from runtime.serving.frontend.answer_cache import AnswerCache, CacheHit, CacheKey, Vector
from runtime.serving.frontend.requests import Piece
from runtime.testing.waiting import until
from tests.frontend.fake_workers import run


class LetterEmbedder:
    """An embedder that counts the letters of a text."""

    name = "letters"
    dim = 26
    max_tokens = 1000
    max_concurrency = 1
    turn = COMPUTED
    tokenizing = None

    def count_tokens(self, text: str) -> int:
        return len(text)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Any:
        return np.array([[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts], np.float32)


class ManualClock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class DirectClient:
    """A pool client that searches the collection's current state in-process, or raises `error` if a test sets it."""

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
        with CollectionReader(self._directory) as reader:
            rows, distances = reader.search(np.asarray(vector)[None], k, filter=parse_filter(filter))
            found = rows[0] >= 0
            return SearchResult(0, rows[0][found], distances[0][found], identity=reader.description.identity)


class CacheHarness:
    """A cache on a manual clock, and its counts. `store` returns when the answer has been written."""

    def __init__(self, directory: Path, entries: int = 3, threshold: float = 0.97, ttl_s: float = 10.0) -> None:
        self.counts: Counter[CacheEvent] = Counter()
        self.now = ManualClock()
        self.directory = directory
        self.limits = AnswerCacheSection(threshold=threshold, ttl_s=ttl_s)
        self.client = DirectClient(directory)
        self.stored = AnswerStore(directory, 26, self.limits, self._count, self.now, entries)
        self.stored.maintain()
        self.answers = AnswerCache(self.stored, LetterEmbedder(), self.client)

    def _count(self, event: CacheEvent, times: int) -> None:
        if times:
            self.counts[event] += times

    def store(self, key: CacheKey, pieces: Sequence[Piece]) -> None:
        before = self.counts["stored"]
        vector = LetterEmbedder().embed([key.question])[0]
        self.answers.store(key, vector, pieces)
        until(lambda: self.counts["stored"] > before)

    def find(self, key: CacheKey) -> CacheHit | None:
        _, hit = run(self.answers.find(key))
        assert hit is None or isinstance(hit, CacheHit)
        return hit
