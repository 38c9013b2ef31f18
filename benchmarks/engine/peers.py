"""The engines under comparison, behind one interface. Peers that are not installed are skipped.

All graphs have 32 edges per node in the bottom layer: hnswlib, faiss and usearch with M=16 and efConstruction=200,
Vamana with degree 32, window 200, SymphonyQG with degree 32, ef 200, VSAG with degree 32, ef 300. ScaNN has no graph:
it searches effort / 4 leaves.
"""

import importlib
import importlib.metadata
import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.common.data import Array, DataSet
from benchmarks.engine.avx512 import MASKED_PEERS, is_masked
from benchmarks.engine.trinity import Trinity, TrinityStepwise

EFFORTS = (10, 12, 14, 17, 20, 24, 28, 34, 40, 50, 64, 80, 100, 130, 160, 200, 260, 340, 440, 600)


class Contender(Protocol):
    """An engine under comparison. compressed: whether its rows are not float32."""

    label: str
    compressed: bool

    def build(self, data: DataSet, threads: int) -> None:
        """Build an index."""

    def bytes(self) -> int:
        """Return the size of the index in memory, or on disk if the library does not report it."""

    def save(self, directory: Path) -> None:
        """Save the index to an existing directory."""

    def load(self, directory: Path, data: DataSet) -> None:
        """Load the index from a directory."""

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        """Return ids [q, 10]. effort: length of the candidate list (ef, top_m, window)."""


class Hnswlib:
    label, compressed = "hnswlib", False

    def build(self, data: DataSet, threads: int) -> None:
        import hnswlib

        self._index = hnswlib.Index("l2" if data.metric == "l2" else "ip", data.base.shape[1])
        self._index.init_index(len(data.base), ef_construction=200, M=16)
        self._index.set_num_threads(threads)
        self._index.add_items(data.base)

    def save(self, directory: Path) -> None:
        self._index.save_index(str(directory / "index"))

    def load(self, directory: Path, data: DataSet) -> None:
        import hnswlib

        self._index = hnswlib.Index("l2" if data.metric == "l2" else "ip", data.base.shape[1])
        self._index.load_index(str(directory / "index"))

    def bytes(self) -> int:
        return int(self._index.index_file_size())

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        self._index.set_num_threads(threads)
        self._index.set_ef(effort)
        return np.asarray(self._index.knn_query(queries, 10)[0]).astype(np.int64)


class Faiss:
    """faiss HNSW over float32, or over 8-bit codes."""

    def __init__(self, codes: bool) -> None:
        self._codes, self.compressed = codes, codes
        self.label = "faiss HNSW SQ8" if codes else "faiss HNSW"

    def build(self, data: DataSet, threads: int) -> None:
        import faiss

        faiss.omp_set_num_threads(threads)
        metric = faiss.METRIC_L2 if data.metric == "l2" else faiss.METRIC_INNER_PRODUCT
        dim = data.base.shape[1]
        if self._codes:
            self._index = faiss.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_8bit, 16, metric)
        else:
            self._index = faiss.IndexHNSWFlat(dim, 16, metric)
        self._index.hnsw.efConstruction = 200
        if self._codes:
            self._index.train(data.base)
        self._index.add(data.base)

    def save(self, directory: Path) -> None:
        import faiss

        faiss.write_index(self._index, str(directory / "index"))

    def load(self, directory: Path, data: DataSet) -> None:
        import faiss

        self._index = faiss.read_index(str(directory / "index"))

    def bytes(self) -> int:
        import faiss

        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "index"
            faiss.write_index(self._index, str(path))
            return path.stat().st_size

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        import faiss

        faiss.omp_set_num_threads(threads)
        self._index.hnsw.efSearch = effort
        return np.asarray(self._index.search(queries, 10)[1])


class Usearch:
    """usearch over float32 or float16 rows."""

    def __init__(self, dtype: str) -> None:
        self._dtype, self.compressed = dtype, dtype != "f32"
        self.label = f"usearch {dtype}"

    def build(self, data: DataSet, threads: int) -> None:
        from usearch.index import Index

        self._index = Index(
            ndim=data.base.shape[1],
            metric="l2sq" if data.metric == "l2" else "ip",
            dtype=self._dtype,
            connectivity=16,
            expansion_add=200,
        )
        self._index.add(np.arange(len(data.base)), data.base, threads=threads)

    def save(self, directory: Path) -> None:
        self._index.save(str(directory / "index"))

    def load(self, directory: Path, data: DataSet) -> None:
        from usearch.index import Index

        self._index = Index.restore(str(directory / "index"), view=False)

    def bytes(self) -> int:
        return int(self._index.memory_usage)

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        self._index.expansion_search = effort
        return np.asarray(self._index.search(queries, 10, threads=threads).keys).astype(np.int64)


