"""Sketches: one or two cache lines per vector from which a search can usually tell that its distance is too large.

A sketch holds the vector's projection on the principal directions of the data, rotated at random so that all its
components have one scale, in 4 bits each; then their step and the vector's squared norm. With u the query minus the
centre c (for a dot product: the query), P the projection and r the residual of a vector outside P,

    |x - q|²  =  |x - c|² + |u|² - 2 (Px · Pu)  -  2 (x_r · u_r)
      -x · q  =     - c · q      -    Px · Pu   -     x_r · u_r

The sketch lacks the last term and has rounding errors. A margin of `slack`·|u| covers both, where slack is measured on
neighbouring pairs of the data. A node is skipped if it is farther than the worst entry of top_m even with that margin;
the distance of any other node is computed from its row. (Cheap estimates before distances: FINGER, arXiv 2206.11408;
ADSampling, arXiv 2303.09855. Codes after a random rotation: RaBitQ, arXiv 2405.12497.)

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
_VARIANCE_COVERED = 0.9  # by one cache line, else a second one is used
_PAIRS_COVERED = 0.9  # fraction of neighbouring pairs within the slack


@dataclass(frozen=True)
class Sketch:
    """Sketches of all rows. codes: uint8 [N, 64·lines]. projection: float16 [components, d padded to 16]."""

    codes: npt.NDArray[np.uint8]
    projection: npt.NDArray[np.float16]
    slack: float


def components(lines: int) -> int:
    """Return the number of 4-bit components of a sketch."""
    return 2 * (lines * LINE - TAIL)


def projection_of(vectors: FloatArray, centre: FloatArray, random: np.random.Generator) -> npt.NDArray[np.float16]:
    """Return orthonormal directions, [components, d padded to 16], from a sample of rows, padded with zeros.

    Principal directions by subspace iteration: as many as fit into one cache line if they hold 90% of the variance,
    else into two.
    """
    sample = vectors[np.sort(random.permutation(len(vectors))[:_SAMPLE])] - centre
    dim = vectors.shape[1]
    basis, _ = np.linalg.qr(random.standard_normal((dim, min(components(MAX_LINES), dim)), np.float32))
    for _ in range(_POWER_ROUNDS):
        basis, _ = np.linalg.qr(sample.T @ (sample @ basis))
    variance = np.cumsum(np.square(sample @ basis).sum(axis=0)) / max(float(np.square(sample).sum()), 1e-30)
    lines = next(
        (n for n in range(1, MAX_LINES) if variance[min(components(n), dim) - 1] >= _VARIANCE_COVERED), MAX_LINES
    )
    basis = basis[:, : components(lines)]
    turn, _ = np.linalg.qr(random.standard_normal((basis.shape[1], basis.shape[1]), np.float32))
    directions = np.zeros((components(lines), -(-dim // 16) * 16), np.float16)
    directions[: basis.shape[1], :dim] = (basis @ turn).T
    return directions


def sketch_codes(centred: FloatArray, projection: FloatArray, out: npt.NDArray[np.uint8]) -> None:
    """Write the sketches of x - c (float32 [n, d]) to `out`, uint8 [n, 64·lines]."""
    heads = centred @ projection.T
    steps = np.abs(heads).max(axis=1) / np.float32(7.5)
    levels = np.clip(np.rint(heads / np.where(steps > 0, steps, 1)[:, None] + 7.5), 0, 15).astype(np.uint8)
    half = heads.shape[1] // 2
    out[:, :half] = levels[:, :half] | levels[:, half:] << 4
    out[:, half:] = np.stack([steps, np.einsum("ij,ij->i", centred, centred)], axis=1).astype(np.float32).view(np.uint8)


def decoded(sketches: npt.NDArray[np.uint8]) -> FloatArray:
    """Decode sketches to projections, float32 [n, components]."""
    codes = sketches[:, :-TAIL]
    steps = np.ascontiguousarray(sketches[:, -TAIL:]).view(np.float32)[:, :1]
    return (np.hstack([codes & 15, codes >> 4]).astype(np.float32) - np.float32(7.5)) * steps


def slack_of(queries: FloatArray, others: FloatArray, sketches: npt.NDArray[np.uint8], projection: FloatArray) -> float:
    """Return the slack that covers 90% of the pairs of u and x - c, float32 [n, d]; `sketches`: of the latter."""
    known = np.einsum("ij,ij->i", decoded(sketches), queries @ projection.T)
    unknown = np.einsum("ij,ij->i", queries, others) - known
    norms = np.sqrt(np.maximum(np.einsum("ij,ij->i", queries, queries), 1e-30))
    return max(float(np.quantile(unknown / norms, _PAIRS_COVERED)), 0.0)
