"""Plain text and Markdown."""

import re

from runtime.retrieval.ingestion.sections import Outline, Read, Section, Unreadable

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_MAX_HEADING = 1000
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_TITLE = re.compile(r"^title:[ \t]*(.+?)[ \t]*$", re.MULTILINE)


def decoded(content: bytes) -> str:
    """UTF-8, or UTF-16 with its mark; lines end in a line feed. Raises `Unreadable`."""
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 text at byte {error.start}") from error


def read_text(content: bytes) -> Read:
    """A text as one section."""
    return Read("", [Section(decoded(content))])


def read_markdown(content: bytes) -> Read:
    """Sections by headings, as they are written; front matter gives the title and is left out."""
    text, outline = decoded(content), Outline()
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
    """Whether the last line is a paragraph of its own, and no part of a list, a table or a quote."""
    return (len(lines) == 1 or not lines[-2].strip()) and not re.match(r"\s*([-*+>|]|\d+[.)])", lines[-1])
