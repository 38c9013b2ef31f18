"""Encoding of a graph's neighbours as RaBitQ codes; `gpu.index.data` describes them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from gpu.compiled import counted
from gpu.cpu.rotation import rotate
from gpu.cpu.simd import LANES, at, everywhere, l2_f32, loop, prefetch, shuffled
from gpu.index.data import GROUP, ROUNDS, NeighborCodes, block_bytes, code_dims, make_signs
from gpu.index.rows import FloatArray, aligned_empty
from ipc.native.emitted import emits

_i32, _i64 = ir.IntType(32), ir.IntType(64)
_AT_ONCE = 4096  # nodes per task of a thread, a multiple of GROUP
_TINY = np.float32(1e-30)
_STEPS = np.array([0, 1.596, 0.9957], np.float32)
"""Optimal quantiser steps by number of bits, 1 and 2, for a standard Gaussian (J. Max, IRE Trans. IT-6, 1960)."""


def make_codes(
    vectors: FloatArray,
    centre: FloatArray,
    l2: bool,
    graph: npt.NDArray[np.uint32],
    seeds: npt.NDArray[np.uint32],
    seed: int,
    threads: int = 1,
    scale: float = 1.0,
    bits: int = 1,
) -> NeighborCodes:
    """Encode the neighbours in `graph` of `vectors`, float32 [N, d] as stored; `centre`, float32 [d], is their mean.

    scale: of the stored rows, where queries are not scaled like them (dot products of float16).
    bits: per dimension of a code.
    """
    dim = vectors.shape[1]
    signs = make_signs(dim, np.random.default_rng(seed))
    dims = code_dims(dim)
    rotated = aligned_empty((len(vectors) + 1, dims), np.float32)
    rotated[:, dim:] = 0
    rotated[:-1, :dim] = vectors
    rotated[-1, :dim] = centre
    rotate_all(rotated, signs)
    blocks = aligned_empty((len(graph), block_bytes(dim, graph.shape[1], bits)), np.uint8)
    entry = aligned_empty((1, block_bytes(dim, len(seeds), bits)), np.uint8)
    scan = aligned_empty((1, block_bytes(dim, len(vectors), bits)), np.uint8)
    dot = np.float32(0 if l2 else 1 / scale)
    middle, part_bytes = np.array([len(vectors)]), block_bytes(dim, _AT_ONCE, bits)
    _encode(rotated, middle, seeds[None], dot, bits, entry)

    def encode(begin: int) -> None:
        part = slice(begin, begin + _AT_ONCE)
        nodes = np.arange(begin, min(begin + _AT_ONCE, len(graph)))
        _encode(rotated, nodes, graph[part], dot, bits, blocks[part])
        first = begin // _AT_ONCE * part_bytes
        _encode(rotated, middle, nodes.astype(np.uint32)[None], dot, bits, scan[:, first : first + part_bytes])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(encode, range(0, len(graph), _AT_ONCE)))
    return NeighborCodes(blocks, entry, signs, bits, scan)


@counted
def rotate_all(vectors: Any, signs: Any) -> None:
    """Rotate float32 [n, D'] in place."""
    for i in range(len(vectors)):
        rotate(ROUNDS, vectors.shape[1], np.uint64(signs.ctypes.data), np.uint64(vectors[i].ctypes.data))


@counted
def _encode(rotated: Any, nodes: Any, neighbors: Any, dot: Any, bits: int, blocks: Any) -> None:
    """Encode the blocks of `nodes`, rows of float32 [n, D'], with neighbours uint32 [nodes, degree].

    dot: 0 for squared L2; for dot products, the scale of queries relative to the rows.
    """
    dims, degree = rotated.shape[1], neighbors.shape[1]
    plane_bytes, row_bytes = 4 * dims, np.uint64(4 * dims)
    part_bytes = bits * plane_bytes + 8 * GROUP
    start = np.uint64(rotated.ctypes.data)
    levels, places = np.empty(dims, np.uint8), np.empty(dims // 4, np.uint8)
    levels_at, places_at = np.uint64(levels.ctypes.data), np.uint64(places.ctypes.data)
    top = np.float32((1 << bits) - 1)
    for i in range(len(nodes)):
        node = start + np.uint64(nodes[i]) * row_bytes
        block = blocks[i]
        block[:] = 0
        factors = block.view(np.float32)
        for j in range(len(block) // part_bytes * GROUP):
            begin, lane = j // GROUP * part_bytes, j % GROUP
            added = (begin + bits * plane_bytes) // 4 + lane
            if j >= degree:
                factors[added] = np.float32(np.inf)
                continue
            if j + 1 < degree:
                following = start + np.uint64(neighbors[i, j + 1]) * row_bytes
                for offset in range(0, 4 * dims, 64):
                    prefetch(following + np.uint64(offset))
            neighbor = start + np.uint64(neighbors[i, j]) * row_bytes
            square = l2_f32(node, neighbor, dims)
            inverse = np.float32(0)
            if square > 0:
                inverse = np.float32(1) / (_STEPS[bits] * np.sqrt(square / np.float32(dims)))
            total, own, product = _quantise(node, neighbor, dims, inverse, top, levels_at)
            f = square / max(total, _TINY)
            factors[added] = square + 2 * f * own if dot == 0 else dot * (f * own - product)
            factors[added + GROUP] = -2 * f if dot == 0 else -f
            column, shift = begin + lane % 16, np.uint8(4 * (lane // 16))
            for plane in range(bits):
                _gather_bits(levels_at, dims, plane, places_at)
                for group in range(dims // 4):
                    block[column + 16 * group] |= places[group] << shift
                column += plane_bytes
    levels[0] = places[0] = (
        0  # keeps the arrays alive: numba frees them after their last use, and does not see address uses
    )


@emits(
    types.UniTuple(types.float32, 3),
    types.uint64, types.uint64, types.int64, types.float32, types.float32, types.uint64,
)  # fmt: skip
def _quantise(builder: Any, node: Any, neighbor: Any, dims: Any, inverse: Any, top: Any, levels: Any) -> Any:
    """Quantise r = neighbour - node, both float32 [D'] at addresses, to a code s; write its levels 0..top as bytes.

    Returns Σ sᵢ·rᵢ, Σ sᵢ·nodeᵢ and Σ rᵢ·nodeᵢ. inverse: 1 / step between levels.
    """
    fast = ("contract", "reassoc", "nsz")
    floats, lanes_type = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_i32, LANES)
    bytes_type = ir.VectorType(ir.IntType(8), LANES)
    scales, tops = everywhere(builder, inverse, LANES), everywhere(builder, top, LANES)
    middle = builder.fmul(builder.fadd(tops, ir.Constant(floats, [1.0] * LANES)), ir.Constant(floats, [0.5] * LANES))
    lowest = ir.Constant(floats, None)

    def body(position: Any, *sums: Any) -> list[Any]:
        moved = builder.mul(position, ir.Constant(_i64, 4))
        c, x = (builder.load(at(builder, builder.add(row, moved), floats), align=4) for row in (node, neighbor))
        r = builder.fsub(x, c)
        level = builder.fadd(builder.fmul(r, scales), middle)
        level = builder.select(builder.fcmp_ordered("<", level, lowest), lowest, level)
        level = builder.select(builder.fcmp_ordered("<", tops, level), tops, level)
        whole = builder.fptosi(level, lanes_type)
        written = at(builder, builder.add(levels, position), bytes_type)
        builder.store(builder.trunc(whole, bytes_type), written, align=1)
        level = builder.sitofp(whole, floats)
        s = builder.fsub(builder.fadd(level, level), tops)
        products = [builder.fmul(left, right, flags=fast) for left, right in ((s, r), (s, c), (r, c))]
        return [builder.fadd(total, product, flags=fast) for total, product in zip(sums, products, strict=True)]

    totals = []
    for total in loop(builder, ir.Constant(_i64, 0), dims, LANES, [lowest] * 3, body):
        for half in (8, 4, 2, 1):
            total = builder.fadd(*(shuffled(builder, total, total, range(i, i + half)) for i in (0, half)))
        totals.append(builder.extract_element(total, ir.Constant(_i32, 0)))
    return totals


@emits(types.void, types.uint64, types.int64, types.int64, types.uint64)
def _gather_bits(builder: Any, levels: Any, dims: Any, plane: Any, places: Any) -> None:
    """Pack bit `plane` of every four of the bytes [D'] at `levels` into the low bits of a byte at `places` [D' / 4]."""
    words, few = ir.VectorType(_i32, LANES), ir.VectorType(ir.IntType(8), LANES)

    def same(value: int) -> Any:
        return ir.Constant(words, [value] * LANES)

    shift = everywhere(builder, builder.trunc(plane, _i32), LANES)

    def body(position: Any) -> list[Any]:
        loaded = builder.load(at(builder, builder.add(levels, position), words), align=1)
        gathered = bits = builder.and_(builder.lshr(loaded, shift), same(0x01010101))
        for number in (7, 14, 21):
            gathered = builder.or_(gathered, builder.lshr(bits, same(number)))
        gathered = builder.trunc(builder.and_(gathered, same(15)), few)
        quarter = builder.lshr(position, ir.Constant(_i64, 2))
        builder.store(gathered, at(builder, builder.add(places, quarter), few), align=1)
        return []

    loop(builder, ir.Constant(_i64, 0), dims, 4 * LANES, [], body)
