"""How vectors lie in memory: what the search reads, and how a query is made to fit.

| dtype | a row | traversal distance |
|---|---|---|
| float32 | d floats, zero-padded to 16 | exact |
| float16 | d halves of x·scale, zero-padded to 16 | of the stored halves |
| int8 | d codes of x - centre, zero-padded to 16; the row's scale and squared norm as float32 | of the codes |

float16's `scale` is a power of two that keeps every value in range. int8 rows have float32 rows beside them, with which
the nearest candidates are rescored.
Rows start on boundaries of 64 bytes where their length allows. Under cosine the vectors are normalised first, and a
zero vector stays zero: its cosine to anything counts as 0 and its distance as 1.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gpu.errors import InvalidParams, InvalidVector

Metric = Literal["cosine", "l2", "ip"]
Dtype = Literal["float32", "float16", "int8"]
METRICS: tuple[str, ...] = get_args(Metric)
DTYPES: tuple[str, ...] = get_args(Dtype)
MAX_DIM = 16384
_LINE = 64
_F16_MAX = 32768.0

FloatArray = npt.NDArray[np.float32]
AnyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """The encoded vectors of an index.

    codes: what traversal reads, [N, row length], C order, rows on cache lines.
    full: float32 [N, padded d] for rescoring, or None where `codes` is exact enough.
    centre: float32 [d], subtracted before int8 encoding (zeros otherwise).
    scale: float16 rows hold x·scale.
    """

    metric: str
    dtype: str
    dim: int
    codes: AnyArray
    full: FloatArray | None
    centre: FloatArray
    scale: float

    @property
    def lanes(self) -> int:
        """Elements of a row that enter the sum: d, padded to the vector width."""
        return padded(self.dim)

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes) + (0 if self.full is None else int(self.full.nbytes))


def padded(dim: int) -> int:
    """d, rounded up to 16 elements, the width of the vector loops."""
    return -(-dim // 16) * 16


def aligned_empty(shape: tuple[int, int], dtype: npt.DTypeLike) -> AnyArray:
    """An uninitialised array that starts on a cache line."""
    kind = np.dtype(dtype)
    size = shape[0] * shape[1] * kind.itemsize
    raw = np.empty(size + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + size].view(kind).reshape(shape)


def checked_vectors(vectors: npt.ArrayLike, metric: str) -> FloatArray:
    """Vectors as float32 [N, d], refused by the row where one is not finite or its squared norm is not.

    Raises InvalidVector; InvalidParams for an unknown metric.
    """
    if metric not in METRICS:
        raise InvalidParams(f"metric {metric!r} is none of {', '.join(METRICS)}")
    array = np.asarray(vectors)
    if array.ndim != 2 or array.shape[0] == 0 or array.shape[1] == 0:
        raise InvalidVector(f"vectors have shape {array.shape}; [N, d] with N and d at least 1 is needed")
    if array.dtype.kind not in "fiu":
        raise InvalidVector(f"vectors have dtype {array.dtype}; floats or integers are needed")
    if array.shape[1] > MAX_DIM:
        raise InvalidVector(f"vectors have {array.shape[1]} dimensions; the limit is {MAX_DIM}")
    if array.shape[0] >= 1 << 31:
        raise InvalidVector(f"{array.shape[0]} vectors; one index holds fewer than 2^31")
    out = np.empty(array.shape, np.float32)
    for begin in range(0, len(array), 65536):
        block = array[begin : begin + 65536].astype(np.float64)
        squares = np.einsum("ij,ij->i", block, block)
        good = np.isfinite(squares)
        if metric == "cosine":
            block /= np.where(squares > 0, np.sqrt(np.where(good, squares, 1)), 1)[:, None]
        else:
            good &= squares <= np.finfo(np.float32).max / 8  # so that no squared distance overflows
        if not good.all():
            raise InvalidVector(_complaint(begin + int(np.argmin(good)), array))
        out[begin : begin + 65536] = block
    return out


def _complaint(row: int, array: AnyArray) -> str:
    values = array[row].astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        return f"row {row} holds {values[bad[0]]} at position {bad[0]}; every value must be finite"
    return f"row {row} is too long: its squared norm exceeds an eighth of float32's range"


def encode(vectors: FloatArray, metric: str, dtype: str) -> Rows:
    """Encode vectors that `checked_vectors` returned. Raises InvalidParams for an unknown dtype."""
    if dtype not in DTYPES:
        raise InvalidParams(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    count, dim = vectors.shape
    centre = np.zeros(dim, np.float32)
    exact = _padded_copy(vectors, np.float32)
    if dtype == "float32":
        return Rows(metric, dtype, dim, exact, None, centre, 1.0)
    if dtype == "float16":
        largest = float(np.abs(vectors).max())
        scale = 2.0 ** np.floor(np.log2(_F16_MAX / largest)) if metric != "cosine" and largest > 0 else 1.0
        return Rows(metric, dtype, dim, _padded_copy(vectors * np.float32(scale), np.float16), None, centre, scale)
    centre = vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    codes = aligned_empty(*code_shape(count, dim, dtype))
    codes[:] = 0
    for begin in range(0, count, 65536):
        block = vectors[begin : begin + 65536] - centre
        steps = np.abs(block).max(axis=1) / 127
        quantised = np.rint(block / np.where(steps > 0, steps, 1)[:, None])
        target = codes[begin : begin + 65536]
        target[:, :dim] = quantised
        tail = np.stack([steps, np.einsum("ij,ij->i", block, block)], axis=1).astype(np.float32)
        target[:, padded(dim) : padded(dim) + 8] = tail.view(np.int8)
    return Rows(metric, dtype, dim, codes, exact, centre, 1.0)


def code_shape(size: int, dim: int, dtype: str) -> tuple[tuple[int, int], npt.DTypeLike]:
    """Shape and element type of `Rows.codes`."""
    if dtype == "int8":
        return (size, -(-(padded(dim) + 8) // _LINE) * _LINE), np.int8
    return (size, padded(dim)), np.dtype(dtype)


def _padded_copy(vectors: FloatArray, dtype: npt.DTypeLike) -> AnyArray:
    out = aligned_empty((vectors.shape[0], padded(vectors.shape[1])), dtype)
    out[:, : vectors.shape[1]] = vectors
    out[:, vectors.shape[1] :] = 0
    return out


def query_bytes(dim: int, dtype: str) -> int:
    """Bytes of a prepared query: its float32 lanes, and before them the int8 codes where the rows are codes."""
    return padded(dim) * (5 if dtype == "int8" else 4)


def checked_queries(queries: npt.ArrayLike, dim: int, metric: str) -> FloatArray:
    """Queries as float32 [q, d], normalised under cosine. Raises InvalidVector, naming the row."""
    array = np.asarray(queries)
    if array.ndim != 2 or array.shape[1] != dim:
        raise InvalidVector(f"queries have shape {array.shape}; this index needs [q, {dim}]")
    if len(array) == 0:
        return np.empty((0, dim), np.float32)
    return checked_vectors(array, metric)


def prepare(queries: FloatArray, rows: Rows, out: npt.NDArray[np.uint8], scales: FloatArray) -> None:
    """Write checked queries as the search reads them: out uint8 [q, at least query_bytes], scales float32 [q]."""
    dim, lanes = rows.dim, rows.lanes
    factor = np.float32(rows.scale if rows.metric == "l2" else 1.0)
    start = lanes if rows.dtype == "int8" else 0
    exact = out[:, start : start + 4 * lanes].view(np.float32)
    exact[:, :dim] = queries * factor
    exact[:, dim:] = 0
    scales[:] = 1
    if rows.dtype == "int8":
        centred = queries - rows.centre if rows.metric == "l2" else queries
        steps = np.abs(centred).max(axis=1) / 127
        scales[:] = steps
        codes = out[:, :lanes].view(np.int8)
        codes[:, :dim] = np.rint(centred / np.where(steps > 0, steps, 1)[:, None])
        codes[:, dim:] = 0


def true_distances(raw: FloatArray, rows: Rows) -> FloatArray:
    """Turn the search's raw distances (squared L2 or minus dot, of the stored values) into the metric's, in float32."""
    if rows.metric == "cosine":
        return raw + np.float32(1)
    return (raw / rows.scale / (rows.scale if rows.metric == "l2" else 1.0)).astype(np.float32)
