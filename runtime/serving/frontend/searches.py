"""Searches alone, behind /v1/retrieval: so many at once, for so long, each with its trace and its line in the log."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ipc import Stage
from runtime.errors import DeadlineExceeded, Overloaded, TrinityError
from runtime.retrieval.passages import Passage
from runtime.serving import stages
from runtime.serving.frontend.api_types import RetrievalBody
from runtime.serving.frontend.traces import Traces

log = logging.getLogger(__name__)


class SearchSource(Protocol):
    """What searches."""

    def search(
        self,
        *,
        collection: str,
        k: int,
        query: str | None,
        vector: Sequence[float] | None,
        embedded: Callable[[], None],
        stage: Stage = "prefill",
        timeout_s: float,
    ) -> Awaitable[list[Passage]]:
        """The k nearest passages to a text or to a vector (one of them is set), nearest first.

        `embedded` is called once, when the query's vector is there; the pool is told the `stage` and what is left of
        `timeout_s`. Raises TrinityError.
        """

    def missing(self) -> list[str]:
        """What is not there to search with, by name; empty when searches are served."""

    def unavailable(self) -> dict[str, str]:
        """The collections that cannot be searched though others can, and why."""


class Searches:
    """Asks a `SearchSource`. At most `limit` searches are in flight, each for `timeout_s` at most."""

    def __init__(self, source: SearchSource, traces: Traces, limit: int, timeout_s: float) -> None:
        self._source = source
        self._traces = traces
        self._limit = limit
        self._timeout_s = timeout_s
        self._running = 0

    async def run(self, body: RetrievalBody, collection: str, request_id: str, client_id: str = "") -> list[Passage]:
        """The passages, from `collection`.

        Raises Overloaded (then nothing was begun), DeadlineExceeded, or what the source raises.
        """
        if self._running >= self._limit:
            raise Overloaded(f"{self._running} searches are in flight, the limit is {self._limit}")
        self._traces.search_begun(request_id, client_id)
        state, found = "internal_error", 0
        self._running += 1
        try:
            passages = await self._ask(body, collection, request_id)
            self._traces.stamp(request_id, stages.SEARCHED)
            state, found = "found", len(passages)
            return passages
        except TrinityError as error:
            state = error.code
            raise
        except asyncio.CancelledError:
            state = "cancelled"
            raise
        finally:
            self._running -= 1
            took_ms = self._traces.search_ended(request_id, state, found) / 1e6
            told = f"{found} passages" if state == "found" else state
            log.info("search ended: %s, %.1f ms", told, took_ms, extra={"request": request_id})

    async def _ask(self, body: RetrievalBody, collection: str, request_id: str) -> list[Passage]:
        def embedded() -> None:
            self._traces.stamp(request_id, stages.EMBEDDED)

        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._source.search(
                    collection=collection,
                    k=body.k,
                    query=body.query,
                    vector=body.vector,
                    embedded=embedded,
                    timeout_s=self._timeout_s,
                )
        except TimeoutError:
            raise DeadlineExceeded(f"the search took longer than its limit of {self._timeout_s:g} s") from None
