"""Preparation of queries for the stages: validation, normalisation under cosine, and encoding.

Layout of a prepared query:

    0    float32  step and offset of the table
    64   float32  the query, zero-padded to 16 lanes
    …    uint8    the lookup table for neighbour codes (see `fast_scan.write_table`), aligned to a cache line
    …    float32  the rotated query
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu.fast_scan import write_table
from gpu.cpu.rotation import rotate
from gpu.cpu.simd import LANES, square_f64
from gpu.cpu.tables import Encoding, encoding_at
from gpu.errors import InvalidVector
from gpu.index.data import ROUNDS, NeighborCodes
from gpu.index.rows import LARGEST_SQUARE, Rows, padded
from ipc.native.arrays import float32_at
from ipc.native.records import F32, address, address_of, array_over

TABLE_STEP, TABLE_OFFSET = 0, 4
QUERY_ROW = 64  # of the query's lanes, which rows are compared with


def query_encoding(rows: Rows, codes: NeighborCodes | None = None) -> Encoding:
    """Return how an index's queries are encoded."""
    centre = np.zeros(padded(rows.dim), np.float32)
    centre[: rows.dim] = rows.centre
    made = Encoding(
        dim=rows.dim,
        normalised=rows.metric == "cosine",
        scale=rows.scale if rows.metric == "l2" else 1.0,
        centre=array_over(F32, centre),
    )
    if codes is not None:
        made.signs, made.rotated_lanes = array_over(F32, np.ascontiguousarray(codes.signs)), codes.dims
    return made


def table_offset(dim: int) -> int:
    """Return the offset of the lookup table for neighbour codes in a prepared query, bytes."""
    return QUERY_ROW + 4 * padded(dim)


def prepared_bytes(rows: Rows, codes: NeighborCodes | None = None) -> int:
    """Return the size of a prepared query in bytes, a multiple of 64."""
    return table_offset(rows.dim) + (0 if codes is None else 8 * codes.dims)


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


def prepare(queries: npt.NDArray[Any], encoding: Encoding, out: npt.NDArray[np.uint8], first: int = 0) -> None:
    """Prepare queries [q, d] into `out`, uint8 [q, prepared_bytes]. Raises InvalidVector; rows count from `first`."""
    array = validate_queries(queries, encoding.dim)
    bad = write_queries(array, address_of(encoding), out)
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
    squares = squared_norm(query)
    if not np.isfinite(squares) or (not encoding.normalised and squares > LARGEST_SQUARE):
        return False
    factor = encoding.scale
    if encoding.normalised and squares > 0:
        factor = 1 / np.sqrt(squares)
    start = record.ctypes.data
    full = float32_at(start + QUERY_ROW, lanes)
    for j in range(dim):
        full[j] = np.float32(query[j] * factor)
    full[dim:] = 0
    if encoding.rotated_lanes > 0:
        write_rotated(full, encoding, record[QUERY_ROW + 4 * lanes :], float32_at(start, QUERY_ROW // 4))
    return True


@compiled
def squared_norm(query: npt.NDArray[np.float32]) -> Any:
    """Return the squared norm of contiguous float32 [d] in float64."""
    whole = len(query) // LANES * LANES
    start = np.uint64(query.ctypes.data)
    total = square_f64(start, start, whole)
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
    start = np.uint64(rotated.ctypes.data)
    rotate(ROUNDS, dims, np.uint64(address(encoding.signs)), start)
    header[TABLE_STEP // 4], header[TABLE_OFFSET // 4] = write_table(start, dims, np.uint64(record.ctypes.data))


@compiled
def padded_lanes(dim: int) -> Any:
    """Round up to a multiple of 16; see `rows.padded`."""
    return (dim + 15) // 16 * 16
