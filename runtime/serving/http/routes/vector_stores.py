"""GET /v1/vector_stores, POST /v1/vector_stores/{name}/search: collections as OpenAI's vector stores.

A collection is a store, and its name the store's id. A result is a passage; its file is the one it was ingested from,
or the document itself.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.retrieval.passages import PartialPassages, Passage
from runtime.serving.http.api_types import (
    MAX_TOKENS,
    RetrievalBody,
    StrictModel,
    check_bytes,
    field_error,
    filter_at,
    parse,
    without_null,
)
from runtime.serving.http.middleware import ReadBody, access_of, client_id_of, request_id
from runtime.serving.http.response_memory import UnsentResponse, unsent_response
from runtime.serving.http.responses import Json, json_response, passages_response
from runtime.serving.http.service import CollectionCatalogue, Searches

MAX_QUERIES = 16
MAX_LISTED = 100
_DEFAULT_LISTED = 20


def _validate_query(value: object) -> object:
    queries = [value] if isinstance(value, str) else value
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise field_error("query must be a string or an array of strings")
    if not 1 <= len(queries) <= MAX_QUERIES:
        raise field_error(f"query has {len(queries)} strings, allowed are 1 to {MAX_QUERIES}")
    if not all(queries):
        raise field_error("query is empty")
    return queries


def _validate_ranking(value: object) -> object:
    if not isinstance(value, dict):
        raise field_error("ranking_options must be an object")
    options = without_null(value)
    for name in options:
        if name not in RankingOptions.model_fields:
            raise field_error(f"ranking_options: {name[:64]!r} is not supported")
    return options


def _validate_rewriting(value: object) -> object:
    if value is not False:
        raise field_error("rewrite_query is not supported other than false: queries are not rewritten")
    return value


class HybridSearch(StrictModel, extra="forbid"):
    """Weights of vector and keyword search in reciprocal rank fusion."""

    embedding_weight: float = Field(ge=0, le=1e9)
    text_weight: float = Field(ge=0, le=1e9)

    @property
    def share(self) -> float:
        """The weight of the keyword search, 0 to 1."""
        total = self.embedding_weight + self.text_weight
        return self.text_weight / total if total else 0.0


class RankingOptions(StrictModel):
    """Results with a score below `score_threshold` are omitted."""

    ranker: Literal["auto", "none"] = "auto"
    score_threshold: float = Field(0.0, ge=-1e9, le=1e9)
    hybrid_search: HybridSearch | None = None


class StoreSearchBody(StrictModel):
    """POST /v1/vector_stores/{name}/search."""

    query: Annotated[list[str], BeforeValidator(_validate_query)]
    max_num_results: int = Field(10, ge=1, le=MAX_TOKENS)
    ranking_options: Annotated[RankingOptions | None, BeforeValidator(_validate_ranking)] = None
    rewrite_query: Annotated[bool, BeforeValidator(_validate_rewriting)] = False
    filters: Annotated[Any, BeforeValidator(filter_at("filters"))] = None


class StoreRoutes:
    """The routes. `collections` contains the names, `read` reads a request's body."""

    def __init__(
        self,
        stores: CollectionCatalogue,
        searches: Searches,
        read: ReadBody,
        collections: Mapping[str, int],
        *,
        max_k: int,
        max_prompt_bytes: int,
    ) -> None:
        self._stores, self._searches, self._read = stores, searches, read
        self._collections = collections
        self._max_k, self._max_prompt_bytes = max_k, max_prompt_bytes

    def add_to(self, app: Starlette) -> None:
        """Register the routes."""
        app.add_route("/v1/vector_stores", self.list_stores, methods=["GET"])
        app.add_route("/v1/vector_stores/{name}", self.get_store, methods=["GET"])
        app.add_route("/v1/vector_stores/{name}/search", self.search, methods=["POST"])

    async def list_stores(self, http: Request) -> Response:
        names, more = _page(access_of(http).visible(self._collections), http.query_params)
        data = [self._store(name, http) for name in names]
        ends = {"first_id": names[0] if data else None, "last_id": names[-1] if data else None}
        return json_response({"object": "list", "data": data, **ends, "has_more": more})

    async def get_store(self, http: Request) -> Response:
        return json_response(self._store(self._name(http), http))

    async def search(self, http: Request) -> Response:
        name = self._name(http)
        body = parse(StoreSearchBody, await self._read(http))
        if body.max_num_results > self._max_k:
            raise InvalidRequest(
                f"max_num_results is {body.max_num_results}, the limit is {self._max_k}", "max_num_results"
            )
        size = sum(len(query.encode(errors="replace")) for query in body.query)
        check_bytes(size, self._max_prompt_bytes, "query")
        metric = self._stores.summary(name).metric
        ranking, partial = body.ranking_options, False
        hybrid = ranking.hybrid_search.share if ranking and ranking.hybrid_search else 0.0
        best: dict[str, tuple[tuple[int, float], Passage]] = {}
        for number, query in enumerate(body.query):
            search = RetrievalBody.model_construct(
                query=query, k=body.max_num_results, filter=body.filters, hybrid=hybrid
            )
            ids = (request_id(http), client_id_of(http)) if number == 0 else (f"{request_id(http)}-{number}", "")
            reserve = _addition_to(unsent_response(http))
            passages = await self._searches.run(search, name, access_of(http), *ids, reserve=reserve)
            partial |= isinstance(passages, PartialPassages)
            for rank, passage in enumerate(passages):
                order = rank if hybrid else 0, -score_of(passage.distance, metric)
                if passage.id not in best or order < best[passage.id][0]:
                    best[passage.id] = order, passage
        threshold = ranking.score_threshold if ranking else -math.inf
        found = sorted(best.values(), key=lambda entry: entry[0])[: body.max_num_results]
        page: Json = {
            "object": "vector_store.search_results.page",
            "search_query": body.query,
            "data": [_result(-negated, passage) for (_, negated), passage in found if -negated >= threshold],
            "has_more": False,
            "next_page": None,
        }
        return passages_response(page | {"partial": True} if partial else page)

    def _name(self, http: Request) -> str:
        name = str(http.path_params["name"])
        return access_of(http).resolve(name, self._collections, "vector_store_id", "vector store")

    def _store(self, name: str, http: Request) -> Json:
        summary = self._stores.summary(name)
        if access_of(http).restriction(name) is not None:  # do not disclose the totals of other tenants
            summary = replace(summary, files=0, document_bytes=0)
        counts = {"in_progress": 0, "failed": 0, "cancelled": 0}
        return {
            "id": name,
            "object": "vector_store",
            "name": name,
            "created_at": summary.created_at,
            "last_active_at": None,
            "status": "completed" if summary.is_open else "in_progress",
            "usage_bytes": summary.document_bytes,
            "file_counts": counts | {"completed": summary.files, "total": summary.files},
            "metadata": {"embedder": summary.embedder, "dimensions": str(summary.dim), "metric": summary.metric},
        }