class Vamana:
    """Intel's scalable-vs over float32."""

    label, compressed = "scalable-vs Vamana", False
    _index: Any

    def build(self, data: DataSet, threads: int) -> None:
        self._make(data, data.base, threads)

    def _make(self, data: DataSet, rows: Any, threads: int) -> None:
        import svs

        parameters = svs.VamanaBuildParameters(
            alpha=1.2 if data.metric == "l2" else 0.95, graph_max_degree=32, window_size=200, prune_to=28
        )
        self._size = data.base.nbytes + len(data.base) * 33 * 4
        self._index = svs.Vamana.build(parameters, rows, self._distance(data), num_threads=threads)

    def save(self, directory: Path) -> None:
        self._index.save(*(str(directory / part) for part in ("config", "graph", "data")))

    def load(self, directory: Path, data: DataSet) -> None:
        import svs

        self._open(directory, data, svs.VectorDataLoader(str(directory / "data"), svs.DataType.float32))

    def _open(self, directory: Path, data: DataSet, rows: Any) -> None:
        import svs

        self._size = data.base.nbytes + len(data.base) * 33 * 4
        graph = svs.GraphLoader(str(directory / "graph"))
        self._index = svs.Vamana(str(directory / "config"), graph, rows, self._distance(data))

    @staticmethod
    def _distance(data: DataSet) -> Any:
        import svs

        return svs.DistanceType.L2 if data.metric == "l2" else svs.DistanceType.MIP

    def bytes(self) -> int:
        return self._size

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        self._index.num_threads = threads
        self._index.search_window_size = effort
        return np.asarray(self._index.search(queries, 10)[0]).astype(np.int64)


class VamanaLVQ(Vamana):
    """The same over LVQ codes: 4 bits per component, and 8 bits of the residual for reranking."""

    label, compressed = "scalable-vs LVQ4x8", True

    def build(self, data: DataSet, threads: int) -> None:
        import svs

        with tempfile.TemporaryDirectory() as folder:
            svs.write_vecs(data.base, f"{folder}/base.fvecs")
            rows = svs.VectorDataLoader(f"{folder}/base.fvecs", svs.DataType.float32, data.base.shape[1])
            self._make(data, svs.LVQLoader(rows, primary=4, residual=8), threads)

    def load(self, directory: Path, data: DataSet) -> None:
        import svs

        self._open(directory, data, svs.LVQLoader(str(directory / "data")))

    def bytes(self) -> int:
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder))
            return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


class Vsag:
    """VSAG's HGraph over 8-bit codes, with float32 reranking. Its package takes one query per call."""

    label, compressed = "VSAG HGraph SQ8", True

    def _new(self, data: DataSet, threads: int) -> Any:
        pyvsag = importlib.import_module("pyvsag")
        index_params = {
            "base_quantization_type": "sq8_uniform",
            "use_reorder": True,
            "precise_quantization_type": "fp32",
            "max_degree": 32,
            "ef_construction": 300,
            "build_thread_count": threads,
        }
        metric = "l2" if data.metric == "l2" else "cosine"
        params = {"dtype": "float32", "metric_type": metric, "dim": data.base.shape[1], "index_param": index_params}
        return pyvsag.Index("hgraph", json.dumps(params))

    def build(self, data: DataSet, threads: int) -> None:
        self._index = self._new(data, threads)
        count, dim = data.base.shape
        self._index.build(np.ascontiguousarray(data.base).ravel(), np.arange(count, dtype=np.int64), count, dim)

    def save(self, directory: Path) -> None:
        self._index.save(str(directory / "index"))

    def load(self, directory: Path, data: DataSet) -> None:
        self._index = self._new(data, 1)
        self._index.load(str(directory / "index"))

    def bytes(self) -> int:
        with tempfile.TemporaryDirectory() as folder:
            self._index.save(f"{folder}/index")
            return (Path(folder) / "index").stat().st_size

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        search_params = json.dumps({"hgraph": {"ef_search": effort}})

        def ids(query: Array) -> Array:
            return np.asarray(self._index.knn_search(query, 10, search_params)[0])

        with ThreadPoolExecutor(threads) as pool:
            return np.stack(list(pool.map(ids, queries) if threads > 1 else map(ids, queries))).astype(np.int64)


