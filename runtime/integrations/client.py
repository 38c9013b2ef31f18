"""One collection of a node, over HTTP: what the frameworks' classes stand on."""

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from runtime.errors import InvalidRequest, Unavailable, error_from_code

_BODY_BYTES = 1_000_000  # of a write: the node takes 1 MiB
_BODY_DOCUMENTS = 4096

Filter = Mapping[str, Any]
"""In OpenAI's format, as docs/collections.md has it."""
Hybrid = bool | float
"""Whether a text's words are looked for too, or their share, 0 to 1 (docs/hybrid.md)."""


@dataclass(frozen=True)
class SearchHit:
    """A passage. `score` is higher the nearer it is; `metadata` has its attributes, and its title if it has one."""

    id: str
    text: str
    score: float
    metadata: dict[str, Any]


class CollectionClient:
    """Any number of threads may use one. `url`: the node's, with or without `/v1`; `api_key`: "" where it wants none.

    Raises what the node answers with, a `TrinityError`; `Unavailable` where nothing answers.
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

    def search(self, query: str, k: int, filter: Filter | None = None, hybrid: Hybrid = False) -> list[SearchHit]:
        """The k nearest passages to a text that pass a filter, nearest first; with `hybrid` the best of both sides."""
        asked = {"query": query, "max_num_results": k} | ({"filters": filter} if filter else {}) | _ranking(hybrid)
        return [
            SearchHit(
                one["id"],
                one["content"][0]["text"],
                one["score"],
                ({"title": one["title"]} if one["title"] else {}) | one["attributes"],
            )
            for one in self._asked("POST", self._search, _json(asked))["data"]
        ]

    def upsert(self, documents: Sequence[Mapping[str, Any]]) -> int:
        """Store documents (`id`, `text`, `attributes`) in the place of those with their ids; how many.

        Goes in batches of what one request may hold: a batch is stored whole or not at all, and doing it again changes
        nothing more.
        """
        return sum(int(self._asked("PUT", self._documents, body)["count"]) for body in _batches(documents))

    def delete(self, ids: Sequence[str]) -> int:
        """Delete documents by their ids; how many were there. No search finds them any more then."""
        parts = [list(ids[begin : begin + _BODY_DOCUMENTS]) for begin in range(0, len(ids), _BODY_DOCUMENTS)]
        return sum(int(self._asked("DELETE", self._documents, _json({"ids": part}))["count"]) for part in parts)

    def _asked(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, content=body, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            raise Unavailable(f"no answer from {self._http.base_url}: {error!r}") from error
        try:
            told: dict[str, Any] = answer.json()
            if answer.status_code == 200:
                return told
            raised = error_from_code(
                str(told["error"]["code"]), str(told["error"]["message"]), told["error"].get("param")
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raised = Unavailable(f"{answer.url} answered with status {answer.status_code}: {answer.text[:200]!r}")
        raise raised


def _ranking(hybrid: Hybrid) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    if not 0 <= hybrid <= 1:
        raise InvalidRequest(
            f"hybrid is {hybrid}; it must be true, false or the keywords' weight between 0 and 1", "hybrid"
        )
    share = 0.5 if hybrid is True else hybrid
    weights = {"embedding_weight": 1 - share, "text_weight": share}
    return {"ranking_options": {"score_threshold": -1e9, "hybrid_search": weights}} if share else {}


def _json(value: object) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _batches(documents: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Bodies of writes, each within what a request may hold. A document that is too large alone is the node's to
    refuse."""
    waiting: list[bytes] = []
    size = 0
    for document in documents:
        one = _json(document)
        if waiting and (size + len(one) > _BODY_BYTES or len(waiting) == _BODY_DOCUMENTS):
            yield b'{"documents": [%s]}' % b",".join(waiting)
            waiting, size = [], 0
        waiting.append(one)
        size += len(one) + 1
    if waiting:
        yield b'{"documents": [%s]}' % b",".join(waiting)
