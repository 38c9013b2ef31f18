"""The engines under comparison, each behind the same few calls. A peer that is not installed is left out.

All graphs have 32 edges a node at the bottom: hnswlib, faiss and usearch with M=16 and efConstruction=200, Vamana with
degree 32, window 200, SymphonyQG with degree 32, ef 200. ScaNN has no graph: four of its effort are a leaf. VSAG is
left out: its Python package takes one query a call, with its parameters as JSON.
"""

import functools
import importlib
import importlib.metadata
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.common.data import Array, DataSet
from gpu import CpuEngine, GraphIndex, SearchParams

EFFORTS = (10, 12, 14, 17, 20, 24, 28, 34, 40, 50, 64, 80, 100, 130, 160, 200, 260, 340, 440, 600)


class Contender(Protocol):
    """An engine. `label` and `compressed` (whether its rows are anything but float32) describe it."""

    label: str
    compressed: bool

    def build(self, data: DataSet, threads: int) -> None:
        """Index the data."""

    def bytes(self) -> int:
        """Size of the index in memory, or on disk where the library does not tell."""

    def save(self, directory: Path) -> None:
        """Keep the index in an existing directory."""

    def load(self, directory: Path, data: DataSet) -> None:
        """Take it from there again."""

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        """Ids [q, 10]. `effort` is the length of the list of candidates (ef, top_m, window)."""


class Trinity:
    """This engine, run to completion; with codes of neighbours, as collections are built, or without."""

    def __init__(self, dtype: str, codes: bool = False) -> None:
        self.dtype, self._codes, self.compressed = dtype, codes, codes or dtype != "float32"
        self.label = f"trinity {dtype}" + (" with codes" if codes else "")
        self.index: GraphIndex

    def build(self, data: DataSet, threads: int) -> None:
        self.index = GraphIndex.build(
            data.base,
            metric=data.metric,  # type: ignore[arg-type]
            dtype=self.dtype,  # type: ignore[arg-type]
            neighbor_codes=self._codes,
            threads=threads,
        )

    def save(self, directory: Path) -> None:
        self.index.save(directory / "index")

    def load(self, directory: Path, data: DataSet) -> None:
        self.index = GraphIndex.load(directory / "index")

    def bytes(self) -> int:
        return self.index.nbytes

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        return self.index.search(queries, k=10, top_m=effort, threads=threads)[0]


class TrinityStepwise:
    """The same index through the slots, one extend at a time: as in a node, a process for each thread."""

    def __init__(self, whole: Trinity, slots: int = 32) -> None:
        self._whole, self._slots = whole, slots
        self.label, self.compressed = f"{whole.label} stepwise", whole.compressed
        self._processes: ProcessPoolExecutor | None = None
        self._asked: Array | None = None

    def build(self, data: DataSet, threads: int) -> None:
        """Nothing to do: the index is the other one's."""
        self._processes = None

    def save(self, directory: Path) -> None:
        """Nothing of its own."""

    def load(self, directory: Path, data: DataSet) -> None:
        """Nothing of its own."""
        self._processes = None

    def bytes(self) -> int:
        return self._whole.bytes()

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        if threads == 1:
            return stepwise(self._whole.index, queries, effort, self._slots)
        if self._processes is None:
            self._folder = tempfile.TemporaryDirectory()
            self._whole.index.save(Path(self._folder.name) / "index")
            self._processes = ProcessPoolExecutor(threads, multiprocessing.get_context("spawn"))
        if self._asked is not queries:
            self._asked = queries
            for number, part in enumerate(np.array_split(queries, threads)):
                np.save(f"{self._folder.name}/{number}.npy", part)
            _search(self._processes, self._folder.name, 8, self._slots, threads)  # starts and compiles
        return _search(self._processes, self._folder.name, effort, self._slots, threads)


def _search(processes: ProcessPoolExecutor, folder: str, effort: int, slots: int, threads: int) -> Array:
    parts = [processes.submit(_stepwise_part, folder, number, effort, slots) for number in range(threads)]
    return np.concatenate([part.result() for part in parts])


