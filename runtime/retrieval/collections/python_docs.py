"""Python's own language reference as a corpus: the topics of `help()`, cut into titled passages.

`pydoc_data.topics` is on every Python: reStructuredText rendered as plain text. Some topics repeat others as their
sections ("compound" holds "with"); the smaller topic keeps the passage.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.retrieval.collections.documents import Document

TARGET_WORDS = 120  # a passage is closed before the block that would take it over this
MAX_WORDS = 150  # a block longer than this is cut
MIN_WORDS = 30  # a last passage shorter than this joins the one before it
OVERLAP_WORDS = 40  # the last block is repeated at the head of the next passage if it is no longer than this

_UNDERLINE = re.compile(r"([*=\-~^])\1{2,}$")
_ADMONITION = re.compile(r"(Note|See also|Warning|Caution|Important|Hint|Tip|CPython implementation detail)s?:$")
_SIGNATURE = re.compile(r"(class |exception |async |coroutine )*[\w.]+(\([^)]*\)?|\[.*\]| [^ ]{1,2} .*)?( .*)?$")
_LITERAL = re.compile(r'""([^"]+)""|"([^"]+)"')
_TABLE_BORDER = re.compile(r"^ *[+|][-=+|]+[+|]$\n?", re.MULTILINE)
_TABLE_ROW = re.compile(r"^( *)\|(.*)\|$", re.MULTILINE)
_LITERAL_OF_QUOTES = re.compile(r'"(\'\'|"")"')


def python_documents() -> list[Document]:
    """The reference's passages, about 80 to 150 words each, ids such as `with#2` (the second passage of topic "with").

    The same on every run of one Python version.
    """
    from pydoc_data.topics import topics  # half a megabyte, wanted by nobody else

    documents: list[Document] = []
    seen: set[str] = set()
    for topic in sorted(topics, key=lambda name: (len(topics[name]), name)):
        number = 0
        for title, text in _passages(topics[topic]):
            if text not in seen:
                seen.add(text)
                number += 1
                documents.append(Document(f"{topic}#{number}", title, text))
    return sorted(documents, key=lambda document: (document.id.split("#")[0], int(document.id.split("#")[1])))


@dataclass
class _Section:
    title: str
    blocks: list[str] = field(default_factory=list)


def _passages(topic: str) -> Iterator[tuple[str, str]]:
    page = ""
    for section in _sections(topic):
        title = _prose(section.title)
        page = page or title
        for passage in _packed(section.blocks):
            yield title if title == page else f"{page}: {title}", passage


def _sections(topic: str) -> Iterator[_Section]:
    """Cut at headings, which are underlined, and at the bracketed line before footnotes."""
    section = _Section("")
    code_indent = 0  # > 0: in a code block, of this indentation
    for block in re.split(r"\n\s*\n", topic.strip("\n")):
        lines = block.split("\n")
        if len(lines) == 2 and _UNDERLINE.match(lines[1]) and len(lines[1]) >= len(lines[0]) - 2:
            yield section
            section, code_indent = _Section(lines[0]), 0
            continue
        if block.strip() == "-[ Footnotes ]-" or _UNDERLINE.match(
            block
        ):  # a bare line parts a page's head from its body
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        before = section.blocks[-1] if section.blocks else ""
        if not code_indent and _introduces_code(before) and indent > _indent(before) and not _is_list_or_table(block):
            code_indent = indent
        elif indent < code_indent:
            code_indent = 0
        section.blocks.append(block if code_indent or _is_code(block) else _prose(block))
    yield section


def _packed(blocks: list[str]) -> Iterator[str]:
    """Whole blocks up to the target, never ending on what announces the next block (a signature, a colon)."""
    passages: list[list[str]] = [[]]
    overlapped = 0  # blocks of the last passage that the one before it ends with
    for block in (piece for whole in blocks for piece in _cut(whole)):
        passage = passages[-1]
        kept = len(passage)
        while kept > overlapped and _announces(passage[kept - 1]):
            kept -= 1
        if kept > overlapped and _words(passage) + _words([block]) > TARGET_WORDS:
            overlapped = int(_words(passage[kept - 1 : kept]) <= OVERLAP_WORDS)
            passages[-1:] = [passage[:kept], passage[kept - overlapped :]]
        passages[-1].append(block)
    if len(passages) > 1 and _words(rest := passages[-1][overlapped:]) < MIN_WORDS:
        passages.pop()
        passages[-1].extend(rest)
    for passage in filter(None, passages):
        yield textwrap.dedent("\n\n".join(passage)).strip("\n")


def _cut(block: str) -> Iterator[str]:
    """A block as it is, or in pieces of at most `MAX_WORDS` words at line ends."""
    piece: list[str] = []
    words = 0
    for line in block.split("\n"):
        if piece and words + len(line.split()) > MAX_WORDS:
            yield "\n".join(piece)
            piece, words = [], 0
        piece.append(line)
        words += len(line.split())
    yield "\n".join(piece)


def _prose(block: str) -> str:
    """Free of markup: "literals" lose their quotes, *emphasis* and **strong** their stars, tables their frames."""
    block = _TABLE_ROW.sub(_cells, _TABLE_BORDER.sub("", block)).rstrip("\n")
    block = _LITERAL_OF_QUOTES.sub(r"\1", block)
    block = _LITERAL.sub(lambda match: f'"{match[1]}"' if match[1] else match[2], block)
    return re.sub(r"(?<![\w*])(\*{1,2})(\w[^*]*?)(?<!\s)\1(?![\w*])", r"\2", block)


def _cells(row: re.Match[str]) -> str:
    return row[1] + " | ".join(cell.strip() for cell in row[2].split("|") if cell.strip())


def _introduces_code(block: str) -> bool:
    return block.endswith(":") and not _ADMONITION.match(block.split("\n")[-1].strip())


def _is_code(block: str) -> bool:
    return "::=" in block or ">>> " in block


def _is_list_or_table(block: str) -> bool:
    return bool(re.match(r"\s*(([*\-•]|\d+\.|\[\d+\]) |\+--)", block))


def _announces(block: str) -> bool:
    text = block.strip()
    return text.endswith(":") or ("\n" not in text and bool(_SIGNATURE.fullmatch(text)) and not text.endswith("."))


def _indent(block: str) -> int:
    return len(block) - len(block.lstrip())


def _words(blocks: list[str]) -> int:
    return sum(len(block.split()) for block in blocks)
