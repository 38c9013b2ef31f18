"""Drawing the next token from logits: greedy, or by temperature and nucleus, reproducible from the request's seed."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runtime.errors import InternalError
from runtime.serving.messages import Sampling

_NUCLEUS_GUESS = 256  # so many of the most likely tokens are sorted first; all of them only if that is not enough


class Sampler:
    """The draws of one request. Draw number n depends on seed, n and logits alone, wherever it happens:
    a worker that takes a request over after `drawn` tokens goes on as the first one would have."""

    def __init__(self, sampling: Sampling, drawn: int = 0) -> None:
        self._temperature = sampling.temperature
        self._top_p = sampling.top_p
        self._generator: np.random.Generator | None = None
        if sampling.temperature > 0:
            bits = np.random.PCG64(sampling.seed & 0xFFFF_FFFF_FFFF_FFFF)
            bits.advance(drawn)  # one step a draw: see the one call of random() below
            self._generator = np.random.Generator(bits)

    def draw(self, logits: ArrayLike) -> int:
        """The next token, from logits float32 [vocabulary] (array or CPU tensor).

        Temperature 0 takes the largest logit, of equals the first. Raises `InternalError` if no logit is finite.
        """
        row = np.asarray(logits, dtype=np.float32)
        best = int(row.argmax())
        if not np.isfinite(row[best]):
            raise InternalError(f"the model's largest logit is {row[best]}")
        if self._generator is None:
            return best
        weights = np.exp((row.astype(np.float64) - float(row[best])) / self._temperature)
        point = self._generator.random()
        if self._top_p >= 1.0:
            sums = np.cumsum(weights)
            return _locate(sums, point)
        ids, sums = _nucleus(weights, self._top_p)
        return int(ids[_locate(sums, point)])


def _nucleus(weights: NDArray[np.float64], top_p: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The fewest most likely tokens whose weights make up `top_p` of the sum, and their running sums."""
    wanted = top_p * weights.sum()
    ids: NDArray[Any] = np.arange(weights.size)
    if weights.size > _NUCLEUS_GUESS:
        # Everything at least as likely as the guess's last, so that a tie there is cut as in a full sort.
        threshold = np.partition(weights, -_NUCLEUS_GUESS)[-_NUCLEUS_GUESS]
        likely = np.flatnonzero(weights >= threshold)
        if weights[likely].sum() >= wanted:
            ids = likely
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    sums = np.cumsum(weights[ids])
    size = min(int(np.searchsorted(sums, wanted)) + 1, ids.size)
    return ids[:size], sums[:size]


def _locate(sums: NDArray[np.float64], point: float) -> int:
    """The index that `point` in [0, 1) falls on."""
    return min(int(np.searchsorted(sums, point * sums[-1], side="right")), sums.size - 1)
