"""HTTP client of one collection of a node, the basis of the framework integrations."""

import contextlib
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from runtime.errors import InvalidRequest, Unavailable, error_from_response

_BODY_BYTES = 1_000_000  # of a write; the node's limit is 1 MiB
_BODY_DOCUMENTS = 4096

Filter = Mapping[str, Any]
"""A filter in OpenAI's format (docs/collections.md)."""
Hybrid = bool | float
"""Whether to add keyword search, or its weight in the ranking, 0 to 1 (docs/hybrid.md)."""
Rerank = bool | None
"""Whether the node's reranker orders the passages (docs/rerank.md); None: if the node has one."""


@dataclass(frozen=True)
class SearchHit:
    """A passage. A higher `score` is nearer; `metadata` contains the attributes, and the title if there is one."""

    id: str
    text: str
    score: float
    metadata: dict[str, Any]


class CollectionClient:
    """Searches and writes one collection. Thread-safe.

    url: of the node, with or without `/v1`. api_key: "" if the node requires none. Methods raise the node's error as a
    `TrinityError`, and `Unavailable` if the node does not respond.
    """

    def __init__(self, url: str, collection: str, api_key: str = "", *, timeout_s: float = 60.0) -> None:
        name = quote(collection, safe="")
        self._search = f"vector_stores/{name}/search"
        self._documents = f"collections/{name}/documents"
        self._http = httpx.Client(
            base_url=f"{url.rstrip('/').removesuffix('/v1')}/v1/",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
        )
        self.close = weakref.finalize(self, self._http.close)

    def search(
        self, query: str, k: int, filter: Filter | None = None, hybrid: Hybrid = False, rerank: Rerank = None
    ) -> list[SearchHit]:
        """Return the k passages nearest to a text that pass a filter, best first; `hybrid` fuses a keyword search.

        Raises `InvalidRequest` for `rerank=True` on a node without reranker.
        """
        body = {"query": query, "max_num_results": k, "ranking_options": _ranking(hybrid, rerank)}
        page = self._request("POST", self._search, _json(body | ({"filters": filter} if filter else {})))
        if rerank and "reranked" not in page:
            raise InvalidRequest("the node has no reranker: set model in [rerank] of its configuration", "rerank")
        return [
            SearchHit(
                hit["id"],
                hit["content"][0]["text"],
                hit["score"],
                ({"title": hit["title"]} if hit["title"] else {}) | hit["attributes"],
            )
            for hit in page["data"]
        ]

    def upsert(self, documents: Sequence[Mapping[str, Any]]) -> int:
        """Store documents (`id`, `text`, `attributes`), and replace those with the same ids. Returns how many.

        Sends batches within the limits of a request. Each batch is atomic, and the call is idempotent.
        """
        return sum(int(self._request("PUT", self._documents, body)["count"]) for body in _batches(documents))

    def delete(self, ids: Sequence[str]) -> int:
        """Delete documents by id. Returns how many existed. No later search finds them."""
        parts = [list(ids[begin : begin + _BODY_DOCUMENTS]) for begin in range(0, len(ids), _BODY_DOCUMENTS)]
        return sum(int(self._request("DELETE", self._documents, _json({"ids": part}))["count"]) for part in parts)

    def _request(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, content=body, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._http.base_url} does not respond: {error!r}") from error
        if response.status_code == 200:
            with contextlib.suppress(ValueError, TypeError):
                return dict(response.json())
        raise error_from_response(response.status_code, response.content)


def _ranking(hybrid: Hybrid, rerank: Rerank) -> dict[str, Any]:
    """Return the ranking options of a search. Raises `InvalidRequest`."""
    if not 0 <= hybrid <= 1:
        raise InvalidRequest(
            f"hybrid is {hybrid}; it must be true, false or the keywords' weight between 0 and 1", "hybrid"
        )
    options: dict[str, Any] = {"ranker": "none" if rerank is False else "auto", "score_threshold": -1e9}
    share = 0.5 if hybrid is True else hybrid
    weights = {"embedding_weight": 1 - share, "text_weight": share}
    return options | {"hybrid_search": weights} if share else options


def _json(value: object) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _batches(documents: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield bodies of writes within the limits of a request. A single document above the limit is left for the node to
    reject."""
    batch: list[bytes] = []
    size = 0
    for document in documents:
        line = _json(document)
        if batch and (size + len(line) > _BODY_BYTES or len(batch) == _BODY_DOCUMENTS):
            yield b'{"documents": [%s]}' % b",".join(batch)
            batch, size = [], 0
        batch.append(line)
        size += len(line) + 1
    if batch:
        yield b'{"documents": [%s]}' % b",".join(batch)
