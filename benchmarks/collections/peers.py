"""Peers of `benchmarks.collections`, if installed: hnswlib, faiss, qdrant-client's local mode, Milvus Lite."""

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.data import Array

K = 10
Search = Callable[[str, Array, int], Array]
"""Searches with the name of a filter, queries [q, d] and effort; returns rows int64 [q, K], padded with -1."""
EXACT = frozenset({"faiss flat", "qdrant local"})
"""Engines that ignore the effort."""
PACKAGES = {"hnswlib": "hnswlib", "faiss": "faiss-cpu", "qdrant local": "qdrant-client", "milvus lite": "milvus-lite"}


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    installed = {}
    for name, package in PACKAGES.items():
        try:
            installed[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def peers(base: Array, passing: Mapping[str, Array], place: Path) -> dict[str, Search]:
    """Return the installed engines, loaded with `base`. passing: which rows pass each filter, by name, bool [N]."""
    searches: dict[str, Search] = {}
    for module, make in (
        ("hnswlib", _hnswlib), ("faiss", _faiss), ("qdrant_client", _qdrant), ("milvus_lite", _milvus)
    ):  # fmt: skip
        try:
            package: Any = importlib.import_module(module)
        except ImportError:
            print(f"  {module}: not installed")
        else:
            searches |= make(package, base, passing, place)
    return searches


def hnsw(hnswlib: Any, base: Array, **options: Any) -> Any:
    graph = hnswlib.Index("l2", base.shape[1])
    graph.init_index(len(base), M=16, ef_construction=200, **options)
    graph.add_items(base, num_threads=1)
    return graph


def _hnswlib(package: Any, base: Array, passing: Mapping[str, Array], place: Path) -> dict[str, Search]:
    graph, allowed = hnsw(package, base), {name: rows.tolist() for name, rows in passing.items()}

    def search(name: str, queries: Array, effort: int) -> Array:
        graph.set_ef(max(effort, K))
        out = np.full((len(queries), K), -1, np.int64)
        with contextlib.suppress(RuntimeError):  # raised for the whole batch if one query finds fewer than k
            out[:] = graph.knn_query(queries, K, num_threads=1, filter=allowed[name].__getitem__)[0].astype(np.int64)
        return out

    return {"hnswlib": search}


def _faiss(package: Any, base: Array, passing: Mapping[str, Array], place: Path) -> dict[str, Search]:
    package.omp_set_num_threads(1)
    graph, flat = package.IndexHNSWFlat(base.shape[1], 16), package.IndexFlatL2(base.shape[1])
    graph.hnsw.efConstruction = 200
    graph.add(base)
    flat.add(base)
    bits = {name: np.packbits(rows, bitorder="little") for name, rows in passing.items()}

    def search(name: str, queries: Array, effort: int) -> Array:
        some = package.SearchParametersHNSW(efSearch=effort, sel=package.IDSelectorBitmap(bits[name]))
        return np.asarray(graph.search(queries, K, params=some)[1])

    def search_flat(name: str, queries: Array, effort: int) -> Array:
        some = package.SearchParameters(sel=package.IDSelectorBitmap(bits[name]))
        return np.asarray(flat.search(queries, K, params=some)[1])

    return {"faiss": search, "faiss flat": search_flat}


def _qdrant(package: Any, base: Array, passing: Mapping[str, Array], place: Path) -> dict[str, Search]:
    """In memory, exhaustive; each query evaluates the filter over every row."""
    models, client = package.models, package.QdrantClient(":memory:")
    client.create_collection(
        "c", vectors_config=models.VectorParams(size=base.shape[1], distance=models.Distance.EUCLID)
    )
    payload = [{name: bool(rows[row]) for name, rows in passing.items()} for row in range(len(base))]
    client.upload_collection("c", vectors=base, payload=payload, ids=list(range(len(base))))

    def search(name: str, queries: Array, effort: int) -> Array:
        out = np.full((len(queries), K), -1, np.int64)
        condition = models.FieldCondition(key=name, match=models.MatchValue(value=True))
        for place, query in enumerate(queries):
            points = client.query_points(
                "c", query=query, query_filter=models.Filter(must=[condition]), limit=K, with_payload=False
            ).points
            out[place, : len(points)] = [point.id for point in points]
        return out

    return {"qdrant local": search}


def _milvus(package: Any, base: Array, passing: Mapping[str, Array], place: Path) -> dict[str, Search]:
    """The engine itself, without gRPC; it uses faiss' HNSW, and evaluates the filter once for all queries of a call."""
    field, kinds = package.FieldSchema, package.DataType
    schema = package.CollectionSchema(
        fields=[
            field(name="id", dtype=kinds.INT64, is_primary=True),
            field(name="vec", dtype=kinds.FLOAT_VECTOR, dim=base.shape[1]),
            *(field(name=name, dtype=kinds.BOOL) for name in passing),
        ]
    )
    collection = package.MilvusLite(str(place / "milvus")).create_collection("c", schema)
    for begin in range(0, len(base), 1000):
        rows = range(begin, min(begin + 1000, len(base)))
        collection.insert(
            [{"id": r, "vec": base[r].tolist(), **{n: bool(p[r]) for n, p in passing.items()}} for r in rows]
        )
    collection.flush()
    index = {"index_type": "HNSW", "metric_type": "L2", "params": {"M": 16, "efConstruction": 200}}
    collection.create_index("vec", index)
    collection.load()

    def search(name: str, queries: Array, effort: int) -> Array:
        out = np.full((len(queries), K), -1, np.int64)
        answer = collection.search(
            queries.tolist(), top_k=K, metric_type="L2", expr=f"{name} == true", output_fields=["id"],
            search_params={"ef": max(effort, K)},
        )  # fmt: skip
        for place, hits in enumerate(answer):
            out[place, : len(hits)] = [hit["id"] for hit in hits]
        return out

    return {"milvus lite": search}


def replaced_in_place(base: Array, rows: int, queries: Array, effort: int) -> dict[str, dict[str, Array]]:
    """Return the results of other libraries after each row n of `base`'s first `rows` was deleted and replaced by row
    `rows` + n, one by one, and the results of their fresh builds of the same vectors: rows of `base`, int64 [q, K].
    """
    ids: dict[str, dict[str, Array]] = {}
    count = len(base) - rows
    now = np.concatenate([np.arange(rows, len(base)), np.arange(count, rows)])
    try:
        package: Any = importlib.import_module("hnswlib")
    except ImportError:
        return ids
    fresh, live = hnsw(package, base[now]), hnsw(package, base[:rows], allow_replace_deleted=True)
    for row in range(count):
        live.mark_deleted(row)
        live.add_items(base[rows + row : rows + row + 1], [rows + row], num_threads=1, replace_deleted=True)
    for graph in (fresh, live):
        graph.set_ef(effort)
    ids["hnswlib"] = {
        "live": live.knn_query(queries, K, num_threads=1)[0].astype(np.int64),
        "fresh": now[fresh.knn_query(queries, K, num_threads=1)[0].astype(np.int64)],
    }
    return ids
