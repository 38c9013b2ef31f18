"""This engine as a contender: batch search, and stepwise, as in a node's pool."""

import functools
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.common.data import Array, DataSet
from benchmarks.common.stepwise import Stepwise
from gpu import GraphIndex

STEPWISE_SLOTS = 8  # about the size that a pool selects on a CPU


class Trinity:
    """Batch search of this engine, with neighbour codes, the default of collections, or without."""

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
    """The same index stepwise, through the functions that the pool's loop calls; one process per thread."""

    def __init__(self, whole: Trinity) -> None:
        self._whole = whole
        self.label, self.compressed = f"{whole.label} stepwise", whole.compressed
        self._processes: ProcessPoolExecutor | None = None
        self._own: Stepwise | None = None
        self._sent_queries: Array | None = None

    def build(self, data: DataSet, threads: int) -> None:
        """Do nothing: the index is shared."""
        self._processes = self._own = None

    def save(self, directory: Path) -> None:
        """Do nothing."""

    def load(self, directory: Path, data: DataSet) -> None:
        """Drop processes of another data set."""
        self._processes = self._own = None

    def bytes(self) -> int:
        return self._whole.bytes()

    def search(self, queries: Array, effort: int, threads: int) -> Array:
        if threads == 1:
            if self._own is None:
                self._own = Stepwise(self._whole.index, STEPWISE_SLOTS)
            return self._own.search(queries, 10, effort)[0]
        if self._processes is None:
            self._folder = tempfile.TemporaryDirectory()
            self._whole.index.save(Path(self._folder.name) / "index")
            self._processes = ProcessPoolExecutor(threads, multiprocessing.get_context("spawn"))
        if self._sent_queries is not queries:
            self._sent_queries = queries
            for number, part in enumerate(np.array_split(queries, threads)):
                np.save(f"{self._folder.name}/{number}.npy", part)
            _search(self._processes, self._folder.name, 16, threads)  # starts processes, which compile
        return _search(self._processes, self._folder.name, effort, threads)


def _search(processes: ProcessPoolExecutor, folder: str, effort: int, threads: int) -> Array:
    parts = [processes.submit(_stepwise_part, folder, number, effort) for number in range(threads)]
    return np.concatenate([part.result() for part in parts])


@functools.lru_cache(1)
def _opened(folder: str) -> Stepwise:
    return Stepwise(GraphIndex.load(Path(folder) / "index"), STEPWISE_SLOTS)


def _stepwise_part(folder: str, number: int, effort: int) -> Array:
    """Search a part of the queries in a worker process."""
    return _opened(folder).search(np.load(f"{folder}/{number}.npy"), 10, effort)[0]
