"""Source of a Qdrant collection. Needs qdrant-client: the extra [qdrant]."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qdrant_client import QdrantClient
from qdrant_client.models import Filter

from runtime.errors import ConfigError
from runtime.integrations.follow.source import Point, call_with_retries

_METRICS = {"Cosine": "cosine", "Euclid": "l2", "Dot": "ip"}


def connect(url: str, key: str = "") -> QdrantClient:
    """Connect. url: of a server, or a directory of the client's local mode."""
    if not url.startswith(("http://", "https://")):
        return call_with_retries(url, QdrantClient, path=url)
    return QdrantClient(url=url, api_key=key or None, check_compatibility=False)


class Qdrant:
    """See `Source`. filter: Qdrant's own filter, as JSON; "" for all points. vector: its name, of several."""

    def __init__(self, client: QdrantClient, collection: str, filter: str = "", vector: str = "") -> None:
        """Raises `ConfigError` for an unsupported collection, `Unavailable`."""
        self._client, self._collection, self._name = client, collection, f"Qdrant's collection {collection!r}"
        try:
            self._filter = Filter.model_validate(json.loads(filter)) if filter else None
        except ValueError as error:
            raise ConfigError(f"the filter is not a valid Qdrant filter: {error}") from error
        vectors = call_with_retries(self._name, client.get_collection, collection).config.params.vectors
        named = dict(vectors) if isinstance(vectors, Mapping) else {"": vectors}
        if not vector and len(named) == 1:
            vector = next(iter(named))
        if named.get(vector) is None:
            raise ConfigError(
                f"{self._name} has no vector {vector!r}: give one of {', '.join(sorted(named)) or 'none'}"
            )
        self._vector, self.dim = vector, int(named[vector].size)
        if str(named[vector].distance.value) not in _METRICS:
            raise ConfigError(
                f"{self._name} has the metric {named[vector].distance.value}; supported: {', '.join(_METRICS)}"
            )
        self.metric = _METRICS[named[vector].distance.value]

    def count(self) -> int:
        arguments: dict[str, Any] = {"count_filter": self._filter, "exact": False}
        return int(call_with_retries(self._name, self._client.count, self._collection, **arguments).count)

    def pages(self, size: int, fields: Sequence[str] | None, vectors: bool) -> Iterator[list[Point]]:
        arguments: dict[str, Any] = {"scroll_filter": self._filter, "limit": size, **self._shape(fields, vectors)}
        offset: Any = None
        while True:
            records, offset = call_with_retries(
                self._name, self._client.scroll, self._collection, offset=offset, **arguments
            )
            yield [self._point(record) for record in records]
            if offset is None:
                return

    def get(self, keys: Sequence[int | str], vectors: bool) -> list[Point]:
        shape = self._shape(None, vectors)
        records = call_with_retries(self._name, self._client.retrieve, self._collection, list(keys), **shape)
        return [self._point(record) for record in records]

    def _shape(self, fields: Sequence[str] | None, vectors: bool) -> dict[str, Any]:
        which = [self._vector] if self._vector else True
        return {"with_payload": True if fields is None else list(fields), "with_vectors": which if vectors else False}

    def _point(self, record: Any) -> Point:
        vector = record.vector.get(self._vector) if isinstance(record.vector, dict) else record.vector
        return Point(record.id, record.payload or {}, vector)
