"""What a reader makes of a file, its title and its text in sections that a citation can name; and these in passages."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class UnreadableFile(Exception):
    """The file cannot be read; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Section:
    """`heading`: those that it stands under, the outermost first. `page`: from 1; 0 where there are no pages."""

    text: str
    heading: str = ""
    page: int = 0


@dataclass(frozen=True, slots=True)
class ParsedFile:
    """A file's content. `title` "": its name will do."""

    title: str
    sections: list[Section]


class Outline:
    """Collects text under headings as they come. Headings are joined by " › "."""

    def __init__(self) -> None:
        self.title = ""
        self.sections: list[Section] = []
        self._headings: list[tuple[int, str]] = []
        self._text: list[str] = []

    def heading(self, level: int, text: str) -> None:
        """A heading begins; the first of level 1 is the title, if there is none yet."""
        text = " ".join(text.split())
        if not text:
            return
        self._end()
        if level == 1 and not self.title:
            self.title, self._headings = text, []
            return
        self._headings = [(above, name) for above, name in self._headings if above < level] + [(level, text)]

    def text(self, text: str) -> None:
        """A block of text under the last heading."""
        if text.strip():
            self._text.append(text.strip("\n"))

    def read(self) -> ParsedFile:
        """All of it."""
        self._end()
        return ParsedFile(self.title, self.sections)

    def _end(self) -> None:
        if self._text:
            heading = " › ".join(name for _, name in self._headings)
            self.sections.append(Section("\n\n".join(self._text), heading))
            self._text = []


# ---- text to passages of at most so many tokens, cut where a reader would cut: between paragraphs, sentences, words


_CUTS = (re.compile(r"(?<=\n)\s*\n"), re.compile(r"(?<=[.!?…。！？])\s+|\n"), re.compile(r"\s+"))
_MOST_A_TOKEN = 8  # characters: of a long word, or of many blanks, a tokenizer makes next to nothing

Count = Callable[[str], int]


def split(text: str, limit: int, count: Count) -> Iterator[str]:
    """Pieces of about `limit` tokens at most, as `count` counts them, without blanks around them; none is empty."""
    piece, tokens = "", 0
    for part, size in _parts(text, limit, count, 0):
        if piece.strip() and (tokens + size > limit or len(piece) + len(part) > _MOST_A_TOKEN * (limit + 8)):
            yield piece.strip()
            piece, tokens = "", 0
        piece += part
        tokens += size
    if piece.strip():
        yield piece.strip()


def _parts(text: str, limit: int, count: Count, level: int) -> Iterator[tuple[str, int]]:
    """Parts that make up the text, each with its tokens, none over the limit but a single character."""
    size = count(text)
    if (size <= limit and len(text) <= _MOST_A_TOKEN * (limit + 8)) or len(text) == 1:
        yield text, size
    elif level == len(_CUTS):
        middle = len(text) // 2
        yield from _parts(text[:middle], limit, count, level)
        yield from _parts(text[middle:], limit, count, level)
    else:
        begin = 0
        for cut in _CUTS[level].finditer(text):
            if cut.end() > begin:
                yield from _parts(text[begin : cut.end()], limit, count, level + 1)
                begin = cut.end()
        if begin < len(text):
            yield from _parts(text[begin:], limit, count, level + 1)
