"""The index: encoded vectors and a fixed-degree graph over them, built, saved, mapped and searched."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.build.params import MAX_THREADS, BuildDevice, BuildParams, check_within
from gpu.errors import InvalidParams, InvalidVector
from gpu.index import rows, storage
from gpu.index.data import IndexData, bitmap, fastest_bits
from gpu.params import SearchParams

Progress = Callable[[str, float], None]
Checkpoint = Callable[[str, Callable[[], npt.NDArray[Any]]], npt.NDArray[Any]]


class GraphIndex:
    """Nearest-neighbour search over float vectors by a walk on a graph, CAGRA-style (arXiv 2308.15136).

    Make one with `build` or `load`. Distances, smaller is nearer: cosine 1 - cos, l2 the squared distance, ip minus the
    dot product. An index never changes, so any number of threads and engines may share it.
    """

    def __init__(self, data: IndexData, directory: Path | None = None) -> None:
        self.data = data
        self._directory = directory

    @classmethod
    def build(
        cls,
        vectors: npt.ArrayLike,
        *,
        metric: rows.Metric = "cosine",
        degree: int = 32,
        dtype: rows.Dtype = "float32",
        ids: npt.ArrayLike | None = None,
        neighbor_codes: bool = False,
        code_bits: int = 0,
        seed: int = 0,
        threads: int = 1,
        device: BuildDevice = "cpu",
        progress: Progress | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> "GraphIndex":
        """Index `vectors` [N, d] (any float or integer dtype; N ≥ 1).

        degree: edges a node, 2..512. dtype: what traversal reads; int8 keeps float32 rows beside the codes and rescores
        the last candidates with them. ids: int64 [N], what searches return instead of row numbers. neighbor_codes:
        RaBitQ codes of every node's neighbours beside the graph (`gpu.index.data`; not with int8): searches on a
        CPU are faster, and the index is larger by code_bits · d/8 + 8 bytes an edge. code_bits: of a code for each
        dimension, 1..4; 0: as many as are fastest (`gpu.index.data.fastest_bits`). seed: of the random choices, 0 or
        more; on the CPU the same input and seed give the same index. threads: for the build, 1..1024. device: "cuda"
        has the graph built on a GPU, by cuVS (extra [cuvs]) or else by torch. progress: called with a stage's name and
        the fraction done, 0..1. checkpoint: called with the name of an expensive array and a function that computes it;
        returns the array, or the copy that an interrupted build of the same vectors has left.
        Raises InvalidVector (naming the row) and InvalidParams; for "cuda" DeviceUnavailable and DeviceError.
        """
        BuildParams(metric, degree, dtype, neighbor_codes, code_bits, seed, threads, device)
        report = progress or (lambda stage, fraction: None)
        checked = rows.checked_vectors(vectors, metric)
        own_ids = None if ids is None else _checked_ids(ids, len(checked))
        # Compiled code, which opening an index does without.
        from gpu.build.graph import build_graph, neighbor_pairs
        from gpu.build.knn import no_checkpoint
        from gpu.build.neighbor_codes import make_codes

        graph, seeds = build_graph(checked, metric, degree, seed, threads, report, device, checkpoint or no_checkpoint)
        report("encoding", 0.0)
        encoded = rows.encode(checked, metric, dtype, None if neighbor_codes else neighbor_pairs(graph, seed), seed)
        codes = None
        if neighbor_codes:
            scaled = checked * np.float32(encoded.scale)
            bits = code_bits or fastest_bits(checked.shape[1])
            codes = make_codes(scaled, encoded.centre, metric == "l2", graph, seeds, seed, threads, encoded.scale, bits)
        report("encoding", 1.0)
        return cls(IndexData(encoded, graph, seeds, own_ids, codes))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the index to a directory, which appears whole or not at all; an index that is there is replaced."""
        storage.save(self.data, Path(directory))

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "GraphIndex":
        """Map a saved index into memory; takes milliseconds at any size. Raises IndexFormatError.

        Sizes and shapes are checked here, contents by `verify`.
        """
        return cls(storage.load(Path(directory)), Path(directory))

    def verify(self) -> None:
        """Compare every file of a loaded index with its checksum. Raises IndexFormatError that names the file."""
        if self._directory is None:
            raise InvalidParams("this index was built, not loaded: there are no files to verify")
        storage.verify(self._directory)

    def check_graph(self) -> None:
        """Raise IndexFormatError if an edge of a loaded index leads out of it. Reads the graph, and nothing else."""
        storage.check_graph(self.data, self._directory or Path())

    def files(self) -> dict[str, tuple[int, str]]:
        """The files of a loaded index, their bytes and their SHA-256 in hexadecimal, as its description has them."""
        if self._directory is None:
            raise InvalidParams("this index was built, not loaded: it has no files")
        return storage.files(self._directory)

    def search(
        self,
        queries: npt.ArrayLike,
        k: int = 10,
        top_m: int = 64,
        search_width: int = 1,
        patience: int | None = None,
        threads: int = 1,
        allowed: npt.NDArray[np.bool_] | None = None,
        min_allowed: int = 0,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The k nearest of each query [q, d] → ids int64 [q, k] and distances float32 [q, k], nearest first.

        Where there are fewer than k vectors, ids are -1 and distances +inf. For the parameters see `SearchParams`.
        allowed: bool [N], which rows may be results. The walk keeps top_m rows of all, so for the same recall top_m
        grows as the part that is allowed falls; `exact` compares each allowed row instead.
        min_allowed: stop once this many allowed entries precede the next parent in top_m; 0: when all of top_m has been
        expanded.
        Raises InvalidVector and InvalidParams.
        """
        from gpu.cpu.search import search  # compiled code is loaded by whoever searches first

        params = SearchParams(k, top_m, search_width, patience)
        check_within("threads", threads, 1, MAX_THREADS)
        bits = None if allowed is None else bitmap(allowed, self.size)
        nodes, distances = search(self.data, queries, params, threads, allowed=bits, min_allowed=min_allowed)
        return self.data.ids_of(nodes), distances

    def exact(
        self,
        queries: npt.ArrayLike,
        k: int = 10,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """As `search`, by comparing every query with each of `rows` (int64, row numbers; without them all)."""
        from gpu.cpu.exact import nearest

        nodes, distances = nearest(self.data.rows, queries, k, rows)
        return self.data.ids_of(nodes), distances

    def vectors(self, rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The vectors of these rows, float32 [n, d], as exactly as they are kept; of unit length under cosine."""
        kept = self.data.rows
        found = (kept.codes if kept.full is None else kept.full)[np.asarray(rows, np.int64), : kept.dim]
        return found.astype(np.float32) / np.float32(kept.scale)

    @property
    def size(self) -> int:
        """Number of vectors."""
        return len(self.data.graph)

    @property
    def dim(self) -> int:
        return self.data.rows.dim

    @property
    def degree(self) -> int:
        return int(self.data.graph.shape[1])

    @property
    def metric(self) -> str:
        return self.data.rows.metric

    @property
    def dtype(self) -> str:
        return self.data.rows.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of vectors, graph, ids and codes of neighbours."""
        ids = 0 if self.data.ids is None else self.data.ids.nbytes
        codes = 0 if self.data.codes is None else self.data.codes.nbytes
        return self.data.rows.nbytes + self.data.graph.nbytes + ids + codes

    def __repr__(self) -> str:
        return f"GraphIndex({self.size} x {self.dim} {self.dtype}, {self.metric}, degree {self.degree})"


def _checked_ids(ids: npt.ArrayLike, count: int) -> npt.NDArray[np.int64]:
    array = np.asarray(ids)
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise InvalidVector(f"ids have dtype {array.dtype} and shape {array.shape}; integers [{count}] are needed")
    if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        raise InvalidVector(f"id {int(array.max())} is over int64's limit {np.iinfo(np.int64).max}")
    if int(array.min()) < 0:
        raise InvalidVector(f"id {int(array.min())} is negative; -1 stands for a missing result, so ids begin at 0")
    return np.array(array, np.int64)
