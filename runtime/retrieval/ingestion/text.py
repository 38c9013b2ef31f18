"""Readers of plain text, Markdown and HTML."""

import codecs
import contextlib
import re
from html.parser import HTMLParser

from runtime.retrieval.ingestion.sections import Outline, ParsedFile, Section, UnreadableFile

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_MAX_HEADING = 1000
_SAMPLE = 4096  # bytes
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_TITLE = re.compile(r"^title:[ \t]*(.+?)[ \t]*$", re.MULTILINE)


def decode_text(content: bytes) -> str:
    """Decode UTF-8, UTF-16 or UTF-32; normalize line ends. Raises `UnreadableFile`."""
    encoding = _encoding(content)
    try:
        return content.decode(encoding).removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"not {encoding[:6].upper()} text at byte {error.start}") from error


def _encoding(content: bytes) -> str:
    """Return the encoding that a byte order mark or, in UTF-16 without one, the zero bytes tell."""
    if content.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    first, second = content[:_SAMPLE:2].count(0), content[1:_SAMPLE:2].count(0)
    # The upper byte of spaces, line ends and Latin letters is zero: the first of each pair, or the second. Text in
    # UTF-8 has no zeros, except by mistake.
    if max(first, second) > len(content[:_SAMPLE]) / 32 and min(first, second) <= max(first, second) / 16:
        return "utf-16-be" if first > second else "utf-16-le"
    return "utf-8"


def read_text(content: bytes) -> ParsedFile:
    """Return the text as one section."""
    return ParsedFile("", [Section(decode_text(content))])


def read_markdown(content: bytes) -> ParsedFile:
    """Return sections by headings, with Markdown syntax; front matter supplies the title and is left out."""
    text, outline = decode_text(content), Outline()
    if front := _FRONT_MATTER.match(text):
        text = text[front.end() :]
        if title := _TITLE.search(front[1]):
            outline.title = title[1].strip("\"'")
    lines: list[str] = []
    fence = ""
    for line in text.split("\n"):
        if opened := _FENCE.match(line):
            if not fence:
                fence = opened[1]
            elif opened[1].startswith(fence) and not line.strip(" \t" + fence[0]):
                fence = ""
        heading = None if fence or len(line) > _MAX_HEADING else _HEADING.match(line)
        if heading:
            outline.text("\n".join(lines))
            lines = []
            outline.heading(len(heading[1]), heading[2] or "")
        elif not fence and lines and lines[-1].strip() and (under := _UNDERLINE.match(line)) and _alone(lines):
            above = lines.pop()
            outline.text("\n".join(lines))
            lines = []
            outline.heading(1 if under[1][0] == "=" else 2, above)
        else:
            lines.append(line)
    outline.text("\n".join(lines))
    return outline.read()


def _alone(lines: list[str]) -> bool:
    """Return whether the last line is a paragraph of its own, not part of a list, a table or a quote."""
    return (len(lines) == 1 or not lines[-2].strip()) and not re.match(r"\s*([-*+>|]|\d+[.)])", lines[-1])


# ---- HTML: visible text, without markup, scripts and styles


_INVISIBLE = frozenset(("script", "style", "noscript", "template", "svg", "head", "nav", "iframe", "select", "button"))
_BLOCKS = frozenset((
    "p", "div", "section", "article", "main", "header", "footer", "aside", "blockquote", "ul", "ol", "dl", "dt", "dd",
    "table", "form", "figure", "figcaption", "pre", "hr", "body", "html", "details", "summary", "address",
))  # fmt: skip
_CHARSET = re.compile(rb"<meta[^>]{0,256}charset=[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)


def read_html(content: bytes) -> ParsedFile:
    """Return sections by headings. Raises `UnreadableFile` for text that does not match its encoding."""
    if (declared := _CHARSET.search(content[:4096])) and not content.startswith((b"\xff\xfe", b"\xfe\xff")):
        with contextlib.suppress(LookupError, UnicodeError):  # it may be UTF-8 nevertheless
            content = content.decode(declared[1].decode()).encode()
    reader = _Reader()
    reader.feed(decode_text(content))
    reader.close()
    return reader.whole()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self._outline = Outline()
        self._block: list[str] = []
        self._hidden: list[str] = []
        self._title: list[str] | None = None
        self._pre = 0

    def whole(self) -> ParsedFile:
        self._end_block()
        return self._outline.read()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title" and not self._outline.title:
            self._title = []
        elif tag in _INVISIBLE:
            self._hidden.append(tag)
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
        elif tag in self._hidden:
            while self._hidden.pop() != tag:
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
        elif not self._hidden:
            self._block.append(data if self._pre else re.sub(r"\s+", " ", data))

    def _end_block(self) -> None:
        lines = (line.rstrip() if self._pre else line.strip() for line in "".join(self._block).split("\n"))
        self._outline.text("\n".join(line for line in lines if line))
        self._block = []


def _level(tag: str) -> int:
    return int(tag[1]) if re.fullmatch("h[1-6]", tag) else 0
