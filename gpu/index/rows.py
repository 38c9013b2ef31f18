"""Encoding of vectors: the rows that searches read.

| dtype | a row | traversal distance |
|---|---|---|
| float32 | d floats, zero-padded to 16 bytes | exact |
| float16 | d halves of x·scale, zero-padded to 16 bytes | of the stored halves |

float16's `scale` is a power of two that keeps every value in range. Rows start on boundaries of 64 bytes where their
length allows. Under cosine the vectors are normalised first; a zero vector stays zero: its cosine to anything counts as
0 and its distance as 1.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gpu.errors import InvalidVector

Metric = Literal["cosine", "l2", "ip"]
Dtype = Literal["float32", "float16"]
METRICS: tuple[str, ...] = get_args(Metric)
DTYPES: tuple[str, ...] = get_args(Dtype)
MAX_DIM = 16384
LARGEST_SQUARE = float(np.finfo(np.float32).max / 8)
"""Limit of a vector's squared norm, except under cosine: no squared distance overflows."""
_LINE = 64
_F16_MAX = 32768.0
_BLOCK = 65536

FloatArray = npt.NDArray[np.float32]
AnyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """The encoded vectors of an index.

    codes: the rows that traversal reads, [N, row length], C order.
    centre: float32 [d], the mean of x·scale.
    scale: rows hold x·scale; 1 except for float16.
    """

    metric: str
    dtype: str
    dim: int
    codes: AnyArray
    centre: FloatArray
    scale: float

    @property
    def lanes(self) -> int:
        """Elements of a row including its padding."""
        return int(self.codes.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(self.codes.nbytes)


def padded(dim: int, multiple: int = 16) -> int:
    """Round up to a multiple: by default 16 elements, the width of SIMD loops and the padding of queries."""
    return -(-dim // multiple) * multiple


def aligned_empty(shape: tuple[int, int], dtype: npt.DTypeLike) -> AnyArray:
    """Return an uninitialised array aligned to a cache line."""
    kind = np.dtype(dtype)
    size = shape[0] * shape[1] * kind.itemsize
    raw = np.empty(size + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + size].view(kind).reshape(shape)


def checked_vectors(vectors: npt.ArrayLike, metric: str) -> FloatArray:
    """Return vectors as float32 [N, d], normalised under cosine.

    Raises InvalidVector, with the row's number, for values that are not finite or a squared norm out of range.
    """
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
    for begin in range(0, len(array), _BLOCK):
        block = array[begin : begin + _BLOCK].astype(np.float64)
        squares = np.einsum("ij,ij->i", block, block)
        good = np.isfinite(squares)
        if metric == "cosine":
            block /= np.where(squares > 0, np.sqrt(np.where(good, squares, 1)), 1)[:, None]
        else:
            good &= squares <= LARGEST_SQUARE
        if not good.all():
            raise InvalidVector(_row_error(begin + int(np.argmin(good)), array))
        out[begin : begin + _BLOCK] = block
    return out


def _row_error(row: int, array: AnyArray) -> str:
    values = array[row].astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        return f"row {row} holds {values[bad[0]]} at position {bad[0]}; every value must be finite"
    return f"row {row} is too long: its squared norm exceeds an eighth of float32's range"


def encode(vectors: FloatArray, metric: str, dtype: str) -> Rows:
    """Encode vectors returned by `checked_vectors`."""
    dim = vectors.shape[1]
    scale = 1.0
    if dtype == "float16" and metric != "cosine":
        largest = float(np.abs(vectors).max())
        scale = 2.0 ** np.floor(np.log2(_F16_MAX / largest)) if largest > 0 else 1.0
        vectors = vectors * np.float32(scale)
    centre = vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    return Rows(metric, dtype, dim, _padded_copy(vectors, dtype), centre, scale)


def code_shape(size: int, dim: int, dtype: str) -> tuple[tuple[int, int], npt.DTypeLike]:
    """Return shape and element type of `Rows.codes`."""
    return (size, padded(dim, 16 // np.dtype(dtype).itemsize)), np.dtype(dtype)


def _padded_copy(vectors: FloatArray, dtype: str) -> AnyArray:
    out = aligned_empty(*code_shape(len(vectors), vectors.shape[1], dtype))
    out[:, : vectors.shape[1]] = vectors
    out[:, vectors.shape[1] :] = 0
    return out


def metric_transform(rows: Rows) -> tuple[float, float]:
    """Return the factor and offset that convert raw distances (squared L2, minus dot) to the metric's."""
    if rows.metric == "cosine":
        return 1.0, 1.0
    return (1 / rows.scale / rows.scale if rows.metric == "l2" else 1 / rows.scale), 0.0
