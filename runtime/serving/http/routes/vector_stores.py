"""/v1/vector_stores: collections as OpenAI's vector stores, and stores that clients create.

A configured collection is a store, and its name the store's id; it can be listed and searched here. A result is a
passage; its file is the one it was ingested from, or the document itself.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Annotated, Any

from msgspec import structs
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from ipc import SearchSpec
from runtime.errors import InvalidRequest, TrinityError
from runtime.node.stores_config import STORE_PREFIX, STORES
from runtime.retrieval.attributes.filters import filter_bytes
from runtime.retrieval.passages import RERANKED, FoundPassages, Passage
from runtime.retrieval.search.query import Query, Rerank
from runtime.retrieval.stores.catalogue import Usage
from runtime.retrieval.stores.collection import FILE, FILENAME, STORE
from runtime.retrieval.stores.records import NewEntry, Store, UnknownObject, new_id
from runtime.retrieval.stores.service import Stores
from runtime.serving.http.access import access_of, tenant_of
from runtime.serving.http.api import Api
from runtime.serving.http.api_types import MAX_TOKENS, filter_at
from runtime.serving.http.middleware import arrived_ns, client_id_of, request_id
from runtime.serving.http.parsing import StrictModel, check_bytes, field_error, params_named, parse, parse_object
from runtime.serving.http.ranking import Ranker, ranking_json
from runtime.serving.http.response_memory import UnsentResponse, unsent_response
from runtime.serving.http.responses import Json, json_response, passages_response
from runtime.serving.http.routes.paging import list_json, page_names, page_of
from runtime.serving.http.routes.store_objects import (
    CreateStoreBody,
    UpdateStoreBody,
    counts_json,
    store_json,
    to_chunking,
)
from runtime.serving.http.searched import check_k, restricted

MAX_QUERIES = 16


def _validate_query(value: object) -> object:
    queries = [value] if isinstance(value, str) else value
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise field_error("query must be a string or an array of strings")
    if not 1 <= len(queries) <= MAX_QUERIES:
        raise field_error(f"query has {len(queries)} strings, allowed are 1 to {MAX_QUERIES}")
    if not all(queries):
        raise field_error("query is empty")
    return queries


class HybridSearch(StrictModel, extra="forbid"):
    """Weights of vector and keyword search in reciprocal rank fusion."""

    embedding_weight: float = Field(ge=0, le=1e9)
    text_weight: float = Field(ge=0, le=1e9)

    @property
    def share(self) -> float:
        """The weight of the keyword search, 0 to 1."""
        total = self.embedding_weight + self.text_weight
        return self.text_weight / total if total else 0.0


class RankingOptions(StrictModel, extra="forbid"):
    """Results with a score below `score_threshold` are omitted, by default none. `timeout_s`: of the reranking."""

    ranker: str = "auto"
    timeout_s: float | None = Field(None, gt=0, le=60)
    score_threshold: float = Field(-1e30, ge=-1e9, le=1e9)
    hybrid_search: HybridSearch | None = None

    def rerank(self, ranker: Ranker, param: str) -> Rerank | None:
        """Return how results are reranked by the node's `ranker`, None for not at all. Raises InvalidRequest."""
        return ranker.of_name(self.ranker, self.timeout_s, self.score_threshold, param)

    @property
    def hybrid(self) -> float:
        """The weight of the keyword search, 0 to 1."""
        return self.hybrid_search.share if self.hybrid_search else 0.0


class StoreSearchBody(StrictModel):
    """POST /v1/vector_stores/{name}/search."""

    query: Annotated[list[str], BeforeValidator(_validate_query)]
    max_num_results: int = Field(10, ge=1, le=MAX_TOKENS)
    ranking_options: RankingOptions | None = None
    rewrite_query: bool = False  # without effect: the response's search_query tells what was searched
    filters: Annotated[Any, BeforeValidator(filter_at("filters"))] = None


