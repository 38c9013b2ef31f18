"""Source of a Milvus collection. Needs pymilvus: the extra [milvus]."""

from collections.abc import Iterator, Sequence
from typing import Any

from pymilvus import DataType, MilvusClient

from runtime.errors import ConfigError
from runtime.integrations.follow.source import Point, call_with_retries

_METRICS = {"COSINE": "cosine", "L2": "l2", "IP": "ip"}


def connect(url: str, key: str = "") -> MilvusClient:
    """Connect. url: of a server, or a file of Milvus Lite (with the package milvus-lite)."""
    return call_with_retries(url, MilvusClient, url, token=key)


class Milvus:
    """See `Source`. filter: Milvus' own filter expression; "" for all rows. vector: the vector field, of several."""

    def __init__(self, client: MilvusClient, collection: str, filter: str = "", vector: str = "") -> None:
        """Raises `ConfigError` for an unsupported collection, `Unavailable`."""
        self._client, self._collection, self._filter = client, collection, filter
        self._name = f"Milvus' collection {collection!r}"
        described = call_with_retries(self._name, client.describe_collection, collection)["fields"]
        fields = {field["name"]: DataType(field["type"]) for field in described}
        self._key = next(field["name"] for field in described if field.get("is_primary"))
        self._vectors = [name for name, data_type in fields.items() if "VECTOR" in data_type.name]
        supported = [name for name, data_type in fields.items() if data_type == DataType.FLOAT_VECTOR]
        if not vector and len(supported) == 1:
            vector = supported[0]
        if vector not in supported:
            raise ConfigError(
                f"{self._name} has no field {vector!r} of float vectors: give one of {', '.join(supported) or 'none'}"
            )
        self._vector = vector
        self.dim = int(next(field["params"]["dim"] for field in described if field["name"] == vector))
        index = call_with_retries(self._name, client.describe_index, collection, vector) or {}
        metric = str(index.get("metric_type", "COSINE"))
        if metric not in _METRICS:
            raise ConfigError(f"{self._name} has the metric {metric}; supported: {', '.join(_METRICS)}")
        self.metric = _METRICS[metric]

    def count(self) -> int:
        arguments: dict[str, Any] = {"filter": self._filter, "output_fields": ["count(*)"]}
        return int(call_with_retries(self._name, self._client.query, self._collection, **arguments)[0]["count(*)"])

    def pages(self, size: int, fields: Sequence[str] | None, vectors: bool) -> Iterator[list[Point]]:
        arguments: dict[str, Any] = {
            "batch_size": size,
            "filter": self._filter,
            "output_fields": self._output_fields(fields, vectors),
        }
        rows = call_with_retries(self._name, self._client.query_iterator, self._collection, **arguments)
        try:
            while page := call_with_retries(self._name, rows.next):
                yield [self._point(row, vectors) for row in page]
        finally:
            rows.close()

    def get(self, keys: Sequence[int | str], vectors: bool) -> list[Point]:
        shape = self._output_fields(None, vectors)
        rows = call_with_retries(self._name, self._client.get, self._collection, list(keys), output_fields=shape)
        return [self._point(row, vectors) for row in rows]

    def _output_fields(self, fields: Sequence[str] | None, vectors: bool) -> list[str]:
        """Return the output fields. Of an object the whole field is requested; "*" always includes the vectors."""
        named = ["*"] if fields is None else [name.partition(".")[0] for name in fields]
        return [self._key, *named, *([self._vector] if vectors else [])]

    def _point(self, row: Any, vectors: bool) -> Point:
        fields = {name: value for name, value in row.items() if name != self._key and name not in self._vectors}
        return Point(row[self._key], fields, row[self._vector] if vectors else None)
