"""Data of an index: rows, graph, RaBitQ neighbour codes; and bitmaps of nodes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu.errors import InvalidParams
from gpu.index.rows import Rows, padded

# ---- RaBitQ codes of every node's neighbours, stored beside the graph: an extend estimates all of them in one pass
# Sources: SymphonyQG (arXiv 2411.12229), RaBitQ (arXiv 2405.12497, 2409.09913). With a random rotation P, a node c, a
# neighbour x and r = P(x - c), a code s has B bits per dimension: r quantised in steps of Δ, as odd numbers
# -2ᴮ+1 … 2ᴮ-1. With one bit these are the signs; with more, Δ is optimal for a Gaussian of r's length
# (`build.neighbor_codes`). For a query q
#
#     ⟨q - c, x - c⟩ ≈ f · ⟨s, P(q - c)⟩,    f = |r|² / ⟨s, r⟩
#
# is an unbiased estimate, whose error exceeds ε·|q - c|·|x - c|/√D' with a probability that decays like exp(-ε²); a
# second bit halves the error. The query-independent part is computed at build time, as two floats per neighbour:
#
#     estimate = base + A + F · ⟨s, Pq⟩
#     l2    base = |q - c|²     A = |r|² + 2f⟨s, Pc⟩                 F = -2f
#     dot   base = -⟨q, c⟩      A = f⟨s, Pc⟩ - ⟨c, x - c⟩            F = -f
#
# `base` is the exact distance to c: a node is scored exactly when, and only when, it is expanded. So candidates for
# results are the nodes whose estimate is, at some point of the search, the nearest unexpanded one in top_m. A node that
# is reached from several parents is expanded at the nearest of its estimates.
#
# A node's block, for each 32 of its neighbours (the last part is padded with A = +inf):
#
#     B · D'/4 · 16 bytes   bit planes, lowest first. Byte j of group g: the bits of dimensions 4g … 4g+3 of
#                           neighbour j (low half) and of neighbour j + 16 (high half)
#     32 · float32          A
#     32 · float32          F
#
# A scan of many rows reads a block as well: that of all rows as neighbours of the centre.
#
# The layout is that of fast scan (arXiv 1704.07355): 16 look-ups at a time in a register that holds, for the four
# dimensions of a group, all sixteen sums ±q₀±q₁±q₂±q₃.


GROUP = 32  # neighbours estimated together
ROUNDS = 4  # of the rotation
MAX_CODE_BITS = 2
_DIM_STEP = 64
_TWO_BITS_UP_TO = 256
FACTOR_BYTES = 2 * 4 * GROUP


@dataclass(frozen=True)
class NeighborCodes:
    """RaBitQ codes of the neighbours of every node.

    blocks: uint8 [N, block_bytes]. entry: uint8 [1, entry bytes], a block of the seeds as neighbours of the centre.
    signs: float32 [ROUNDS, D'], the rotation (see `gpu.cpu.rotation`). bits: B. scan: uint8 [1, scan bytes], a block of
    all rows as neighbours of the centre; None in indexes of earlier versions.
    """

    blocks: npt.NDArray[np.uint8]
    entry: npt.NDArray[np.uint8]
    signs: npt.NDArray[np.float32]
    bits: int = 1
    scan: npt.NDArray[np.uint8] | None = None

    @property
    def dims(self) -> int:
        """D', the number of dimensions of a code."""
        return int(self.signs.shape[1])

    @property
    def nbytes(self) -> int:
        scan = 0 if self.scan is None else self.scan.nbytes
        return int(self.blocks.nbytes + self.entry.nbytes + self.signs.nbytes + scan)


def code_dims(dim: int) -> int:
    """Return D' for vectors of `dim` dimensions."""
    return padded(dim, _DIM_STEP)


def block_bytes(dim: int, neighbors: int, bits: int = 1) -> int:
    """Return the size of a block in bytes, a multiple of 64."""
    return -(-neighbors // GROUP) * (4 * bits * code_dims(dim) + FACTOR_BYTES)


def fastest_bits(dim: int) -> int:
    """Return the number of bits that makes searches fastest: 2 for few dimensions, where the error is large, else 1.

    Measured (docs/benchmarks.md): 2 bits are 1.4 times as fast as 1 with 100 dimensions, as fast with 384, and slower
    with 784; 3 and 4 are never faster than the better of these by more than 5%.
    """
    return 2 if code_dims(dim) <= _TWO_BITS_UP_TO else 1


def window(dims: int) -> int:
    """Return the dimensions that a round of the rotation transforms: the largest power of two up to D'."""
    return 1 << (dims.bit_length() - 1)


def make_signs(dim: int, random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return a random rotation, float32 [ROUNDS, D']: signs of every round, times the round's scale."""
    dims = code_dims(dim)
    size = window(dims)
    signs = random.choice(np.array([-1, 1], np.float32), size=(ROUNDS, dims))
    for number, line in enumerate(signs):
        begin = 0 if number % 2 == 0 else dims - size
        line[begin : begin + size] /= np.sqrt(np.float32(size))
        if size < dims:
            line *= np.sqrt(np.float32(0.5))
    return signs


@dataclass(frozen=True)
class IndexData:
    """Encoded vectors, the graph over them, the seeds of searches, and the caller's ids.

    graph: uint32 [N, degree], C order. seeds: uint32 [S], distinct rows. ids: int64 [N], or None for row numbers.
    codes: RaBitQ codes of every node's neighbours, or None; used by searches on a CPU only.
    """

    rows: Rows
    graph: npt.NDArray[np.uint32]
    seeds: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.int64] | None
    codes: NeighborCodes | None = None

    def ids_of(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Map row numbers to the caller's ids; -1 stays -1."""
        if self.ids is None:
            return nodes
        if len(nodes) and nodes.min() >= 0:
            return self.ids[nodes]
        return np.where(nodes >= 0, self.ids[np.maximum(nodes, 0)], -1)


# ---- bitmaps of nodes: one bit each, in uint64 words


_WORD = 64


def check_mask(allowed: npt.NDArray[np.bool_], size: int) -> None:
    """Raise InvalidParams if it is not bool [size]."""
    if allowed.shape != (size,) or allowed.dtype != bool:
        raise InvalidParams(f"allowed has dtype {allowed.dtype} and shape {allowed.shape}; bool [{size}] is needed")


def bitmap(allowed: npt.NDArray[np.bool_], size: int) -> npt.NDArray[np.uint64]:
    """Pack bool [size] into a bitmap of uint64. Raises InvalidParams for another shape or type."""
    check_mask(allowed, size)
    packed = np.zeros(-(-size // _WORD) * _WORD // 8, np.uint8)
    packed[: -(-size // 8)] = np.packbits(allowed, bitorder="little")
    return packed.view(np.uint64)