class StoreRoutes:
    """The routes. A node without `[stores]` has only those that read."""

    def __init__(self, api: Api) -> None:
        self._api, self._settings = api, api.settings
        self._collections, self._stores = api.service.collections, api.service.stores

    async def list_stores(self, http: Request) -> Response:
        own = [] if self._stores is None else await self._stores.store_ids(tenant_of(http))
        collections = access_of(http).visible(self._settings.collections)
        names, more = page_names([*own, *collections], page_of(http.query_params))
        listed = []
        for name in names:
            with suppress(UnknownObject):  # deleted meanwhile
                listed.append(await self._store(name, http))
        return json_response(list_json(listed, more))

    async def get_store(self, http: Request) -> Response:
        return json_response(await self._store(str(http.path_params["name"]), http))

    async def create(self, http: Request) -> Response:
        stores = self._writable("")
        body = parse(CreateStoreBody, await self._api.read(http))
        now = int(stores.now())
        store = Store(
            id=new_id(STORE_PREFIX), tenant=tenant_of(http), created_at=now, last_active_at=now, name=body.name,
            metadata=body.metadata, expires_days=body.expires_after.days if body.expires_after else 0,
        )  # fmt: skip
        files = [NewEntry(file, {}, to_chunking(body.chunking_strategy)) for file in dict.fromkeys(body.file_ids)]
        await stores.create_store(store, files)
        return json_response(await self._store(store.id, http))

    async def update(self, http: Request) -> Response:
        stores, name = self._writable(str(http.path_params["name"])), str(http.path_params["name"])
        content = await self._api.read(http)
        body, sent = parse(UpdateStoreBody, content), parse_object(content)

        def change(store: Store) -> Store:
            if "name" in sent:
                store = structs.replace(store, name=body.name)
            if "metadata" in sent:
                store = structs.replace(store, metadata=body.metadata)
            if "expires_after" in sent:
                store = structs.replace(store, expires_days=body.expires_after.days if body.expires_after else 0)
            return structs.replace(store, last_active_at=int(stores.now()))

        await stores.update_store(name, tenant_of(http), change)
        return json_response(await self._store(name, http))

    async def delete(self, http: Request) -> Response:
        name = str(http.path_params["name"])
        await self._writable(name).delete_store(name, tenant_of(http))
        return json_response({"id": name, "object": "vector_store.deleted", "deleted": True})

    async def search(self, http: Request) -> Response:
        with params_named({"filter": "filters"}):
            return await self._found(http)

    async def _found(self, http: Request) -> Response:
        name = str(http.path_params["name"])
        body = parse(StoreSearchBody, await self._api.read(http))
        check_k(body.max_num_results, self._settings, "max_num_results")
        size = sum(len(query.encode(errors="replace")) for query in body.query)
        check_bytes(size, self._settings.max_prompt_bytes, "query")
        collection, wanted = await restricted(
            [name], body.filters, http, self._stores, self._settings, "vector_store_id"
        )
        metric = self._collections.summary(collection).metric
        ranking = body.ranking_options or RankingOptions.model_validate({})
        rerank = ranking.rerank(self._settings.ranker, "ranking_options.ranker")
        spec = SearchSpec(collection, body.max_num_results, filter=filter_bytes(wanted), flow=access_of(http).flow)
        lists: list[FoundPassages] = []
        for number, query in enumerate(body.query):
            ids = (request_id(http), client_id_of(http)) if number == 0 else (f"{request_id(http)}-{number}", "")
            since = arrived_ns(http) if number == 0 else 0
            reserve = _addition_to(unsent_response(http))
            search = Query(spec, text=query, hybrid=ranking.hybrid, rerank=rerank)
            lists.append(
                await self._api.searches.run(search, *ids, respond=FoundPassages.of, reserve=reserve, received_ns=since)
            )
        state = next((found.ranking for found in lists if found.ranking != RERANKED), RERANKED)
        scores = _best_scores(lists, metric, reranked=state == RERANKED, by_rank=bool(ranking.hybrid or rerank))
        threshold = ranking.score_threshold if rerank is None else -math.inf
        kept = [(passage, score) for passage, score in scores[: body.max_num_results] if score >= threshold]
        score_by_id = {passage.id: score for passage, score in kept}
        results = await results_of(self._stores, collection, [passage for passage, _ in kept])
        page: Json = {
            "object": "vector_store.search_results.page",
            "search_query": body.query,
            "data": [result | {"score": score_by_id[passage.id]} for passage, result in results],
            "has_more": False,
            "next_page": None,
        }
        return passages_response(page | ranking_json(state))

    def _name(self, name: str, http: Request) -> str:
        return access_of(http).resolve(name, self._settings.collections, "vector_store_id", "vector store")

    def _writable(self, name: str) -> Stores:
        """Return the clients' stores. Raises InvalidRequest for a configured collection."""
        assert self._stores is not None, "the routes exist only with [stores]"
        if name in self._settings.collections:
            raise InvalidRequest(
                f"{name!r} is a collection of the node's configuration: it cannot be changed or deleted here, only its "
                "files",
                "vector_store_id",
            )
        return self._stores

    async def _store(self, name: str, http: Request) -> Json:
        if self._stores is not None and name.startswith(STORE_PREFIX):
            return await store_json(self._stores, await self._stores.store(name, tenant_of(http)))
        summary, files = self._collections.summary(self._name(name, http)), 0
        counts: Mapping[str, Usage] = {}
        if access_of(http).restriction(name) is not None:  # do not disclose the totals of other tenants
            summary = replace(summary, document_bytes=0)
        elif summary.is_open:
            unfinished: Collection[str] = ()
            if self._stores is not None:
                unfinished, counts = await self._stores.unfinished(name), await self._stores.counts(name)
            with suppress(TrinityError):  # which searches report
                files = await asyncio.to_thread(self._collections.documents(name).file_count, unfinished)
        numbers = counts_json({**counts, "completed": Usage(files)})
        return {
            "id": name,
            "object": "vector_store",
            "name": name,
            "created_at": summary.created_at,
            "last_active_at": None,
            "status": "in_progress" if numbers["in_progress"] or not summary.is_open else "completed",
            "usage_bytes": summary.document_bytes,
            "file_counts": numbers,
            "metadata": {"embedder": summary.embedder, "dimensions": str(summary.dim), "metric": summary.metric},
        }