def _addition_to(unsent: UnsentResponse) -> Callable[[int], None]:
    """Return the `reserve` of one of several searches for a response."""
    before = unsent.held_bytes
    return lambda size: unsent.reserve(before + size)


def _page(names: list[str], query: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return one page of names and whether more follow, by OpenAI's parameters `limit`, `order`, `after` and `before`.

    Raises InvalidRequest.
    """
    limit, order = query.get("limit", str(_DEFAULT_LISTED)), query.get("order", "desc")
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LISTED:
        raise InvalidRequest(f"limit is {limit[:32]!r}, allowed are 1 to {MAX_LISTED}", "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:32]!r}, allowed are asc and desc", "order")
    for edge in ("after", "before"):
        if edge in query and query[edge] not in names:
            raise InvalidRequest(f"{edge} is {query[edge][:128]!r}, and no vector store has that id", edge)
    if order == "asc":
        names = names[::-1]
    if "after" in query:
        names = names[names.index(query["after"]) + 1 :]
    if "before" in query:
        names = names[: names.index(query["before"])] if query["before"] in names else []
        return names[-int(limit) :], len(names) > int(limit)
    return names[: int(limit)], len(names) > int(limit)


def score_of(distance: float, metric: str) -> float:
    """Return a score that rises with similarity: cosine, dot product, or 1 / (1 + squared distance) for l2."""
    if not math.isfinite(distance):
        return 0.0
    if metric == "l2":
        return 1.0 / (1.0 + max(distance, 0.0))
    return 1.0 - distance if metric == "cosine" else -distance


def _result(score: float, passage: Passage) -> dict[str, Any]:
    source = passage.attributes.get("source")
    file = source if isinstance(source, str) else passage.id
    return {
        "file_id": file,
        "filename": PurePosixPath(file).name or file,
        "score": score,
        "attributes": passage.attributes,
        "content": [{"type": "text", "text": passage.text}],
        "id": passage.id,  # not in OpenAI's API: the passage of the file
        "title": passage.title,
    }