class SymphonyQG:
    """The graph of RaBitQ's authors, with neighbour codes like ours; over float32 rows, or over codes of some bits.

    Only L2 is used: cosine as L2 of unit vectors.
    """

    compressed = True

    def __init__(self, bits: int = 0) -> None:
        self._bits = bits
        self.label = f"SymphonyQG {bits} bits" if bits else "SymphonyQG"

    def build(self, data: DataSet, threads: int) -> None:
        rabitqlib = importlib.import_module("rabitqlib")
        self._index: Any = rabitqlib.SymqgIndex(data.base.shape[1], 32, "l2", self._bits)
        self._index.build(np.ascontiguousarray(data.base, np.float32), 200, threads)

    def save(self, directory: Path) -> None:
        self._index.save(str(directory / "index"))

    def load(self, directory: Path, data: DataSet) -> None:
        self._index = importlib.import_module("rabitqlib").SymqgIndex.load(str(directory / "index"))

    def bytes(self) -> int:
        with tempfile.TemporaryDirectory() as folder:
            self._index.save(f"{folder}/index")
            return (Path(folder) / "index").stat().st_size

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        found = self._index.search_batch(np.ascontiguousarray(queries, np.float32), 10, effort, threads)
        ids = next(part for part in map(np.asarray, found) if part.dtype.kind in "iu")
        return ids.astype(np.int64)


class Scann:
    """ScaNN with its recommended settings: √N leaves, anisotropic 4-bit codes of two dimensions, exact reranking."""

    label, compressed = "ScaNN", True

    def build(self, data: DataSet, threads: int) -> None:
        scann = importlib.import_module("scann").scann_ops_pybind
        metric, threshold = ("squared_l2", float("nan")) if data.metric == "l2" else ("dot_product", 0.2)
        leaves = int(len(data.base) ** 0.5)
        tree = scann.builder(data.base, 10, metric).set_n_training_threads(threads)
        tree = tree.tree(leaves, max(1, leaves // 20), training_sample_size=min(len(data.base), 100_000))
        coded = tree.score_ah(2, anisotropic_quantization_threshold=threshold)
        self._index: Any = coded.reorder(100).build()

    def save(self, directory: Path) -> None:
        self._index.serialize(str(directory))

    def load(self, directory: Path, data: DataSet) -> None:
        self._index = importlib.import_module("scann").scann_ops_pybind.load_searcher(str(directory))

    def bytes(self) -> int:
        with tempfile.TemporaryDirectory() as folder:
            self._index.serialize(folder)
            return sum(path.stat().st_size for path in Path(folder).iterdir())

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        found = self._index.search_batched(queries, 10, max(30, effort), max(1, effort // 4))[0]
        return np.asarray(found).astype(np.int64)


def contenders() -> tuple[list[Contender], dict[str, str]]:
    """Return the available engines, and the versions of the peers."""
    whole = Trinity("float32")
    coded = Trinity("float32", codes=True)
    found: list[Contender] = [coded, TrinityStepwise(coded), Trinity("float16", codes=True)]
    found += [whole, TrinityStepwise(whole), Trinity("float16"), Trinity("int8")]
    peers: Sequence[tuple[str, str, Callable[[], list[Any]]]] = (
        ("hnswlib", "hnswlib", lambda: [Hnswlib()]),
        ("faiss", "faiss-cpu", lambda: [Faiss(codes=False), Faiss(codes=True)]),
        ("usearch", "usearch", lambda: [Usearch("f32"), Usearch("f16")]),
        ("svs", "scalable-vs", lambda: [Vamana(), VamanaLVQ()]),
        ("rabitqlib", "rabitqlib", lambda: [SymphonyQG(), SymphonyQG(8)]),
        ("scann", "scann", lambda: [Scann()]),
        ("pyvsag", "pyvsag", lambda: [Vsag()]),
    )
    versions = {}
    for module, package, make in peers:
        if is_masked() and module not in MASKED_PEERS:
            continue
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"skipped: {package} ({error})")
            continue
        versions[package] = importlib.metadata.version(package)
        found += make()
    return found, versions
