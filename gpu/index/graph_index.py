"""`GraphIndex`: encoded vectors with a fixed-degree graph over them; build, save, load and search."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpu.build.params import MAX_THREADS, BuildDevice, BuildParams, Progress, check_within, no_progress
from gpu.errors import InvalidParams, InvalidVector
from gpu.index import rows, storage
from gpu.index.data import IndexData, bitmap, check_mask, fastest_bits
from gpu.params import MAX_TOP_M, SearchParams


class GraphIndex:
    """An approximate nearest-neighbour index: CAGRA-style graph search over float vectors (arXiv 2308.15136).

    Create it with `build` or `load`. Distances, smaller is nearer: cosine 1 - cos, l2 the squared distance, ip minus
    the dot product. An index is immutable: threads and engines can share it.
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
        neighbor_codes: bool = True,
        code_bits: int = 0,
        seed: int = 0,
        threads: int = 1,
        device: BuildDevice = "cpu",
        progress: Progress = no_progress,
    ) -> "GraphIndex":
        """Build an index over `vectors` [N, d] (any float or integer dtype; N ≥ 1).

        degree: edges per node, 2..512. dtype: of the rows. ids: int64 [N], returned by searches instead of row numbers.
        neighbor_codes: store RaBitQ codes of every node's neighbours (`gpu.index.data`): searches on a CPU are faster,
        and the index is larger by code_bits · d/8 + 8 bytes per edge. A GPU's searches do not use them. code_bits: bits
        per dimension of a code, 1..2; 0: the fastest (`gpu.index.data.fastest_bits`). seed: of random choices, 0 or
        more; on the CPU builds are deterministic for an input and seed. threads: of the build, 1..1024. device: "cuda"
        builds the graph on a GPU with cuVS (extra [cuvs]). progress: see `gpu.build.params`.
        Raises InvalidVector (naming the row) and InvalidParams; for "cuda" DeviceUnavailable and DeviceError.
        """
        BuildParams(metric, degree, dtype, code_bits, seed, threads, device)
        checked = rows.checked_vectors(vectors, metric)
        own_ids = None if ids is None else _checked_ids(ids, len(checked))
        # Imported here: compiled code, which opening an index does not need.
        from gpu.build.graph import build_graph
        from gpu.build.neighbor_codes import make_codes

        graph, seeds = build_graph(checked, metric, degree, seed, threads, progress, device)
        progress("encoding", 0.0)
        encoded = rows.encode(checked, metric, dtype)
        codes = None
        if neighbor_codes:
            scaled = checked * np.float32(encoded.scale)
            bits = code_bits or fastest_bits(checked.shape[1])
            codes = make_codes(scaled, encoded.centre, metric == "l2", graph, seeds, seed, threads, encoded.scale, bits)
        progress("encoding", 1.0)
        return cls(IndexData(encoded, graph, seeds, own_ids, codes))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the index to a directory atomically, replacing an existing index."""
        storage.save(self.data, Path(directory))

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "GraphIndex":
        """Memory-map a saved index, in milliseconds at any size. Raises IndexFormatError.

        Checks sizes and shapes; `verify` checks the contents.
        """
        return cls(storage.load(Path(directory)), Path(directory))

    def verify(self) -> None:
        """Check every file of a loaded index against its checksum. Raises IndexFormatError with the file's name."""
        if self._directory is None:
            raise InvalidParams("this index was built in memory, not loaded: it has no files to verify")
        storage.verify(self._directory)

    def check_graph(self) -> None:
        """Raise IndexFormatError if an edge points outside the index. Reads the graph only."""
        storage.check_graph(self.data, self._directory or Path())

    def files(self) -> dict[str, tuple[int, str]]:
        """Return sizes in bytes and SHA-256 (hex) of a loaded index's files by name, as recorded in its meta.json."""
        if self._directory is None:
            raise InvalidParams("this index was built in memory, not loaded: it has no files")
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
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return ids int64 [q, k] and distances float32 [q, k] of the k nearest rows of each query, nearest first.

        queries: [q, d]. Missing results have id -1 and distance +inf. For the parameters see `SearchParams`.
        allowed: bool [N], the rows that may be results. Either each of them is compared with the query, or the graph is
        walked with a top_m that is longer in inverse proportion to their share: see `gpu.cpu.extend.filtered`.
        Raises InvalidVector and InvalidParams.
        """
        from gpu.cpu.extend import filtered  # imported on first use: compiled code
        from gpu.cpu.search import search

        params = SearchParams(k, top_m, search_width, patience)
        check_within("threads", threads, 1, MAX_THREADS)
        if allowed is None:
            nodes, distances = search(self.data, queries, params, threads)
            return self.data.ids_of(nodes), distances
        check_mask(allowed, self.size)
        passing = np.flatnonzero(allowed)
        batched = len(np.atleast_1d(queries)) >= filtered.MIN_BATCH
        scan_rows = filtered.SCAN_ROWS_PER_ENTRY_BATCHED if batched else filtered.SCAN_ROWS_PER_ENTRY
        longer = int(filtered.filtered_top_m(top_m, len(passing), self.size, MAX_TOP_M, scan_rows))
        if not longer:
            return self.exact(queries, k, passing)
        params, bits = replace(params, top_m=longer), bitmap(allowed, self.size)
        nodes, distances = search(self.data, queries, params, threads, allowed=bits, min_allowed=top_m)
        return self.data.ids_of(nodes), distances

    def exact(
        self,
        queries: npt.ArrayLike,
        k: int = 10,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the exact k nearest of `rows` (int64, row numbers; default: all) in the form of `search`."""
        from gpu.cpu.exact import nearest

        nodes, distances = nearest(self.data.rows, queries, k, rows)
        return self.data.ids_of(nodes), distances

    def vectors(self, rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return the vectors of these rows, float32 [n, d], in stored precision; of unit length under cosine."""
        stored = self.data.rows
        codes = stored.codes[np.asarray(rows, np.int64), : stored.dim]
        return codes.astype(np.float32) / np.float32(stored.scale)

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
        """Bytes of vectors, graph, ids and neighbour codes."""
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
        raise InvalidVector(f"id {int(array.min())} is negative; -1 means a missing result, so ids must be at least 0")
    return np.array(array, np.int64)
