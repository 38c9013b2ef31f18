"""A collection of Milvus as a source. Needs pymilvus: the extra [milvus]."""

from collections.abc import Iterator, Sequence
from typing import Any

from pymilvus import DataType, MilvusClient

from runtime.errors import ConfigError
from runtime.integrations.follow.source import Point, call_with_retries

_METRICS = {"COSINE": "cosine", "L2": "l2", "IP": "ip"}


def connect(url: str, key: str = "") -> MilvusClient:
    """url: of a server, or a file of Milvus Lite (with the package milvus-lite)."""
    return call_with_retries(url, MilvusClient, url, token=key)


class Milvus:
    """See `Source`. wanted: Milvus' own filter expression; "" for all rows. vector: the field, of several."""

    def __init__(self, client: MilvusClient, collection: str, wanted: str = "", vector: str = "") -> None:
        """Raises `ConfigError` for what cannot be followed, `Unavailable`."""
        self._client, self._collection, self._filter = client, collection, wanted
        self._what = f"Milvus' collection {collection!r}"
        told = call_with_retries(self._what, client.describe_collection, collection)["fields"]
        fields = {field["name"]: DataType(field["type"]) for field in told}
        self._key = next(field["name"] for field in told if field.get("is_primary"))
        self._vectors = [name for name, kind in fields.items() if "VECTOR" in kind.name]
        known = [name for name, kind in fields.items() if kind == DataType.FLOAT_VECTOR]
        if not vector and len(known) == 1:
            vector = known[0]
        if vector not in known:
            raise ConfigError(
                f"{self._what} has no field {vector!r} of float vectors: name one of {', '.join(known) or 'none'}"
            )
        self._vector = vector
        self.dim = int(next(field["params"]["dim"] for field in told if field["name"] == vector))
        index = call_with_retries(self._what, client.describe_index, collection, vector) or {}
        measured = str(index.get("metric_type", "COSINE"))
        if measured not in _METRICS:
            raise ConfigError(f"{self._what} measures by {measured}; known: {', '.join(_METRICS)}")
        self.metric = _METRICS[measured]

    def count(self) -> int:
        asked: dict[str, Any] = {"filter": self._filter, "output_fields": ["count(*)"]}
        return int(call_with_retries(self._what, self._client.query, self._collection, **asked)[0]["count(*)"])

    def pages(self, size: int, fields: Sequence[str] | None, vectors: bool) -> Iterator[list[Point]]:
        asked: dict[str, Any] = {
            "batch_size": size,
            "filter": self._filter,
            "output_fields": self._shape(fields, vectors),
        }
        rows = call_with_retries(self._what, self._client.query_iterator, self._collection, **asked)
        try:
            while page := call_with_retries(self._what, rows.next):
                yield [self._point(row, vectors) for row in page]
        finally:
            rows.close()

    def get(self, keys: Sequence[int | str], vectors: bool) -> list[Point]:
        shape = self._shape(None, vectors)
        found = call_with_retries(self._what, self._client.get, self._collection, list(keys), output_fields=shape)
        return [self._point(row, vectors) for row in found]

    def _shape(self, fields: Sequence[str] | None, vectors: bool) -> list[str]:
        """Of an object the whole field is asked for. All fields come with the vectors in any case."""
        named = ["*"] if fields is None else [name.partition(".")[0] for name in fields]
        return [self._key, *named, *([self._vector] if vectors else [])]

    def _point(self, row: Any, vectors: bool) -> Point:
        fields = {name: value for name, value in row.items() if name != self._key and name not in self._vectors}
        return Point(row[self._key], fields, row[self._vector] if vectors else None)
