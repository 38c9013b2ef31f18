"""Storage of the answer cache: a collection, private to the node, searched by its pools, written by its frontend.

An answer is looked up by its question's vector among those with the same `key`; the collection demands a filter on the
key in every search, so no search crosses keys. Expired answers, and the oldest ones beyond the limit, are deleted by
filters on the time they were stored and on their number. A damaged or missing collection is recreated empty.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.errors import CollectionBusy, CollectionError, NoRoom, TrinityError
from runtime.node.config import AnswerCacheSection
from runtime.node.metrics.worker_metrics import CacheEvent
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.attributes.schema import AttributeType
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import is_collection
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.search.query import SearchResult

KEY, STORED_MS, NUMBER = "key", "stored_ms", "number"
MAX_ANSWERS = 1_000
_SEAL_ROWS = 256  # sealing a segment starts a process

Vector = npt.NDArray[np.float32]
log = logging.getLogger(__name__)


def ensure(directory: Path, dim: int) -> None:
    """Create the collection if it is missing. Raises `CollectionError`, `NoRoom`."""
    schema = {KEY: AttributeType.STRING, STORED_MS: AttributeType.INTEGER, NUMBER: AttributeType.INTEGER}
    bulk_load.ensure(directory, dim, demanded=KEY, schema=schema)


class NewAnswer(NamedTuple):
    """An answer to be stored. `key`: hash of everything but the question that it depends on; `id`: of both."""

    id: str
    key: str
    vector: Vector
    text: str


class CachedAnswer(NamedTuple):
    """A stored answer, the cosine similarity of the questions, and its age."""

    text: str
    similarity: float
    age_s: float


class AnswerStore:
    """The collection, open for writing. `store`, `maintain`, `reset` and `close` are for one thread and block on the
    disk; `resolve` is thread-safe. Failures to store are logged once and not raised.

    `count` is called for every event. `clock` returns seconds, the same in all processes of the node.
    """

    def __init__(
        self,
        directory: Path,
        dim: int,
        limits: AnswerCacheSection,
        count: Callable[[CacheEvent, int], None],
        clock: Callable[[], float] = time.monotonic,
        max_answers: int = MAX_ANSWERS,
    ) -> None:
        self._directory, self._dim, self.limits, self.count, self._clock = directory, dim, limits, count, clock
        self._max_answers = max_answers
        self._writer: CollectionWriter | None = None
        self._lock = threading.Lock()  # held while the writer is read or replaced
        self._errors: dict[str, str] = {}
        self._closed = False

    def filter(self, key: str) -> dict[str, object]:
        """Return the filter for answers with this key that have not expired."""
        fresh = {"type": "gt", "key": STORED_MS, "value": self._now_ms() - int(self.limits.ttl_s * 1e3)}
        return {"type": "and", "filters": [{"type": "eq", "key": KEY, "value": key}, fresh]}

    def resolve(self, result: SearchResult) -> CachedAnswer | None:
        """Return the answer in a search result for one row; None if it is not similar enough, or deleted.

        Raises `CollectionError`.
        """
        similarity = 1.0 - float(result.distances[0]) if len(result.ids) else -1.0
        if similarity < self.limits.threshold:
            return None
        rows = [int(result.ids[0])]
        with self._lock:
            if self._writer is None or self._writer.state.description.identity != result.identity:
                return None
            (document,) = self._writer.state.documents(rows)
            if document is None or self._writer.state.deleted(rows)[0]:
                return None
        stored_ms = document.attributes[STORED_MS]
        assert isinstance(stored_ms, int), "guaranteed by the collection's schema"
        return CachedAnswer(document.text, min(similarity, 1.0), (self._now_ms() - stored_ms) / 1e3)

    def store(self, answers: Sequence[NewAnswer]) -> None:
        """Insert or replace answers, and delete the oldest ones beyond the limit."""

        def work(writer: CollectionWriter) -> None:
            first, now = writer.state.growing.next_row, self._now_ms()
            documents = [
                UpsertDocument(one.id, one.text, "", {KEY: one.key, STORED_MS: now, NUMBER: first + n}, one.vector)
                for n, one in enumerate({answer.id: answer for answer in answers}.values())
            ]
            self.count("stored", writer.upsert(documents))
            if writer.state.count > self._max_answers:
                self._delete(writer, NUMBER, first + len(documents) - 1 - self._max_answers, "evicted")

        self._with_writer(work)

    def maintain(self) -> None:
        """Open the collection if it is not, and delete expired answers."""
        self._with_writer(
            lambda writer: self._delete(writer, STORED_MS, self._now_ms() - int(self.limits.ttl_s * 1e3), "expired")
        )

    def reset(self, reason: str) -> None:
        """Delete the collection; it is recreated empty."""
        log.warning("the answer cache is reset: %s", reason)
        self._close_writer()
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Close the collection, so that another process may write to it. Later calls store nothing."""
        self._closed = True
        self._close_writer()

    def log_state(self, what: Literal["stored", "found"], error: str) -> None:
        """Log, once, why answers cannot be stored or found; "" clears the error."""
        if error and error != self._errors.get(what):
            log.warning("answers are not %s: %s", what, error)
        self._errors[what] = error

    def _delete(self, writer: CollectionWriter, attribute: str, limit: int, event: CacheEvent) -> None:
        self.count(event, writer.delete_where(parse_filter({"type": "lte", "key": attribute, "value": limit})))

    def _with_writer(self, work: Callable[[CollectionWriter], None]) -> None:
        if self._closed:
            return
        try:
            work(self._opened())
        except TrinityError as error:
            self.log_state("stored", error.message)
            if isinstance(error, CollectionError) and not isinstance(error, NoRoom | CollectionBusy):
                self._close_writer()  # the next open reports whether it is damaged
        except Exception:
            log.exception("answers are not stored")
        else:
            self.log_state("stored", "")

    def _opened(self) -> CollectionWriter:
        """Return the writer. Raises `NoRoom`, `CollectionBusy`; `CollectionError` if recreating failed too."""
        if self._writer is not None and is_collection(self._directory):
            return self._writer
        self._close_writer()
        try:
            writer = self._open()
        except (NoRoom, CollectionBusy):
            raise
        except CollectionError as error:
            self.reset(error.message)
            writer = self._open()
        with self._lock:
            self._writer = writer
        return writer

    def _open(self) -> CollectionWriter:
        ensure(self._directory, self._dim)
        return CollectionWriter(self._directory, seal_rows=_SEAL_ROWS)

    def _close_writer(self) -> None:
        with self._lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def _now_ms(self) -> int:
        return int(self._clock() * 1e3)
