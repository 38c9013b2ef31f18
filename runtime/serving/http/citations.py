"""Where an answer cites files.

A sentence cites a file if it repeats words of one of the file's passages: a run of `RUN_WORDS` consecutive words, or
all of a shorter sentence of at least two words; case and punctuation do not count. If several passages have such words,
the one with most runs is cited, of equal ones the nearest. The citation stands behind the sentence.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

RUN_WORDS = 4
_WORD = re.compile(r"\w+")
_END = re.compile(r"[.!?…。！？]+[\"'”’)\]]*(?=\s)|\n+")


class Citation(NamedTuple):
    """A passage, by its number, and the position in the text at which it is cited."""

    passage: int
    position: int


class Citations:
    """The citations of a text that arrives in parts. `passages`: their texts, nearest first; more may be added."""

    def __init__(self, passages: Sequence[str] = ()) -> None:
        self._passages = [_words(text) for text in passages]
        self._rest, self._begin = "", 0  # the sentence that is not complete yet, and where it begins

    def add_passage(self, text: str) -> None:
        """Add a passage that later sentences may cite."""
        self._passages.append(_words(text))

    def add(self, text: str) -> Iterator[Citation]:
        """Add a part of the text; yield the citations of the sentences that it completes."""
        self._rest += text
        while mark := _END.search(self._rest):
            yield from self._cite(self._rest[: mark.end()])
            self._begin += mark.end()
            self._rest = self._rest[mark.end() :]

    def finish(self) -> Iterator[Citation]:
        """Yield the citation of the last sentence."""
        yield from self._cite(self._rest)
        self._begin, self._rest = self._begin + len(self._rest), ""

    def _cite(self, sentence: str) -> Iterator[Citation]:
        words = _WORD.findall(sentence.lower())
        size = min(RUN_WORDS, len(words))
        if size < 2:
            return
        runs = [f" {' '.join(words[at : at + size])} " for at in range(len(words) - size + 1)]
        shared = [sum(run in passage for run in runs) for passage in self._passages]
        if any(shared):
            yield Citation(shared.index(max(shared)), self._begin + len(sentence.rstrip()))


def _words(text: str) -> str:
    return f" {' '.join(_WORD.findall(text.lower()))} "
