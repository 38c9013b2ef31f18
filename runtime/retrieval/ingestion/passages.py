"""Passages of a parsed file: pieces of its sections, of limited tokens."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from runtime.errors import BuildRefused
from runtime.retrieval.embedding.embedder import Embedder
from runtime.retrieval.ingestion.sections import MAX_TOKEN_CHARACTERS, Count, ParsedFile, Section, split

PASSAGE_TOKENS = 192  # by default a prompt has room for four such passages
MIN_PASSAGE_TOKENS = 16
_SHORT = 0.25  # of a passage: a shorter section is merged with the next


class FilePassage(NamedTuple):
    """A passage. `title`: of the file, with the heading. `page`: from 1; 0 without pages."""

    title: str
    text: str
    heading: str = ""
    page: int = 0


def passage_limit(given: int, embedder: Embedder) -> int:
    """Return the maximum number of tokens of a passage; 0: 192, or three quarters of the embedder's limit if less.

    Raises `BuildRefused`.
    """
    high = embedder.max_tokens
    if given == 0:
        return max(min(PASSAGE_TOKENS, high * 3 // 4), MIN_PASSAGE_TOKENS)
    if not MIN_PASSAGE_TOKENS <= given <= high:
        raise BuildRefused(
            f"passage_tokens is {given}, outside {MIN_PASSAGE_TOKENS}..{high}: {embedder.name} truncates longer texts"
        )
    return given


def file_passages(read: ParsedFile, name: str, limit: int, count: Count, overlap: int = 0) -> Iterator[FilePassage]:
    """Yield a file's passages of at most `limit` tokens, of which each repeats the last `overlap` of the one before.

    name: the title of a file that has none.
    """
    title = read.title.strip()[:200] or name
    for section in _merge_short_sections(read.sections, _SHORT * limit, count):
        heading = section.heading.strip()[:300]
        whole = f"{title}: {heading}" if heading and heading != title else title
        room = max(limit - count(whole) - overlap, MIN_PASSAGE_TOKENS)
        before = ""
        for piece in split(section.text.strip(), room, count):
            yield FilePassage(whole, f"{_ending(before, overlap, count)} {piece}".lstrip(), heading, section.page)
            before = piece


def _is_long(text: str, short: float, count: Count) -> bool:
    # By characters too: of control characters or long words, a megabyte may count as no token.
    return len(text) > MAX_TOKEN_CHARACTERS * short or count(text) >= short


def _ending(text: str, tokens: int, count: Count) -> str:
    """Return the last words of a text, of at most so many tokens."""
    words = text.split()[-tokens:] if tokens else []
    while words and count(" ".join(words)) > tokens:
        del words[: max(len(words) // 8, 1)]
    return " ".join(words)


def _merge_short_sections(sections: Sequence[Section], short: float, count: Count) -> list[Section]:
    """Merge short sections with the following ones of the same page, whose headings become text."""
    joined: list[Section] = []
    for section in sections:
        last = joined[-1] if joined else None
        if last is None or last.page != section.page or _is_long(last.text, short, count):
            joined.append(section)
            continue
        own = section.heading.rpartition(" › ")[2]
        text = "\n\n".join(filter(None, (last.text, own, section.text)))
        joined[-1] = Section(text, last.heading, last.page)
    return joined
