"""Preparation of queries for the stages: validation, normalisation under cosine, and encoding.

Layout of a prepared query:

    0    float32  constant, margin, step and bias of the sketch, step and offset of the table
    64   int16    two lanes per byte of a sketch, in blocks of 32: lower halves, upper halves
    …    float32  the query, zero-padded to 16 lanes
    …    uint8    the lookup table for neighbour codes (see `fast_scan.write_table`), aligned to a cache line
    …    float32  the rotated query
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu.fast_scan import write_table
from gpu.cpu.rotation import rotate
from gpu.cpu.simd import LANES, dot_f16, dot_f32, square_f64
from gpu.cpu.tables import Encoding, encoding_at
from gpu.errors import InvalidVector
from gpu.index.data import ROUNDS, NeighborCodes
from gpu.index.rows import LARGEST_SQUARE, Rows, padded
from ipc.native.arrays import float32_at, int16_at
from ipc.native.records import address_of

SKETCH_CONSTANT, SKETCH_MARGIN, SKETCH_STEP, SKETCH_BIAS, TABLE_STEP, TABLE_OFFSET = 0, 4, 8, 12, 16, 20
QUERY_SKETCH = 64


class QueryEncoding:
    """Query encoding of an index: its `record`, and the arrays that it points to."""

    def __init__(self, rows: Rows, codes: NeighborCodes | None = None) -> None:
        sketch = rows.sketch
        self.dim = rows.dim
        self._centre = np.zeros(padded(rows.dim), np.float32)
        self._centre[: rows.dim] = rows.centre
        self._projection = np.empty((0, 0), np.float16) if sketch is None else np.array(sketch.projection)
        self.record = Encoding(
            dim=rows.dim,
            normalised=rows.metric == "cosine",
            squared=rows.metric == "l2",
            scale=rows.scale if rows.metric == "l2" else 1.0,
            slack=0.0 if sketch is None else sketch.slack,
            centre=self._centre.ctypes.data,
            projection=self._projection.ctypes.data,
            components=len(self._projection),
            sketch_lanes=(row_offset(rows) - QUERY_SKETCH) // 2,
        )
        self._signs = None if codes is None else np.ascontiguousarray(codes.signs)
        if self._signs is not None:
            self.record.signs, self.record.rotated_lanes = self._signs.ctypes.data, self._signs.shape[1]


def row_offset(rows: Rows) -> int:
    """Return the offset of the query's float32 lanes, which rows are compared with, in a prepared query, bytes."""
    return QUERY_SKETCH + (0 if rows.sketch is None else 4 * rows.sketch.codes.shape[1])


