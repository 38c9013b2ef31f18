"""Sampling of the next token from logits: greedy, or by temperature and nucleus, reproducible by the request's seed."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.serving.messages import Sampling


class SampleSpec(NamedTuple):
    """How to draw one token: temperature (0: the largest logit), top_p, and a uniform number in [0, 1)."""

    temperature: float
    top_p: float
    uniform: float


_NUCLEUS_GUESS = 256  # most likely tokens that are sorted first; all are sorted only if these are not enough


class Sampler:
    """Samples the tokens of one request. Sample n depends only on the seed, n and the logits, so another worker that
    resumes a request after `drawn` tokens samples the same tokens."""

    def __init__(self, sampling: Sampling, drawn: int = 0) -> None:
        self._temperature = sampling.temperature
        self._top_p = sampling.top_p
        self._generator: np.random.Generator | None = None
        if sampling.temperature > 0:
            bits = np.random.PCG64(sampling.seed & 0xFFFF_FFFF_FFFF_FFFF)
            bits.advance(drawn)  # one step per sample: `next_spec` calls random() once
            self._generator = np.random.Generator(bits)

    def next_spec(self) -> SampleSpec:
        """Return the parameters of the next sample, for `network.sampling`, and advance the generator."""
        return SampleSpec(self._temperature, self._top_p, 0.0 if self._generator is None else self._generator.random())

    def sample(self, logits: npt.ArrayLike) -> int | None:
        """Return the next token for logits float32 [vocabulary] (array or CPU tensor).

        Temperature 0 selects the largest logit, the first one of equals. None if the largest logit is not finite.
        """
        row = np.asarray(logits, dtype=np.float32)
        best = int(row.argmax())
        point = self.next_spec().uniform
        if not np.isfinite(row[best]):
            return None
        if self._generator is None:
            return best
        weights = np.exp((row.astype(np.float64) - float(row[best])) / self._temperature)
        if self._top_p >= 1.0:
            sums = np.cumsum(weights)
            return _index_of(sums, point)
        ids, sums = _nucleus(weights, self._top_p)
        return int(ids[_index_of(sums, point)])


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the smallest set of most likely tokens with `top_p` of the total weight, and their cumulative weights."""
    wanted = top_p * weights.sum()
    ids: npt.NDArray[Any] = np.arange(weights.size)
    if weights.size > _NUCLEUS_GUESS:
        # All tokens at least as likely as the last guess, so that a tie there is cut as in a full sort.
        threshold = np.partition(weights, -_NUCLEUS_GUESS)[-_NUCLEUS_GUESS]
        likely = np.flatnonzero(weights >= threshold)
        if weights[likely].sum() >= wanted:
            ids = likely
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    sums = np.cumsum(weights[ids])
    size = min(int(np.searchsorted(sums, wanted)) + 1, ids.size)
    return ids[:size], sums[:size]


def _index_of(sums: npt.NDArray[np.float64], point: float) -> int:
    """Return the index whose interval of the cumulative sums contains `point` in [0, 1)."""
    return min(int(np.searchsorted(sums, point * sums[-1], side="right")), sums.size - 1)
