"""The distance from a prepared query to a stored row, whatever the row's element type."""

import numpy as np

from gpu.compiled import compiled
from gpu.cpu.simd import dot_f16, dot_f32, dot_i8, l2_f16, l2_f32, load_f32
from gpu.cpu.tables import F16_DOT, F16_L2, F32_DOT, F32_L2, I8_L2


@compiled
def row_distance(kind, row, query, lanes, step):  # type: ignore[no-untyped-def]
    """Distance from a query to the row at an address: squared L2, or minus the dot product.

    For int8 codes a constant of the query is left out: distances compare but are no distances. `step` is the query's.
    """
    if kind == F32_L2:
        return l2_f32(row, query, lanes)
    if kind == F32_DOT:
        return -dot_f32(row, query, lanes)
    if kind == F16_L2:
        return l2_f16(row, query, lanes)
    if kind == F16_DOT:
        return -dot_f16(row, query, lanes)
    dot = np.float32(dot_i8(row, query, lanes)) * step * load_f32(row + np.uint64(lanes - 8))
    return load_f32(row + np.uint64(lanes - 4)) - np.float32(2) * dot if kind == I8_L2 else -dot
