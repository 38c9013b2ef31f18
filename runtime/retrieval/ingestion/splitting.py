"""Text to passages of at most so many tokens, cut where a reader would cut: between paragraphs, sentences, words."""

import re
from collections.abc import Callable, Iterator

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
