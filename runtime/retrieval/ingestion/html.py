"""HTML: what a reader sees, without markup, scripts and styles."""

import contextlib
import re
from html.parser import HTMLParser

from runtime.retrieval.ingestion.sections import Outline, Read
from runtime.retrieval.ingestion.text import decoded

_UNSEEN = frozenset(("script", "style", "noscript", "template", "svg", "head", "nav", "iframe", "select", "button"))
_BLOCKS = frozenset((
    "p", "div", "section", "article", "main", "header", "footer", "aside", "blockquote", "ul", "ol", "dl", "dt", "dd",
    "table", "form", "figure", "figcaption", "pre", "hr", "body", "html", "details", "summary", "address",
))  # fmt: skip
_CHARSET = re.compile(rb"<meta[^>]{0,256}charset=[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)


def read_html(content: bytes) -> Read:
    """Sections by headings. Raises `Unreadable` for text that is not of its encoding."""
    if (declared := _CHARSET.search(content[:4096])) and not content.startswith((b"\xff\xfe", b"\xfe\xff")):
        with contextlib.suppress(LookupError, UnicodeError):  # else it may be UTF-8 all the same
            content = content.decode(declared[1].decode()).encode()
    reader = _Reader()
    reader.feed(decoded(content))
    reader.close()
    return reader.whole()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self._outline = Outline()
        self._block: list[str] = []
        self._unseen: list[str] = []
        self._title: list[str] | None = None
        self._pre = 0

    def whole(self) -> Read:
        self._end_block()
        return self._outline.read()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title" and not self._outline.title:
            self._title = []
        elif tag in _UNSEEN:
            self._unseen.append(tag)
        elif tag == "br":
            self._block.append("\n")
        elif tag in ("li", "tr"):
            self._block.append("\n- " if tag == "li" else "\n")
        elif tag in ("td", "th"):
            self._block.append(" ")
        elif tag in _BLOCKS or _level(tag):
            self._end_block()
            self._pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag == "title" and self._title is not None:
            self._outline.title = " ".join("".join(self._title).split())
            self._title = None
        elif tag in self._unseen:
            while self._unseen.pop() != tag:
                pass
        elif level := _level(tag):
            text, self._block = "".join(self._block), []
            if text.split() != self._outline.title.split():
                self._outline.heading(level if not self._outline.title else max(level, 2), text)
        elif tag in _BLOCKS:
            self._end_block()
            self._pre -= tag == "pre" and self._pre > 0

    def handle_data(self, data: str) -> None:
        if self._title is not None:
            self._title.append(data)
        elif not self._unseen:
            self._block.append(data if self._pre else re.sub(r"\s+", " ", data))

    def _end_block(self) -> None:
        lines = (line.rstrip() if self._pre else line.strip() for line in "".join(self._block).split("\n"))
        self._outline.text("\n".join(line for line in lines if line))
        self._block = []


def _level(tag: str) -> int:
    return int(tag[1]) if re.fullmatch("h[1-6]", tag) else 0