def table_offset(rows: Rows) -> int:
    """Return the offset of the lookup table for neighbour codes in a prepared query, bytes."""
    return -(-(row_offset(rows) + 4 * padded(rows.dim)) // 64) * 64


def prepared_bytes(rows: Rows, codes: NeighborCodes | None = None) -> int:
    """Return the size of a prepared query in bytes, a multiple of 64."""
    return table_offset(rows) + (0 if codes is None else 8 * codes.dims)


def validate_queries(queries: npt.NDArray[Any], dim: int) -> npt.NDArray[np.float32]:
    """Return queries [q, d] as contiguous float32. Raises InvalidVector for a wrong shape or type."""
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise InvalidVector(f"queries have shape {queries.shape}; this index needs [q, {dim}]")
    if queries.dtype == np.float32:
        return np.ascontiguousarray(queries)
    if queries.dtype.kind not in "fiu":
        raise InvalidVector(f"queries have dtype {queries.dtype}; floats or integers are needed")
    with np.errstate(over="ignore"):  # infinities are rejected later
        return np.ascontiguousarray(queries, np.float32)


def prepare(queries: npt.NDArray[Any], encoding: QueryEncoding, out: npt.NDArray[np.uint8], first: int = 0) -> None:
    """Prepare queries [q, d] into `out`, uint8 [q, prepared_bytes]. Raises InvalidVector; rows count from `first`."""
    array = validate_queries(queries, encoding.dim)
    bad = write_queries(array, address_of(encoding.record), out)
    if bad >= 0:
        raise query_error(array[bad], first + bad)


def query_error(query: npt.NDArray[np.float32], number: int) -> InvalidVector:
    """Return the error for a query that `write_query` has rejected."""
    where = np.flatnonzero(~np.isfinite(query))
    if len(where):
        return InvalidVector(f"query {number} holds {query[where[0]]} at position {where[0]}; it must be finite")
    return InvalidVector(f"query {number} is too long: its squared norm exceeds an eighth of float32's range")


@compiled
def write_queries(queries: Any, encoding: int, out: Any) -> Any:
    """Prepare queries, float32 [q, d], by the encoding at an address. Returns the first invalid one's index, or -1."""
    for i in range(len(queries)):
        if not write_query(queries[i], encoding_at(encoding), out[i]):
            return i
    return -1


@compiled
def write_query(query: Any, encoding: Encoding, record: Any) -> Any:
    """Prepare one query, float32 [d], into its record, uint8. Returns whether it is valid."""
    dim, lanes = len(query), padded_lanes(len(query))
    full_start = QUERY_SKETCH + 2 * encoding.sketch_lanes
    squares = squared_norm(query)
    if not np.isfinite(squares) or (not encoding.normalised and squares > LARGEST_SQUARE):
        return False
    factor = encoding.scale
    if encoding.normalised and squares > 0:
        factor = 1 / np.sqrt(squares)
    start = record.ctypes.data
    header = float32_at(start, QUERY_SKETCH // 4)
    full = float32_at(start + full_start, lanes)
    for j in range(dim):
        full[j] = np.float32(query[j] * factor)
    full[dim:] = 0
    if encoding.rotated_lanes > 0:
        write_rotated(full, encoding, record[(full_start + 4 * lanes + 63) // 64 * 64 :], header)
    if encoding.sketch_lanes == 0:
        return True
    centre = float32_at(encoding.centre, lanes)
    shifted = full.copy()
    if encoding.squared:
        shifted -= centre
    squares = dot(shifted, shifted)
    if encoding.squared:
        header[0] = squares
    else:
        header[0] = -dot(centre, shifted)
    slack = encoding.slack
    header[1] = np.float32((2 if encoding.squared else 1) * slack * np.sqrt(squares))
    size = encoding.components
    heads = np.zeros(encoding.sketch_lanes, np.float32)
    for j in range(size):
        upper = j >= size // 2
        place = j - size // 2 if upper else j
        place = (place // 32) * 64 + place % 32 + (32 if upper else 0)
        direction = np.uint64(encoding.projection + 2 * j * lanes)
        heads[place] = dot_f16(direction, np.uint64(shifted.ctypes.data), lanes)
    sketch = int16_at(start + QUERY_SKETCH, encoding.sketch_lanes)
    header[2] = quantise(heads, 8191, sketch)
    total = 0
    for lane in sketch:
        total += lane
    header[3] = np.float32(7.5) * np.float32(total)
    shifted[0] = 0  # keeps the array alive: numba frees it after its last use, and does not see address uses
    return True


@compiled
def squared_norm(query: Any) -> Any:
    """Return the squared norm of contiguous float32 [d] in float64."""
    whole = len(query) // LANES * LANES
    address = np.uint64(query.ctypes.data)
    total = square_f64(address, address, whole)
    for value in query[whole:]:
        total += np.float64(value) * np.float64(value)
    return total


@compiled
def write_rotated(full: Any, encoding: Encoding, record: Any, header: Any) -> None:
    """Write a query's lookup table and the rotated query to `record`. full: the query, float32 [lanes]."""
    dims, used = encoding.rotated_lanes, min(encoding.rotated_lanes, len(full))
    rotated = float32_at(record.ctypes.data + 4 * dims, dims)
    for j in range(dims):  # copies of slices compile numba's formatting of their errors: seconds
        rotated[j] = full[j] if j < used else np.float32(0)
    address = np.uint64(rotated.ctypes.data)
    rotate(ROUNDS, dims, np.uint64(encoding.signs), address)
    header[TABLE_STEP // 4], header[TABLE_OFFSET // 4] = write_table(address, dims, np.uint64(record.ctypes.data))


@compiled
def padded_lanes(dim: int) -> Any:
    """Round up to a multiple of 16; see `rows.padded`."""
    return (dim + 15) // 16 * 16


@compiled
def dot(left: Any, right: Any) -> Any:
    """Return the dot product of two float32 arrays of a multiple of 16 lanes.

    The caller must keep a reference to each array while its address is in use: numba frees arrays after their last use.
    """
    return dot_f32(np.uint64(left.ctypes.data), np.uint64(right.ctypes.data), len(left))


@compiled
def quantise(values: Any, largest: int, codes: Any) -> Any:
    """Quantise values to integer codes of at most `largest`, zero-padded. Returns the step."""
    top = np.float32(0)
    for value in values:
        top = max(top, abs(value))
    codes[:] = 0
    if top == 0:
        return np.float32(0)
    step = top / np.float32(largest)
    for j in range(len(values)):
        codes[j] = np.int16(np.rint(values[j] / step))
    return step
