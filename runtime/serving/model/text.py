"""Text of an answer while it grows: token ids in, text that no later token can change out."""

from collections.abc import Sequence
from typing import Protocol

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
