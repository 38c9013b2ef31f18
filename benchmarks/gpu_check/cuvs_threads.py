"""cuVS CAGRA driven by several threads through its C library.

cuVS's Python search holds the GIL for the whole call; the C library does not, so Python threads search concurrently,
each with resources, a stream and result arrays of its own.
"""

import contextlib
import ctypes
import importlib
import threading
import time
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_check.time_limit import Skipped

_CUDA = 2  # DLPack's device type
_KINDS = {"i": 0, "u": 1, "f": 2}  # DLPack's type codes
_METRICS = {"l2": 0, "cosine": 0, "ip": 6}  # L2Expanded, InnerProduct; cosine: the set is normalised
_SINGLE_CTA, _AUTO = 0, 100
_DEFAULT_ITOPK = 64


class _Tensor(Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = (
        ("data", c_void_p), ("device", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
        ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", c_void_p),
        ("byte_offset", c_uint64), ("context", c_void_p), ("deleter", c_void_p),
    )  # fmt: skip


class _Filter(Structure):
    """cuVS's filter; type 0: none."""

    _fields_ = (("address", c_void_p), ("type", c_int))


class SearchParams(Structure):
    """cuVS's cuvsCagraSearchParams (26.2 to 26.10)."""

    _fields_ = (
        ("max_queries", c_size_t), ("itopk_size", c_size_t), ("max_iterations", c_size_t), ("algo", c_int),
        ("team_size", c_size_t), ("search_width", c_size_t), ("min_iterations", c_size_t),
        ("thread_block_size", c_size_t), ("hashmap_mode", c_int), ("hashmap_min_bitlen", c_size_t),
        ("hashmap_max_fill_rate", c_float), ("num_random_samplings", c_uint32), ("rand_xor_mask", c_uint64),
        ("persistent", c_bool), ("persistent_lifetime", c_float), ("persistent_device_usage", c_float),
    )  # fmt: skip


class Rate(NamedTuple):
    """Single queries by several threads: their rate and median latency."""

    per_s: float
    p50_s: float


def tensor(array: Any) -> _Tensor:
    """Describe a contiguous device array of CuPy, whose memory it does not own."""
    shape = (c_int64 * array.ndim)(*array.shape)
    described = _Tensor(
        array.data.ptr, _CUDA, 0, array.ndim, _KINDS[array.dtype.kind], 8 * array.dtype.itemsize, 1, shape
    )
    described.keep_alive = shape
    return described


def load_library() -> Any:
    """Load cuVS's C library. Raises Skipped if it is missing."""
    try:
        package = importlib.import_module("libcuvs")
        package.load_library()
        libraries = sorted(Path(str(package.__file__)).parent.glob("lib*/libcuvs_c.so"))
        return ctypes.CDLL(str(libraries[0]) if libraries else "libcuvs_c.so")
    except (ImportError, OSError) as error:
        raise Skipped(f"cuVS's C library is not available: {error}") from None


class ThreadedCuvs:
    """A CAGRA index over our graph, searched by threads through cuVS's C library.

    Raises Skipped if the library or its parameters' layout is unknown, RuntimeError with cuVS's message.
    """

    def __init__(self, cupy: Any, graph: Any, rows: Any, metric: str, library: Any | None = None) -> None:
        """graph, rows: CuPy arrays, which the index may only reference."""
        self._cupy, self._library = cupy, library or load_library()
        self._library.cuvsGetLastErrorText.restype = ctypes.c_char_p
        self._held = tensor(graph), tensor(rows)
        self._resources = c_uint64()
        self._index = c_void_p()
        self._call("cuvsResourcesCreate", byref(self._resources))
        self._call("cuvsCagraIndexCreate", byref(self._index))
        described = tuple(map(byref, self._held))
        self._call("cuvsCagraIndexFromArgs", self._resources, c_int(_METRICS[metric]), *described, self._index)
        self._call("cuvsStreamSync", self._resources)

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, name)(*arguments) != 1:  # CUVS_SUCCESS
            text = self._library.cuvsGetLastErrorText()
            raise RuntimeError(f"{name}: {(text or b'no message').decode(errors='replace').splitlines()[0]}")

    def params(self, itopk: int, block_threads: int = 0, lifetime_s: float = 0.0) -> Any:
        """Return search parameters; with `lifetime_s`, of the persistent kernel. Raises Skipped."""
        pointer = POINTER(SearchParams)()
        self._call("cuvsCagraSearchParamsCreate", byref(pointer))
        made = pointer.contents
        if (made.itopk_size, made.algo, made.persistent) != (_DEFAULT_ITOPK, _AUTO, False):
            raise Skipped("this version's search parameters have another layout")
        made.itopk_size, made.thread_block_size = itopk, block_threads
        if lifetime_s:
            made.algo, made.persistent, made.persistent_lifetime = _SINGLE_CTA, True, lifetime_s
        return pointer

    def single_queries(
        self, queries: Any, k: int, params: Any, *, threads: int, seconds: float
    ) -> tuple[Rate, npt.NDArray[np.int64]]:
        """Search one query a call in `threads` threads for `seconds`, and all queries at least once.

        Returns the rate, and the ids [q, k] found by the first round. Raises RuntimeError.
        """
        nodes = self._cupy.empty((len(queries), k), np.uint32)
        latencies: list[list[float]] = [[] for _ in range(threads)]
        errors: list[BaseException] = []
        start = threading.Barrier(threads + 1)

        def work(number: int) -> None:
            try:
                self._search_share(
                    queries, nodes, k, params, slice(number, None, threads), latencies[number], start, seconds
                )
            except BaseException as error:
                errors.append(error)
                start.abort()

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        with contextlib.suppress(threading.BrokenBarrierError):  # a thread has failed
            start.wait()
        begin = time.perf_counter()
        for worker in workers:
            worker.join()
        taken = time.perf_counter() - begin
        if errors:
            raise RuntimeError(str(errors[0]))
        every = [latency for one in latencies for latency in one]
        return Rate(len(every) / taken, float(np.median(every))), self._cupy.asnumpy(nodes).astype(np.int64)

    def _search_share(
        self, queries: Any, nodes: Any, k: int, params: Any, share: slice, latencies: list[float],
        start: threading.Barrier, seconds: float,
    ) -> None:  # fmt: skip
        """Run one thread: its share of the queries, again and again until the time is over."""
        resources, stream = c_uint64(), self._cupy.cuda.Stream(non_blocking=True)
        self._call("cuvsResourcesCreate", byref(resources))
        self._call("cuvsStreamSet", resources, c_void_p(stream.ptr))
        distances = self._cupy.empty((1, k), np.float32)
        numbers = range(len(queries))[share]
        described = [(tensor(queries[i : i + 1]), tensor(nodes[i : i + 1])) for i in numbers]
        into, none = tensor(distances), _Filter()

        def search(one: tuple[_Tensor, _Tensor]) -> None:
            query, neighbors = byref(one[0]), byref(one[1])
            self._call("cuvsCagraSearch", resources, params, self._index, query, neighbors, byref(into), none)
            self._call("cuvsStreamSync", resources)

        search(described[0])  # starts the persistent kernel
        start.wait()
        end = time.perf_counter() + seconds
        rounds = 0
        while not rounds or time.perf_counter() < end:
            for one in described:
                begin = time.perf_counter()
                search(one)
                latencies.append(time.perf_counter() - begin)
            rounds += 1
        self._call("cuvsResourcesDestroy", resources)
