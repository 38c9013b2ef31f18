"""Databases to follow behind one interface: an in-memory fake, Qdrant's local mode, Milvus Lite."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from runtime.integrations.follow.source import Point, Source

DIM = 3


class Database(Protocol):
    """A collection `a` of vectors of `DIM` numbers, measured by cosine. Ids are integers; `n` is a field."""

    def put(self, key: int, vector: Sequence[float], **fields: Any) -> None: ...

    def remove(self, key: int) -> None: ...

    def source(self, least_n: int | None = None) -> Source:
        """Return a source of all points, or of those with `n` >= `least_n`."""


class FakeDatabase:
    """In-memory database. `read`: the number of fields of each point read; `failures`: errors of the next pages."""

    dim, metric = DIM, "cosine"

    def __init__(self) -> None:
        self.points: dict[int | str, Point] = {}
        self.read: list[int] = []
        self.failures: list[Exception] = []
        self.least_n: int | None = None

    def put(self, key: int, vector: Sequence[float], **fields: Any) -> None:
        self.points[key] = Point(key, fields, vector)

    def remove(self, key: int) -> None:
        del self.points[key]

    def source(self, least_n: int | None = None) -> Source:
        self.least_n = least_n
        return self

    def count(self) -> int:
        return len(self.points)

    def pages(self, size: int, fields: Sequence[str] | None, vectors: bool) -> Iterator[list[Point]]:
        keys = sorted(key for key, point in self.points.items() if point.fields.get("n", 0) >= (self.least_n or 0))
        for begin in range(0, len(keys), size):
            if self.failures:
                raise self.failures.pop()
            page = [self._selected(key, fields, vectors) for key in keys[begin : begin + size]]
            self.read += [len(point.fields) for point in page]
            yield page

    def get(self, keys: Sequence[int | str], vectors: bool) -> list[Point]:
        found = [self._selected(key, None, vectors) for key in keys if key in self.points]
        self.read += [len(point.fields) for point in found]
        return found

    def _selected(self, key: int | str, fields: Sequence[str] | None, vectors: bool) -> Point:
        point = self.points[key]
        kept = {name: value for name, value in point.fields.items() if fields is None or name in fields}
        return Point(key, kept, point.vector if vectors else None)


class QdrantDatabase:
    """Local mode, at a directory; `path` can be opened by one client at a time."""

    def __init__(self, directory: Path) -> None:
        from qdrant_client import QdrantClient
        from qdrant_client.models import Distance, VectorParams

        self.path = str(directory / "qdrant")
        self.client = QdrantClient(path=self.path)
        self.client.create_collection("a", vectors_config=VectorParams(size=DIM, distance=Distance.COSINE))

    def put(self, key: int, vector: Sequence[float], **fields: Any) -> None:
        from qdrant_client.models import PointStruct

        self.client.upsert("a", [PointStruct(id=key, vector=list(vector), payload=fields)])

    def remove(self, key: int) -> None:
        self.client.delete("a", [key])

    def source(self, least_n: int | None = None) -> Source:
        from runtime.integrations.follow.qdrant import Qdrant

        wanted = "" if least_n is None else f'{{"must": [{{"key": "n", "range": {{"gte": {least_n}}}}}]}}'
        return Qdrant(self.client, "a", wanted)

    def close(self) -> None:
        self.client.close()


class MilvusDatabase:
    """Milvus Lite, with a schema of id, vector, text, and dynamic fields."""

    def __init__(self, directory: Path) -> None:
        from pymilvus import DataType, MilvusClient

        self.path = str(directory / "milvus.db")
        self.client = MilvusClient(self.path)
        schema = self.client.create_schema(auto_id=False, enable_dynamic_field=True)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
        schema.add_field("text", DataType.VARCHAR, max_length=1000)
        index = self.client.prepare_index_params()
        index.add_index("vector", metric_type="COSINE", index_type="FLAT")
        self.client.create_collection("a", schema=schema, index_params=index)

    def put(self, key: int, vector: Sequence[float], **fields: Any) -> None:
        self.client.upsert("a", [{"id": key, "vector": list(vector), **fields}])

    def remove(self, key: int) -> None:
        self.client.delete("a", ids=[key])

    def source(self, least_n: int | None = None) -> Source:
        from runtime.integrations.follow.milvus import Milvus

        return Milvus(self.client, "a", "" if least_n is None else f"n >= {least_n}")

    def close(self) -> None:
        self.client.close()


def _needs(module: str, extra: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed (the extra [{extra}])")


needs_qdrant = _needs("qdrant_client", "qdrant")
needs_milvus = _needs("milvus_lite", "milvus")
EVERY_DATABASE = [
    pytest.param(lambda directory: FakeDatabase(), id="fake"),
    pytest.param(QdrantDatabase, id="qdrant", marks=needs_qdrant),
    pytest.param(MilvusDatabase, id="milvus", marks=needs_milvus),
]