def _addition_to(unsent: UnsentResponse) -> Callable[[int], None]:
    """Return the `reserve` of one of several searches for a response."""
    before = unsent.held_bytes
    return lambda size: unsent.reserve(before + size)


def _best_scores(
    lists: Sequence[FoundPassages], metric: str, *, reranked: bool, by_rank: bool
) -> list[tuple[Passage, float]]:
    """Return the passages of all lists with their scores, each once, best first: by score if they were `reranked` or
    not `by_rank`, otherwise by their rank."""
    best: dict[str, tuple[tuple[int, float], Passage]] = {}
    for found in lists:
        for rank, passage in enumerate(found):
            score = passage.score if reranked and passage.score is not None else score_of(passage.distance, metric)
            order = rank if by_rank and not reranked else 0, -score
            if passage.id not in best or order < best[passage.id][0]:
                best[passage.id] = order, passage
    return [(passage, -negated) for (_, negated), passage in sorted(best.values(), key=lambda entry: entry[0])]


def score_of(distance: float, metric: str) -> float:
    """Return a score that rises with similarity: cosine, dot product, or 1 / (1 + squared distance) for l2."""
    if not math.isfinite(distance):
        return 0.0
    if metric == "l2":
        return 1.0 / (1.0 + max(distance, 0.0))
    return 1.0 - distance if metric == "cosine" else -distance


def distance_of(score: float, metric: str) -> float:
    """Return the distance with a score: the inverse of `score_of`. Of l2 every score is over 0."""
    if metric == "l2":
        return 1.0 / score - 1.0 if score > 0 else 1e30
    return 1.0 - score if metric == "cosine" else -score


async def results_of(stores: Stores | None, collection: str, passages: Sequence[Passage]) -> list[tuple[Passage, Json]]:
    """Return passages of a collection as results, without those of files that were removed from clients' stores
    meanwhile."""
    own = passages if collection == STORES else ()  # others may have the same attributes
    keys = {one.id: (str(one.attributes[STORE]), str(one.attributes[FILE])) for one in own}
    known = {} if stores is None or not keys else await stores.names(list(keys.values()))
    results: list[tuple[Passage, Json]] = []
    for passage in passages:
        source = passage.attributes.get("source")
        file = source if isinstance(source, str) else passage.id
        given, attributes = passage.attributes.get(FILENAME), passage.attributes
        name = given if isinstance(given, str) else PurePosixPath(file).name or file
        if (key := keys.get(passage.id)) is not None:
            if key not in known:
                continue
            file, (entry, name) = key[1], known[key]
            attributes = entry.attributes
        result: Json = {"file_id": file, "filename": name, "attributes": attributes}
        result |= {"content": [{"type": "text", "text": passage.text}]}
        results.append((passage, result | {"id": passage.id, "title": passage.title}))  # not in OpenAI's API
    return results
