"""Sketches: one or two cache lines a vector that tell, most of the time, whether its distance is worth computing.

A sketch is the vector's projection on the principal directions of the data, turned at random so that all its
components are of one size, in 4 bits each; then their step and the vector's squared norm. With u the query less the
centre c (for a dot product: the query), P the projection and r the part of a vector that P leaves out,

    |x - q|²  =  |x - c|² + |u|² - 2 (Px · Pu)  -  2 (x_r · u_r)
      -x · q  =     - c · q      -    Px · Pu   -     x_r · u_r

What the sketch does not know is the last term and its own rounding. Both are allowed for by `slack`·|u|, where slack is
measured on neighbouring pairs of the data. A node is skipped if even so it is farther than the worst entry of top_m; a
node that is not skipped gets its distance from the row itself. (A cheap estimate before the distance: FINGER, arXiv
2206.11408; ADSampling, arXiv 2303.09855. Codes after a random rotation: RaBitQ, arXiv 2405.12497.)

Layout of 64·lines bytes: byte j < n/2 holds component j in its lower half and component n/2 + j in its upper half, as
value / step + 7.5; the last 8 bytes hold the step and the squared norm |x - c|² as float32.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

LINE = 64
TAIL = 8
MAX_LINES = 2
_SAMPLE = 4096
_POWER_ROUNDS = 3
_ENOUGH = 0.9  # of the variance: then one line will do
_COVERED = 0.9  # the part of neighbouring pairs that slack covers


@dataclass(frozen=True)
class Sketch:
    """codes: uint8 [N, 64·lines]. projection: float16 [components, d padded to 16]."""

    codes: npt.NDArray[np.uint8]
    projection: npt.NDArray[np.float16]
    slack: float


def components(lines: int) -> int:
    """How many 4-bit components fit into a sketch."""
    return 2 * (lines * LINE - TAIL)


def projection_of(vectors: FloatArray, centre: FloatArray, random: np.random.Generator) -> npt.NDArray[np.float16]:
    """Orthonormal directions, [components, d padded to 16], from a sample of rows; zeros where d has fewer.

    Principal directions by subspace iteration: as many as fit into one line if these hold 90% of the variance, else
    two lines.
    """
    sample = vectors[np.sort(random.permutation(len(vectors))[:_SAMPLE])] - centre
    dim = vectors.shape[1]
    basis, _ = np.linalg.qr(random.standard_normal((dim, min(components(MAX_LINES), dim)), np.float32))
    for _ in range(_POWER_ROUNDS):
        basis, _ = np.linalg.qr(sample.T @ (sample @ basis))
    variance = np.cumsum(np.square(sample @ basis).sum(axis=0)) / max(float(np.square(sample).sum()), 1e-30)
    lines = next((n for n in range(1, MAX_LINES) if variance[min(components(n), dim) - 1] >= _ENOUGH), MAX_LINES)
    basis = basis[:, : components(lines)]
    turn, _ = np.linalg.qr(random.standard_normal((basis.shape[1], basis.shape[1]), np.float32))
    directions = np.zeros((components(lines), -(-dim // 16) * 16), np.float16)
    directions[: basis.shape[1], :dim] = (basis @ turn).T
    return directions


def sketch_codes(centred: FloatArray, projection: FloatArray, out: npt.NDArray[np.uint8]) -> None:
    """Write the sketches of x - c (float32 [n, d]) to out, uint8 [n, 64·lines]."""
    heads = centred @ projection.T
    steps = np.abs(heads).max(axis=1) / np.float32(7.5)
    levels = np.clip(np.rint(heads / np.where(steps > 0, steps, 1)[:, None] + 7.5), 0, 15).astype(np.uint8)
    half = heads.shape[1] // 2
    out[:, :half] = levels[:, :half] | levels[:, half:] << 4
    out[:, half:] = np.stack([steps, np.einsum("ij,ij->i", centred, centred)], axis=1).astype(np.float32).view(np.uint8)


def decoded(sketches: npt.NDArray[np.uint8]) -> FloatArray:
    """The projections that sketches stand for, float32 [n, components]."""
    codes = sketches[:, :-TAIL]
    steps = np.ascontiguousarray(sketches[:, -TAIL:]).view(np.float32)[:, :1]
    return (np.hstack([codes & 15, codes >> 4]).astype(np.float32) - np.float32(7.5)) * steps


def slack_of(queries: FloatArray, others: FloatArray, sketches: npt.NDArray[np.uint8], projection: FloatArray) -> float:
    """The slack that covers 90% of the pairs of u and x - c (both float32 [n, d]), given the sketches of the latter."""
    known = np.einsum("ij,ij->i", decoded(sketches), queries @ projection.T)
    unknown = np.einsum("ij,ij->i", queries, others) - known
    norms = np.sqrt(np.maximum(np.einsum("ij,ij->i", queries, queries), 1e-30))
    return max(float(np.quantile(unknown / norms, _COVERED)), 0.0)
