"""Parameters of a request's samples, reproducible by its seed. The samples are drawn by `network.sampling`."""

from typing import NamedTuple

import numpy as np

from runtime.serving.messages import Sampling


class SampleSpec(NamedTuple):
    """How to draw one token: temperature (0: the largest logit), top_p, and a uniform number in [0, 1)."""

    temperature: float
    top_p: float
    uniform: float


class Sampler:
    """The samples of one request. Sample n depends only on the seed, n and the logits, so another worker that resumes
    a request after `drawn` tokens samples the same tokens."""

    def __init__(self, sampling: Sampling, drawn: int = 0) -> None:
        self._temperature, self._top_p = sampling.temperature, sampling.top_p
        self._generator: np.random.Generator | None = None
        if sampling.temperature > 0:
            bits = np.random.PCG64(sampling.seed & 0xFFFF_FFFF_FFFF_FFFF)
            bits.advance(drawn)  # one step per sample: `next_spec` calls random() once
            self._generator = np.random.Generator(bits)

    def next_spec(self) -> SampleSpec:
        """Return the parameters of the next sample, and advance the generator."""
        return SampleSpec(self._temperature, self._top_p, 0.0 if self._generator is None else self._generator.random())
