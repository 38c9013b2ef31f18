"""Dependencies and settings of the HTTP application, and searches without generation (`Searches`), which are limited in
number and time, traced and logged.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from runtime.errors import (
    ConfigError,
    DeadlineExceeded,
    TrinityError,
    Unavailable,
    UnknownCollection,
    UnknownModel,
)
from runtime.node.config import HttpSection
from runtime.node.retrieval_config import ProbesSection, PromptsSection
from runtime.retrieval.async_retriever import AsyncRetriever
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.embedding.embedder import Embedder, TextKind, Vectors
from runtime.retrieval.fair_gate import FairLimit
from runtime.retrieval.passages import FoundPassages
from runtime.retrieval.reranking.reranking import Reranking
from runtime.retrieval.search.query import Query
from runtime.retrieval.stores.responses import ResponseStore
from runtime.retrieval.stores.service import Stores
from runtime.retrieval.writer_service import WriterService
from runtime.serving import stages
from runtime.serving.frontend.answer_cache import AnswerCache
from runtime.serving.frontend.engine import Engine
from runtime.serving.frontend.observability import Traces
from runtime.serving.http.access import Access
from runtime.serving.http.middleware import BODY_TIMEOUT_S, MAX_BODY_BYTES
from runtime.serving.http.ranking import Ranker
from runtime.serving.http.readiness import Readiness
from runtime.serving.http.response_memory import MAX_UNSENT_BYTES
from runtime.serving.messages import Retrieval

if TYPE_CHECKING:
    from runtime.serving.http.routes.tokenize import Tokens

log = logging.getLogger(__name__)
R = TypeVar("R")


class NoCollections:
    """In place of an `AsyncRetriever`, on a node without collections."""

    def missing(self) -> list[str]:
        return []

    def unavailable(self) -> dict[str, str]:
        return {}

    async def search(self, query: object, **options: object) -> FoundPassages:
        raise Unavailable("this node has no collections")

    def summary(self, collection: str) -> CollectionSummary:
        raise UnknownCollection("this node has no collections", "vector_store_id")

    def documents(self, collection: str) -> CollectionDocuments:
        raise UnknownCollection("this node has no collections", "vector_store_id")

    def embedders(self) -> Mapping[str, Embedder]:
        return {}

    async def embed(self, embedder: Embedder, texts: Sequence[str], kind: TextKind, flow: int) -> tuple[Vectors, int]:
        raise UnknownModel("this node has no collections, and no embedder", "model")


Collections = AsyncRetriever | NoCollections


class Searches:
    """Runs searches without generation: at most `limit` at a time, of a key as many as are left, each for at most
    `timeout_s`.

    `on_ended` is called with the stamps of one that has ended.
    """

    def __init__(
        self,
        source: Collections,
        traces: Traces,
        limit: int,
        timeout_s: float,
        on_ended: Callable[[dict[str, int]], None] = lambda stamps: None,
    ) -> None:
        self._source = source
        self._traces = traces
        self.limit = FairLimit(limit, "searches")
        self._timeout_s = timeout_s
        self._on_ended = on_ended

    async def run(
        self,
        query: Query,
        request_id: str,
        client_id: str = "",
        *,
        respond: Callable[[FoundPassages], R],
        reserve: Callable[[int], None] = lambda size: None,
        received_ns: int = 0,
    ) -> R:
        """Return the response, by `respond`, with the passages that a query finds, which is restricted to what its key
        may find.

        `received_ns`: since when it waits, 0: since now. `reserve`: see `UnsentResponse.reserve`. Raises Overloaded
        (before the search starts), DeadlineExceeded, or errors of the source and of `reserve`.
        """
        flow, limit = query.spec.flow, self.limit
        if not limit.entered(flow):
            await limit.enter(flow)
        try:
            traces, state, found = self._traces, "internal_error", 0
            traces.start_search(request_id, client_id, Retrieval(query.spec.collection, query.spec.k), received_ns)
            try:
                passages = await self._search(query, request_id, reserve)
                traces.stamp_search_end(request_id, passages.times)
                response = respond(passages)
                traces.stamp(request_id, stages.RESPONDED)
                state, found = "found", len(passages)
                return response
            except TrinityError as error:
                state = error.code
                raise
            except asyncio.CancelledError:
                state = "cancelled"
                raise
            finally:
                stamps = traces.end_search(request_id, state, found)
                self._on_ended(stamps)
                # One that succeeded is in the traces; a line for each would take a sixth of its time.
                level = logging.DEBUG if state == "found" else logging.INFO
                if log.isEnabledFor(level):
                    took_ms = (stamps[stages.END] - stamps[stages.RECEIVED]) / 1e6
                    result = f"{found} passages" if state == "found" else state
                    log.log(level, "search ended: %s, %.1f ms", result, took_ms, extra={"request": request_id})
        finally:
            limit.leave(flow)

    async def _search(self, query: Query, request_id: str, reserve: Callable[[int], None]) -> FoundPassages:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._source.search(
                    query,
                    on_embedded=partial(self._traces.stamp, request_id, stages.EMBEDDED),
                    on_read=lambda size: reserve(2 * size),  # the passages, and the response with them
                    timeout_s=self._timeout_s,
                )
                return FoundPassages.of(found)
        except TimeoutError:
            raise DeadlineExceeded(f"the search took longer than its limit of {self._timeout_s:g} s") from None


@dataclass(frozen=True, slots=True)
class Service:
    """Dependencies of the routes."""

    engine: Engine
    collections: Collections
    metrics: Callable[[], Awaitable[str]]  # of the node, in Prometheus' text format
    answers: AnswerCache | None = None
    tokens: "Tokens | None" = None  # None if the node runs no model itself
    reranking: Reranking | None = None
    writes: WriterService | None = None  # None on a node without collections
    stores: Stores | None = None  # files and vector stores of clients; None without `[stores] path`
    responses: ResponseStore | None = None  # None: in memory
    readiness: Readiness = field(default_factory=Readiness)
    drain: Callable[[bool], Awaitable[None]] | None = None  # stores the drain state in the supervisor
    on_response: Callable[[str, int, float], None] = lambda path, status, seconds: None
    on_searched: Callable[[dict[str, int]], None] = lambda stamps: None  # called with the stamps of a search


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the HTTP application: names, keys, limits, default timeouts.

    `model` is "" on a node without generation; `collections`: name → dimension, 0 while it is unknown; `http`: as
    configured. Prompt bytes count UTF-8 text. `access` contains the keys without full access. A body without a token
    limit gets `default_max_tokens` (a chat) or OpenAI's 16 (a completion). Raises ConfigError for a key that is empty
    or cannot be sent in a header.
    """

    model: str = ""
    collections: Mapping[str, int] = field(default_factory=dict)
    http: HttpSection = field(default_factory=HttpSection)
    api_keys: tuple[str, ...] = ()
    access: Mapping[str, Access] = field(default_factory=dict)
    max_body_bytes: int = MAX_BODY_BYTES
    max_unsent_bytes: int = MAX_UNSENT_BYTES
    max_prompt_bytes: int = 256 << 10
    max_k: int = 64
    probes: ProbesSection = field(default_factory=ProbesSection)
    max_probe_tokens: int = PromptsSection().passage_tokens
    ranker: Ranker = field(default_factory=Ranker)
    max_searches: int = 96  # 64 refused some at 60% of the rate of vectors, when the loop had paused for 30 ms
    default_max_tokens: int = 256
    search_timeout_s: float = 10.0
    body_timeout_s: float = BODY_TIMEOUT_S
    context_tokens: int = 0  # of the model; 0: unknown

    def __post_init__(self) -> None:
        for position, key in enumerate(self.api_keys):
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                # Not shown: it may be the secret except for a typo.
                raise ConfigError(f"API key {position} is empty, or has surrounding whitespace or non-ASCII characters")


def missing_roles(service: Service, settings: Settings) -> list[str]:
    """Return the roles without a worker that accepts requests; empty when the node is ready."""
    workers = service.engine.missing() if settings.model else []
    return [*workers, *service.collections.missing()]
