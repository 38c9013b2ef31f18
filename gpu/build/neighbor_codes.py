"""Makes the RaBitQ codes of a graph's neighbours; see `gpu.index.data` for what they are."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.compiled import compiled
from gpu.cpu.rotation import rotate
from gpu.index.data import GROUP, ROUNDS, NeighborCodes, block_bytes, code_dims, make_signs
from gpu.index.rows import FloatArray, aligned_empty

_AT_ONCE = 4096  # nodes between two words of progress
_TINY = np.float32(1e-30)


def make_codes(
    vectors: FloatArray,
    centre: FloatArray,
    l2: bool,
    graph: npt.NDArray[np.uint32],
    seeds: npt.NDArray[np.uint32],
    seed: int,
    threads: int = 1,
    scale: float = 1.0,
    progress: Callable[[float], None] = lambda fraction: None,
) -> NeighborCodes:
    """Codes of `graph` over `vectors`, float32 [N, d], as the rows hold them; `centre` float32 [d] is their mean.

    scale: of the rows, where queries are not scaled as they are (dot products of float16).
    """
    dim = vectors.shape[1]
    signs = make_signs(dim, np.random.default_rng(seed))
    dims = code_dims(dim)
    rotated = aligned_empty((len(vectors) + 1, dims), np.float32)
    rotated[:, dim:] = 0
    rotated[:-1, :dim] = vectors
    rotated[-1, :dim] = centre
    rotate_all(rotated, signs)
    blocks = aligned_empty((len(graph), block_bytes(dim, graph.shape[1])), np.uint8)
    entry = aligned_empty((1, block_bytes(dim, len(seeds))), np.uint8)
    dot = np.float32(0 if l2 else 1 / scale)
    _encode(rotated, np.array([len(vectors)]), seeds[None], dot, entry)
    begins = range(0, len(graph), _AT_ONCE)

    def encode(begin: int) -> None:
        part = slice(begin, begin + _AT_ONCE)
        _encode(rotated, np.arange(begin, min(begin + _AT_ONCE, len(graph))), graph[part], dot, blocks[part])

    with ThreadPoolExecutor(threads) as pool:
        for number, _ in enumerate(pool.map(encode, begins)):
            progress((number + 1) / len(begins))
    return NeighborCodes(blocks, entry, signs)


@compiled
def rotate_all(vectors: Any, signs: Any) -> None:
    """Rotate float32 [n, D'] in place."""
    for i in range(len(vectors)):
        rotate(ROUNDS, vectors.shape[1], np.uint64(signs.ctypes.data), np.uint64(vectors[i].ctypes.data))


@compiled
def _encode(rotated: Any, nodes: Any, neighbors: Any, dot: Any, blocks: Any) -> None:
    """Blocks of `nodes`, rows of float32 [n, D'], whose neighbours are `neighbors` uint32 [nodes, degree].

    dot: 0 for squared distances; for dot products, how long queries' components are beside the rows'.
    """
    dims, degree = rotated.shape[1], neighbors.shape[1]
    part_bytes = 4 * dims + 8 * GROUP
    signs = np.empty(dims, np.uint8)
    for i in range(len(nodes)):
        node = rotated[nodes[i]]
        block = blocks[i]
        block[:] = 0
        for j in range(blocks.shape[1] // part_bytes * GROUP):
            part = block[j // GROUP * part_bytes : (j // GROUP + 1) * part_bytes]
            added = part[4 * dims : 4 * dims + 4 * GROUP].view(np.float32)
            factor = part[4 * dims + 4 * GROUP :].view(np.float32)
            lane = j % GROUP
            if j >= degree:
                added[lane] = np.float32(np.inf)
                continue
            square, total, own, product = _facts(node, rotated[neighbors[i, j]], signs)
            f = square / max(total, _TINY)
            added[lane] = square + 2 * f * own if dot == 0 else dot * (f * own - product)
            factor[lane] = -2 * f if dot == 0 else -f
            column, shift = lane % 16, np.uint8(4 * (lane // 16))
            for group in range(dims // 4):
                first = 4 * group
                bits = signs[first] | signs[first + 1] << 1 | signs[first + 2] << 2 | signs[first + 3] << 3
                part[16 * group + column] |= np.uint8(bits << shift)


@compiled
def _facts(node: Any, neighbor: Any, signs: Any) -> Any:
    """Of r = neighbour - node: |r|², Σ|rᵢ|, ⟨sign(r), node⟩, ⟨node, r⟩; and whether each rᵢ is positive."""
    squares, totals = np.zeros(16, np.float32), np.zeros(16, np.float32)
    owns, products = np.zeros(16, np.float32), np.zeros(16, np.float32)
    for begin in range(0, len(node), 16):
        for lane in range(16):
            c = node[begin + lane]
            r = neighbor[begin + lane] - c
            positive = r > 0
            signs[begin + lane] = positive
            squares[lane] += r * r
            totals[lane] += abs(r)
            owns[lane] += c if positive else -c
            products[lane] += c * r
    return squares.sum(), totals.sum(), owns.sum(), products.sum()