@functools.lru_cache(1)
def _opened(folder: str) -> GraphIndex:
    return GraphIndex.load(Path(folder) / "index")


def _stepwise_part(folder: str, number: int, effort: int, slots: int) -> Array:
    """In a process of its own."""
    return stepwise(_opened(folder), np.load(f"{folder}/{number}.npy"), effort, slots)


def stepwise(index: GraphIndex, queries: Array, effort: int, slots: int) -> Array:
    """Ids [q, 10], through an engine's slots as the pool does it."""
    engine = CpuEngine({"data": index}, slots=slots)
    params = SearchParams(k=10, top_m=effort, search_width=1)
    found = np.empty((len(queries), 10), np.int64)
    asked = [0] * slots
    following = running = 0
    while following < len(queries) or running:
        while running < slots and following < len(queries):
            asked[engine.admit(queries[following], params, "data")] = following
            following += 1
            running += 1
        for slot in engine.extend().tolist():
            found[asked[slot]] = engine.result(slot)[0]
            engine.release(slot)
            running -= 1
    return found


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
    """Intel's scalable-vs over float32. (Its LVQ codes run on Intel processors only.)"""

    label, compressed = "scalable-vs Vamana", False

    def build(self, data: DataSet, threads: int) -> None:
        import svs

        l2 = data.metric == "l2"
        parameters = svs.VamanaBuildParameters(
            alpha=1.2 if l2 else 0.95, graph_max_degree=32, window_size=200, prune_to=28
        )
        self._size = data.base.nbytes + len(data.base) * 33 * 4
        self._index = svs.Vamana.build(
            parameters, data.base, svs.DistanceType.L2 if l2 else svs.DistanceType.MIP, num_threads=threads
        )

    def save(self, directory: Path) -> None:
        self._index.save(str(directory / "config"), str(directory / "graph"), str(directory / "data"))

    def load(self, directory: Path, data: DataSet) -> None:
        import svs

        self._size = data.base.nbytes + len(data.base) * 33 * 4
        self._index = svs.Vamana(
            str(directory / "config"),
            svs.GraphLoader(str(directory / "graph")),
            svs.VectorDataLoader(str(directory / "data"), svs.DataType.float32),
            svs.DistanceType.L2 if data.metric == "l2" else svs.DistanceType.MIP,
        )

    def bytes(self) -> int:
        return self._size

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        self._index.num_threads = threads
        self._index.search_window_size = effort
        return np.asarray(self._index.search(queries, 10)[0]).astype(np.int64)


class SymphonyQG:
    """RaBitQ's authors' graph, whose codes of neighbours ours are like; over float32 rows, or over codes of some bits.

    L2 alone was tried: cosine as L2 of unit vectors.
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
    """ScaNN as its page recommends: √N leaves, anisotropic 4-bit codes of two dimensions each, exact distances last."""

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
    """Everything that can run here, and the versions of the peers."""
    whole = Trinity("float32")
    coded = Trinity("float32", codes=True)
    found: list[Contender] = [coded, TrinityStepwise(coded), Trinity("float16", codes=True)]
    found += [whole, TrinityStepwise(whole), Trinity("float16"), Trinity("int8")]
    peers: Sequence[tuple[str, str, Callable[[], list[Any]]]] = (
        ("hnswlib", "hnswlib", lambda: [Hnswlib()]),
        ("faiss", "faiss-cpu", lambda: [Faiss(codes=False), Faiss(codes=True)]),
        ("usearch", "usearch", lambda: [Usearch("f32"), Usearch("f16")]),
        ("svs", "scalable-vs", lambda: [Vamana()]),
        ("rabitqlib", "rabitqlib", lambda: [SymphonyQG(), SymphonyQG(8)]),
        ("scann", "scann", lambda: [Scann()]),
    )
    versions = {}
    for module, package, make in peers:
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"left out: {package} ({error})")
            continue
        versions[package] = importlib.metadata.version(package)
        found += make()
    return found, versions
