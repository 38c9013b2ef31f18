"""What an index is made of: rows, graph, codes of neighbours; and bitmaps of its nodes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu.errors import InvalidParams
from gpu.index.rows import Rows, padded

# ---- RaBitQ codes of every node's neighbours, stored beside the graph: an extend estimates all of them in one pass
# After SymphonyQG (arXiv 2411.12229) and RaBitQ (arXiv 2405.12497, 2409.09913). With a random rotation P, a node c, a
# neighbour x and r = P(x - c), a code s has B bits a dimension: r in steps of Δ, as odd numbers -2ᴮ+1 … 2ᴮ-1. With one
# bit these are the signs; with more, Δ is what suits a Gaussian of r's length (`build.neighbor_codes`). For a query q
#
#     ⟨q - c, x - c⟩ ≈ f · ⟨s, P(q - c)⟩,    f = |r|² / ⟨s, r⟩
#
# is an unbiased estimate, off by more than ε·|q - c|·|x - c|/√D' with a probability that falls like exp(-ε²); a second
# bit halves the error. The part of it that belongs to the node is computed when the index is built, so that for each
# neighbour two floats are left:
#
#     estimate = base + A + F · ⟨s, Pq⟩
#     l2    base = |q - c|²     A = |r|² + 2f⟨s, Pc⟩                 F = -2f
#     dot   base = -⟨q, c⟩      A = f⟨s, Pc⟩ - ⟨c, x - c⟩            F = -f
#
# `base` is the distance to c, which is exact: a node is scored exactly when it is expanded, and only then. That is the
# rule of which candidates are: those whose estimate is, at some moment of the search, the nearest of what top_m holds
# unexpanded. A node that several parents lead to keeps the nearest of its estimates.
#
# A node's block, for each 32 of its neighbours (the last ones are filled up with A = +inf):
#
#     B · D'/4 · 16 bytes   lowest bits first. Byte j of group g: those of dimensions 4g … 4g+3, of neighbour j (low
#                       half) and of neighbour j + 16 (high half)
#     32 · float32      A
#     32 · float32      F
#
# The layout is that of fast scan (arXiv 1704.07355): 16 look-ups at a time in a register that holds, for the four
# dimensions of a group, all sixteen sums ±q₀±q₁±q₂±q₃.


GROUP = 32  # neighbours that are estimated together
ROUNDS = 4  # of the rotation
MAX_CODE_BITS = 4
_DIM_STEP = 64
_TWO_BITS_UP_TO = 256
FACTOR_BYTES = 2 * 4 * GROUP


@dataclass(frozen=True)
class NeighborCodes:
    """The codes of an index's graph.

    blocks: uint8 [N, block_bytes]. entry: uint8 [1, entry bytes], a block of the seeds as neighbours of the centre.
    signs: float32 [ROUNDS, D'], the rotation (see `gpu.cpu.rotation`). bits: B.
    """

    blocks: npt.NDArray[np.uint8]
    entry: npt.NDArray[np.uint8]
    signs: npt.NDArray[np.float32]
    bits: int = 1

    @property
    def dims(self) -> int:
        """D', the dimensions of a code."""
        return int(self.signs.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.blocks.nbytes + self.entry.nbytes + self.signs.nbytes)


def code_dims(dim: int) -> int:
    """D' for vectors of `dim` dimensions."""
    return padded(dim, _DIM_STEP)


def block_bytes(dim: int, neighbors: int, bits: int = 1) -> int:
    """Bytes of a block, a multiple of 64."""
    return -(-neighbors // GROUP) * (4 * bits * code_dims(dim) + FACTOR_BYTES)


def fastest_bits(dim: int) -> int:
    """How many bits make searches fastest: a second one where few dimensions leave a large error.

    Measured (docs/benchmarks.md): 2 bits are 1.4 times as fast as 1 with 100 dimensions, as fast with 384, and slower
    with 784; 3 and 4 are never faster than the better of these by more than 5%.
    """
    return 2 if code_dims(dim) <= _TWO_BITS_UP_TO else 1


def window(dims: int) -> int:
    """Dimensions that one round of the rotation transforms: the greatest power of two up to D'."""
    return 1 << (dims.bit_length() - 1)


def make_signs(dim: int, random: np.random.Generator) -> npt.NDArray[np.float32]:
    """A random rotation: signs of every round, with the round's scale in them."""
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
    """Encoded vectors, the graph over them, where searches begin, and the caller's ids.

    graph: uint32 [N, degree], C order. seeds: uint32 [S], distinct rows. ids: int64 [N], or None for row numbers.
    codes: RaBitQ codes of every node's neighbours, or None; only a CPU's search reads them.
    """

    rows: Rows
    graph: npt.NDArray[np.uint32]
    seeds: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.int64] | None
    codes: NeighborCodes | None = None

    def ids_of(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The caller's ids of row numbers; -1 stays -1."""
        if self.ids is None:
            return nodes
        if len(nodes) and nodes.min() >= 0:
            return self.ids[nodes]
        return np.where(nodes >= 0, self.ids[np.maximum(nodes, 0)], -1)


# ---- bitmaps of an index's nodes: a bit each, in whole words, as compiled code reads them


_WORD = 64


def bitmap(allowed: npt.NDArray[np.bool_], size: int) -> npt.NDArray[np.uint64]:
    """The bitmap uint64 of bool [size]. Raises InvalidParams for another shape or type."""
    if allowed.shape != (size,) or allowed.dtype != bool:
        raise InvalidParams(f"allowed has dtype {allowed.dtype} and shape {allowed.shape}; bool [{size}] is needed")
    packed = np.zeros(-(-size // _WORD) * _WORD // 8, np.uint8)
    packed[: -(-size // 8)] = np.packbits(allowed, bitorder="little")
    return packed.view(np.uint64)


def check_bitmap(bits: npt.NDArray[np.uint64], size: int) -> None:
    """Raise InvalidParams for what is not a bitmap of `size` nodes: compiled code would read behind its end."""
    words = -(-size // _WORD)
    if bits.shape != (words,) or bits.dtype != np.uint64 or not bits.flags.c_contiguous:
        raise InvalidParams(f"allowed has dtype {bits.dtype} and shape {bits.shape}; uint64 [{words}] is needed")
