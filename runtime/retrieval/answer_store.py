"""The live collection of stored answers: private to the node, searched by its pools, written to by its frontend.

An answer is found by its question's vector among those with one `key`, which the collection demands of every search, so
no search crosses from one key to another. What is too old, and the oldest of too many, is deleted by filters on when
it was stored and on its number. It is only a cache: what is damaged or missing is begun anew.
"""

import logging
import os
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
from runtime.retrieval.live.collection import create
from runtime.retrieval.live.storage.manifest import is_live
from runtime.retrieval.live.validation import UpsertDocument
from runtime.retrieval.live.writer import LiveWriter
from runtime.retrieval.search.query import SearchResult

KEY, STORED_MS, NUMBER = "key", "stored_ms", "number"
_LEAST_SEALED = 256  # rows: a segment is built by a process of its own

Vector = npt.NDArray[np.float32]
log = logging.getLogger(__name__)


def ensure(directory: Path, dim: int) -> None:
    """Make the collection, readable by this user alone, where there is none. Raises `CollectionError`, `NoRoom`."""
    if is_live(directory):
        return
    made = directory.with_name(f"{directory.name}-{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    schema = {KEY: AttributeType.STRING, STORED_MS: AttributeType.INTEGER, NUMBER: AttributeType.INTEGER}
    create(made, dim, demanded=KEY, schema=schema)
    try:
        made.chmod(0o700)
        made.rename(directory)
    except OSError:  # another process was faster; or something else is there, which opening it will say
        shutil.rmtree(made, ignore_errors=True)


class NewAnswer(NamedTuple):
    """An answer to be stored: `id` names its question and everything else that it depends on, `key` the latter."""

    id: str
    key: str
    vector: Vector
    text: str


class CachedAnswer(NamedTuple):
    """A stored answer, the cosine of the questions, and its age."""

    text: str
    similarity: float
    age_s: float


class AnswerStore:
    """The collection, open for writing. `keep`, `tend`, `renew` and `close` are for one thread, and wait for the disk;
    `found` is for any. What keeps answers from being stored is logged once, and nobody's error.

    `count` is told of every event; `clock` gives seconds, and is that of all processes of the node.
    """

    def __init__(
        self,
        directory: Path,
        dim: int,
        limits: AnswerCacheSection,
        count: Callable[[CacheEvent, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._dim, self.limits, self.count, self._clock = directory, dim, limits, count, clock
        self._writer: LiveWriter | None = None
        self._lock = threading.Lock()  # while it is read, and while it changes
        self._troubles: dict[str, str] = {}
        self._closed = False

    def wanted(self, key: str) -> dict[str, object]:
        """The filter of the answers that have this key and are not too old."""
        young = {"type": "gt", "key": STORED_MS, "value": self._now_ms() - int(self.limits.ttl_s * 1e3)}
        return {"type": "and", "filters": [{"type": "eq", "key": KEY, "value": key}, young]}

    def found(self, result: SearchResult) -> CachedAnswer | None:
        """What a search for one row has found; None where that is not alike, or gone. Raises `CollectionError`."""
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
        assert isinstance(stored_ms, int), "the collection's schema says so"
        return CachedAnswer(document.text, min(similarity, 1.0), (self._now_ms() - stored_ms) / 1e3)

    def keep(self, answers: Sequence[NewAnswer]) -> None:
        """Store answers, in the place of those with their ids, and delete the oldest of too many."""

        def work(writer: LiveWriter) -> None:
            first, now = writer.state.growing.next_row, self._now_ms()
            documents = [
                UpsertDocument(one.id, one.text, "", {KEY: one.key, STORED_MS: now, NUMBER: first + n}, one.vector)
                for n, one in enumerate({answer.id: answer for answer in answers}.values())
            ]
            self.count("stored", writer.upsert(documents))
            if writer.state.count > self.limits.entries:
                self._delete(writer, NUMBER, first + len(documents) - 1 - self.limits.entries, "evicted")

        self._attempt(work)

    def tend(self) -> None:
        """Have it open, and delete what is too old."""
        self._attempt(
            lambda writer: self._delete(writer, STORED_MS, self._now_ms() - int(self.limits.ttl_s * 1e3), "expired")
        )

    def renew(self, reason: str) -> None:
        """Begin anew, with nothing stored."""
        log.warning("stored answers are begun anew: %s", reason)
        self._drop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Let another process write. Nothing is stored from now on."""
        self._closed = True
        self._drop()

    def say(self, what: Literal["stored", "found"], trouble: str) -> None:
        """Log what keeps answers from being stored or found, once; "" when nothing does any more."""
        if trouble and trouble != self._troubles.get(what):
            log.warning("answers are not %s: %s", what, trouble)
        self._troubles[what] = trouble

    def _delete(self, writer: LiveWriter, attribute: str, upto: int, event: CacheEvent) -> None:
        self.count(event, writer.delete_where(parse_filter({"type": "lte", "key": attribute, "value": upto})))

    def _attempt(self, work: Callable[[LiveWriter], None]) -> None:
        if self._closed:
            return
        try:
            work(self._opened())
        except TrinityError as error:
            self.say("stored", error.message)
            if isinstance(error, CollectionError) and not isinstance(error, NoRoom | CollectionBusy):
                self._drop()  # opening it anew shows whether it is whole
        except Exception:
            log.exception("answers are not stored")
        else:
            self.say("stored", "")

    def _opened(self) -> LiveWriter:
        """Raises `NoRoom` and `CollectionBusy`, and `CollectionError` where it cannot be begun anew either."""
        if self._writer is not None and is_live(self._directory):
            return self._writer
        self._drop()
        try:
            writer = self._open()
        except (NoRoom, CollectionBusy):
            raise
        except CollectionError as error:
            self.renew(error.message)
            writer = self._open()
        with self._lock:
            self._writer = writer
        return writer

    def _open(self) -> LiveWriter:
        ensure(self._directory, self._dim)
        return LiveWriter(self._directory, seal_rows=max(_LEAST_SEALED, self.limits.entries // 4))

    def _drop(self) -> None:
        with self._lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def _now_ms(self) -> int:
        return int(self._clock() * 1e3)
