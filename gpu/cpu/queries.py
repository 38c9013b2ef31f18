"""Queries made ready for the stages: checked, normalised under cosine, and laid out as the rows need them.

0    float32  constant, margin, step and bias of the sketch, step of the int8 codes
64   int16    two lanes for each byte of a sketch, in blocks of 32: lower halves, upper halves
…    int16    one lane for each byte of a row of int8 codes
…    float32  the query, zero-padded to 16 lanes
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from gpu.cpu.simd import dot_f32
from gpu.errors import InvalidVector
from gpu.rows import Rows, padded

SKETCH_CONSTANT, SKETCH_MARGIN, SKETCH_STEP, SKETCH_BIAS, CODE_STEP = 0, 4, 8, 12, 16
QUERY_SKETCH = 64


class Form(NamedTuple):
    """What `write_queries` needs to know of an index."""

    cosine: bool
    l2: bool
    scale: float
    centre: npt.NDArray[np.float32]  # [padded d]
    projection: npt.NDArray[np.float32]  # [components, padded d], or [0, padded d] without sketches
    slack: float
    sketch_lanes: int
    code_lanes: int
    dim: int


def form_of(rows: Rows) -> Form:
    """The form that queries of these rows take."""
    centre = np.zeros(padded(rows.dim), np.float32)
    centre[: rows.dim] = rows.centre
    projection = np.empty((0, len(centre)), np.float32) if rows.sketch is None else np.array(rows.sketch.projection)
    slack = 0.0 if rows.sketch is None else rows.sketch.slack
    scale = rows.scale if rows.metric == "l2" else 1.0
    codes = rows.lanes if rows.dtype == "int8" else 0
    return Form(
        rows.metric == "cosine",
        rows.metric == "l2",
        scale,
        centre,
        projection,
        slack,
        code_offset(rows) - QUERY_SKETCH >> 1,
        codes,
        rows.dim,
    )


def code_offset(rows: Rows) -> int:
    """Where the lanes for int8 codes begin in a prepared query."""
    return QUERY_SKETCH + (0 if rows.sketch is None else 4 * rows.sketch.codes.shape[1])


def full_offset(rows: Rows) -> int:
    """Where the float32 lanes of a prepared query begin."""
    return code_offset(rows) + (2 * rows.lanes if rows.dtype == "int8" else 0)


def prepared_bytes(rows: Rows) -> int:
    """Bytes of a prepared query, a multiple of 64."""
    return -(-(full_offset(rows) + 4 * padded(rows.dim)) // 64) * 64


def prepare(queries: npt.ArrayLike, form: Form, out: npt.NDArray[np.uint8], first: int = 0) -> None:
    """Write queries [q, d] to `out`, uint8 [q, prepared_bytes]. Raises InvalidVector, naming the row.

    first: the number of the first query, for the message.
    """
    array = np.asarray(queries)
    if array.ndim != 2 or array.shape[1] != form.dim:
        raise InvalidVector(f"queries have shape {array.shape}; this index needs [q, {form.dim}]")
    if array.dtype != np.float32:
        if array.dtype.kind not in "fiu":
            raise InvalidVector(f"queries have dtype {array.dtype}; floats or integers are needed")
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            array = array.astype(np.float32)
    bad = write_queries(np.ascontiguousarray(array), form, out)
    if bad >= 0:
        where = np.flatnonzero(~np.isfinite(array[bad]))
        if len(where):
            raise InvalidVector(
                f"query {first + bad} holds {array[bad, where[0]]} at position {where[0]}; it must be finite"
            )
        raise InvalidVector(f"query {first + bad} is too long: its squared norm exceeds an eighth of float32's range")


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def write_queries(queries: Any, form: Any, out: Any) -> Any:
    """See `prepare`; float32 C-contiguous queries of the right length. Returns the first bad query, or -1."""
    dim, lanes = queries.shape[1], len(form.centre)
    code_start = QUERY_SKETCH + 2 * form.sketch_lanes
    full_start = code_start + 2 * form.code_lanes
    shifted = np.zeros(lanes, np.float32)
    heads = np.zeros(form.sketch_lanes, np.float32)
    size = len(form.projection)
    for i in range(len(queries)):
        squares = 0.0
        for j in range(dim):
            squares += np.float64(queries[i, j]) * np.float64(queries[i, j])
        if not np.isfinite(squares) or (not form.cosine and squares > 4.2535295865117308e37):
            return i
        factor = form.scale
        if form.cosine and squares > 0:
            factor = 1 / np.sqrt(squares)
        record = out[i]
        header = record[:QUERY_SKETCH].view(np.float32)
        full = record[full_start : full_start + 4 * lanes].view(np.float32)
        for j in range(dim):
            full[j] = np.float32(queries[i, j] * factor)
        full[dim:] = 0
        if len(form.projection) == 0 and form.code_lanes == 0:
            continue
        for j in range(dim):
            shifted[j] = full[j] - form.centre[j] if form.l2 else full[j]
        if form.code_lanes > 0:
            # The sum of products with codes up to 127 must fit into 32 bits.
            largest = min(32767, 2147483647 // (127 * form.code_lanes))
            header[4] = quantise(shifted[:dim], largest, record[code_start:full_start].view(np.int16))
        if len(form.projection) > 0:
            squares = np.float64(0)
            for j in range(lanes):
                squares += np.float64(shifted[j]) * np.float64(shifted[j])
            address = np.uint64(shifted.ctypes.data)
            if form.code_lanes > 0:
                header[0] = 0  # the distances of codes leave it out as well
            elif form.l2:
                header[0] = np.float32(squares)
            else:
                header[0] = -dot_f32(np.uint64(form.centre.ctypes.data), address, lanes)
            header[1] = np.float32((2 if form.l2 else 1) * form.slack * np.sqrt(squares))
            half = size // 2
            for j in range(size):
                place = j if j < half else j - half
                place = (place // 32) * 64 + place % 32 + (0 if j < half else 32)
                heads[place] = dot_f32(np.uint64(form.projection.ctypes.data + j * 4 * lanes), address, lanes)
            lanes_out = record[QUERY_SKETCH:code_start].view(np.int16)
            header[2] = quantise(heads, 8191, lanes_out)
            total = 0
            for lane in lanes_out:
                total += lane
            header[3] = np.float32(7.5) * np.float32(total)
    return -1


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def quantise(values: Any, largest: int, codes: Any) -> Any:
    """Write values as whole steps of at most `largest`, zeros behind them. Returns the step."""
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
