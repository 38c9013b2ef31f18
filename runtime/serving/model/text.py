"""From logits to the text of an answer: drawing tokens, and their text while it grows."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runtime.errors import InternalError
from runtime.serving.messages import Sampling

# ---- text: token ids in, text that no later token can change out

_HALF = "\ufffd"  # what a tokenizer makes of bytes that are no character, or not yet


class Decoder(Protocol):
    """What `TextStream` needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""


class StopStrings:
    """Looks for stop strings in a growing text. The beginning of what may become one is held back."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.stopped = False

    def push(self, fresh: str) -> str:
        """What is certain now: up to a stop string, or to where one may begin; nothing once one has come."""
        if self.stopped:
            return ""
        text = self._held + fresh
        found = [(begin + len(stop), begin) for stop in self._stop if (begin := text.find(stop)) >= 0]
        if found:
            # The one that was complete first counts, so that it does not matter how many tokens come at a time.
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """The text of one answer. All pieces together are what decoding all tokens at once gives, cut at a stop string.

    A character whose bytes are not all there is held back, and so is the beginning of what may become a stop string.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stop)
        self._ids: list[int] = []  # the window: tokens from the last whole character's token on
        self._context = 0  # that token only gives context (some decoders treat a text's first token differently)
        self._told = 0  # characters of the window's text that have left it

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens made certain; nothing once a stop string has come."""
        if self.stopped or not token_ids:
            return ""
        self._ids += token_ids
        text = self._tokenizer.decode(self._ids)
        whole = len(text) - text.endswith(_HALF)
        fresh = text[self._told : whole]
        self._told = max(self._told, whole)
        if whole == len(text):
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._told = len(self._tokenizer.decode(self._ids))
        return self._stops.push(fresh)

    def flush(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._tokenizer.decode(self._ids)[self._told :]
        self._ids, self._context, self._told = [], 0, 0
        return self._stops.push(rest) + self._stops.flush()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


# ---- drawing the next token from logits: greedy, or by temperature and nucleus, reproducible from the request's seed


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
