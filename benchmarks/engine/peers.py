"""The engines under comparison, behind one interface. Peers that are not installed are skipped.

All graphs have 32 edges per node in the bottom layer: hnswlib and faiss with M=16 and efConstruction=200, Vamana
with degree 32, window 200, SymphonyQG with degree 32, ef 200; SymphonyQG also with degree 64 and ef 400, which is what
VIBE (arXiv 2505.17810) sweeps degrees at.
"""

import importlib
import importlib.metadata
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.common.data import Array, DataSet
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


class Vamana:
    """Intel's scalable-vs over float32."""

    label, compressed = "scalable-vs Vamana", False

    def build(self, data: DataSet, threads: int) -> None:
        import svs

        parameters = svs.VamanaBuildParameters(
            alpha=1.2 if data.metric == "l2" else 0.95, graph_max_degree=32, window_size=200, prune_to=28
        )
        self._size = _vamana_bytes(data)
        self._index: Any = svs.Vamana.build(parameters, data.base, _svs_distance(data), num_threads=threads)

    def save(self, directory: Path) -> None:
        self._index.save(*(str(directory / part) for part in ("config", "graph", "data")))

    def load(self, directory: Path, data: DataSet) -> None:
        import svs

        self._size = _vamana_bytes(data)
        rows = svs.VectorDataLoader(str(directory / "data"), svs.DataType.float32)
        graph = svs.GraphLoader(str(directory / "graph"))
        self._index = svs.Vamana(str(directory / "config"), graph, rows, _svs_distance(data))

    def bytes(self) -> int:
        return self._size

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        self._index.num_threads = threads
        self._index.search_window_size = effort
        return np.asarray(self._index.search(queries, 10)[0]).astype(np.int64)


def _vamana_bytes(data: DataSet) -> int:
    return data.base.nbytes + len(data.base) * 33 * 4


def _svs_distance(data: DataSet) -> Any:
    import svs

    return svs.DistanceType.L2 if data.metric == "l2" else svs.DistanceType.MIP


class SymphonyQG:
    """The graph of RaBitQ's authors, with neighbour codes like ours; over float32 rows, or over codes of some bits.

    Only L2 is used: cosine as L2 of unit vectors.
    """

    compressed = True

    def __init__(self, degree: int = 32, ef: int = 200, bits: int = 0) -> None:
        self._degree, self._ef, self._bits = degree, ef, bits
        self.label = "SymphonyQG" if degree == 32 else f"SymphonyQG degree {degree}"
        self.label += f" {bits} bits" if bits else ""

    def build(self, data: DataSet, threads: int) -> None:
        rabitqlib = importlib.import_module("rabitqlib")
        self._index: Any = rabitqlib.SymqgIndex(data.base.shape[1], self._degree, "l2", self._bits)
        self._index.build(np.ascontiguousarray(data.base, np.float32), self._ef, threads)

    def save(self, directory: Path) -> None:
        self._index.save(str(directory / "index"))

    def load(self, directory: Path, data: DataSet) -> None:
        self._index = importlib.import_module("rabitqlib").SymqgIndex.load(str(directory / "index"))

    def bytes(self) -> int:
        with tempfile.TemporaryDirectory() as folder:
            self._index.save(f"{folder}/index")
            return (Path(folder) / "index").stat().st_size

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        answer = self._index.search_batch(np.ascontiguousarray(queries, np.float32), 10, effort, threads)
        ids = next(part for part in map(np.asarray, answer) if part.dtype.kind in "iu")
        return ids.astype(np.int64)


def _symphony() -> list[Contender]:
    return [SymphonyQG(degree, ef, bits) for degree, ef in ((32, 200), (64, 400)) for bits in (0, 8)]


def contenders() -> tuple[list[Contender], dict[str, str]]:
    """Return the available engines, and the versions of the peers."""
    whole = Trinity("float32")
    coded = Trinity("float32", codes=True)
    engines: list[Contender] = [coded, TrinityStepwise(coded), Trinity("float16", codes=True)]
    engines += [whole, TrinityStepwise(whole), Trinity("float16")]
    peers: Sequence[tuple[str, str, Callable[[], list[Any]]]] = (
        ("hnswlib", "hnswlib", lambda: [Hnswlib()]),
        ("faiss", "faiss-cpu", lambda: [Faiss(codes=False), Faiss(codes=True)]),
        ("svs", "scalable-vs", lambda: [Vamana()]),
        ("rabitqlib", "rabitqlib", _symphony),
    )
    versions = {}
    for module, package, make in peers:
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"skipped: {package} ({error})")
            continue
        versions[package] = importlib.metadata.version(package)
        engines += make()
    return engines, versions
