"""Sections of a parsed file, and splitting of their text into passages."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class UnreadableFile(Exception):
    """The file cannot be read; the message is the reason, in a few words."""


@dataclass(frozen=True, slots=True)
class Section:
    """Text under a heading. `heading`: all headings above it, outermost first. `page`: from 1; 0 without pages."""

    text: str
    heading: str = ""
    page: int = 0


@dataclass(frozen=True, slots=True)
class ParsedFile:
    """A file's title ("": none) and sections."""

    title: str
    sections: list[Section]


class Outline:
    """Builder of sections from headings and text in document order. Headings are joined by " › "."""

    def __init__(self) -> None:
        self.title = ""
        self.sections: list[Section] = []
        self._headings: list[tuple[int, str]] = []
        self._text: list[str] = []

    def heading(self, level: int, text: str) -> None:
        """Start a section; the first heading of level 1 becomes the title if there is none."""
        text = " ".join(text.split())
        if not text:
            return
        self._end()
        if level == 1 and not self.title:
            self.title, self._headings = text, []
            return
        self._headings = [(above, name) for above, name in self._headings if above < level] + [(level, text)]

    def text(self, text: str) -> None:
        """Add a block of text to the current section."""
        if text.strip():
            self._text.append(text.strip("\n"))

    def read(self) -> ParsedFile:
        """Return the file."""
        self._end()
        return ParsedFile(self.title, self.sections)

    def _end(self) -> None:
        if self._text:
            heading = " › ".join(name for _, name in self._headings)
            self.sections.append(Section("\n\n".join(self._text), heading))
            self._text = []


# ---- splitting: passages of limited tokens, cut between paragraphs, else sentences, else words


_CUTS = (re.compile(r"(?<=\n)\s*\n"), re.compile(r"(?<=[.!?…。！？])\s+|\n"), re.compile(r"\s+"))
MAX_TOKEN_CHARACTERS = 8  # characters: a tokenizer may count long words or runs of blanks as very few tokens
_WINDOW = 1 << 16  # characters searched at once: a search holds the interpreter's lock, which an event loop may want

Count = Callable[[str], int]


def split(text: str, limit: int, count: Count) -> Iterator[str]:
    """Yield non-empty, stripped pieces of at most about `limit` tokens, as counted by `count`."""
    piece, tokens = "", 0
    for part, size in _parts(text, limit, count, 0):
        if piece.strip() and (tokens + size > limit or len(piece) + len(part) > MAX_TOKEN_CHARACTERS * (limit + 8)):
            yield piece.strip()
            piece, tokens = "", 0
        piece += part
        tokens += size
    if piece.strip():
        yield piece.strip()


def _parts(text: str, limit: int, count: Count, level: int) -> Iterator[tuple[str, int]]:
    """Yield the consecutive parts of the text with their tokens; none exceeds the limit but a single character."""
    if len(text) <= MAX_TOKEN_CHARACTERS * (limit + 8) and ((size := count(text)) <= limit or len(text) == 1):
        yield text, size
    elif level == len(_CUTS):
        middle = len(text) // 2
        yield from _parts(text[:middle], limit, count, level)
        yield from _parts(text[middle:], limit, count, level)
    else:
        begin = 0
        for end in _ends(_CUTS[level], text):
            yield from _parts(text[begin:end], limit, count, level + 1)
            begin = end
        if begin < len(text):
            yield from _parts(text[begin:], limit, count, level + 1)


def _ends(cut: re.Pattern[str], text: str) -> Iterator[int]:
    """Yield where the matches of `cut` end. A match is of blanks and line ends."""
    begin, window = 0, _WINDOW
    while begin < len(text):
        end = begin + window
        separator = cut.search(text, begin, end)
        if separator is None and end >= len(text):
            return
        stop = separator.end() if separator else begin + len(text[begin:end].rstrip())  # the next match may begin there
        if stop == begin or (separator and stop == end < len(text)):
            window *= 2  # the match may go on behind it
            continue
        begin, window = stop, _WINDOW
        if separator:
            yield stop
