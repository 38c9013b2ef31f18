"""Python's own language reference as a corpus: the topics of `help()`, cut into titled passages.

`pydoc_data.topics` is on every Python: reStructuredText rendered as plain text. Some topics repeat others as their
sections ("compound" holds "with"); the smaller topic keeps the passage.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.retrieval.collections.documents import Document

TARGET_WORDS = 120  # a passage ends before the block that would exceed this
MAX_WORDS = 150  # a longer block is split
MIN_WORDS = 30  # a shorter last passage is appended to the one before it
OVERLAP_WORDS = 40  # a last block of at most this length is repeated at the start of the next passage

_UNDERLINE = re.compile(r"([*=\-~^])\1{2,}$")
_ADMONITION = re.compile(r"(Note|See also|Warning|Caution|Important|Hint|Tip|CPython implementation detail)s?:$")
_SIGNATURE = re.compile(r"(class |exception |async |coroutine )*[\w.]+(\([^)]*\)?|\[.*\]| [^ ]{1,2} .*)?( .*)?$")
_LITERAL = re.compile(r'""([^"]+)""|"([^"]+)"')
_TABLE_BORDER = re.compile(r"^ *[+|][-=+|]+[+|]$\n?", re.MULTILINE)
_TABLE_ROW = re.compile(r"^( *)\|(.*)\|$", re.MULTILINE)
_LITERAL_OF_QUOTES = re.compile(r'"(\'\'|"")"')


def python_documents() -> list[Document]:
    """Return the reference's passages, about 80 to 150 words each; id `with#2` is the second passage of topic "with".

    The result is the same on every run of one Python version.
    """
    from pydoc_data.topics import topics  # half a megabyte: imported only when needed

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
        title = _strip_markup(section.title)
        page = page or title
        for passage in _pack(section.blocks):
            yield title if title == page else f"{page}: {title}", passage


def _sections(topic: str) -> Iterator[_Section]:
    """Split a topic at headings, which are underlined, and at the bracketed line before footnotes."""
    section = _Section("")
    code_indent = 0  # > 0: in a code block, of this indentation
    for block in re.split(r"\n\s*\n", topic.strip("\n")):
        lines = block.split("\n")
        if len(lines) == 2 and _UNDERLINE.match(lines[1]) and len(lines[1]) >= len(lines[0]) - 2:
            yield section
            section, code_indent = _Section(lines[0]), 0
            continue
        is_separator = _UNDERLINE.match(block)  # a line between the head of a page and its body
        if block.strip() == "-[ Footnotes ]-" or is_separator:
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        before = section.blocks[-1] if section.blocks else ""
        if not code_indent and _introduces_code(before) and indent > _indent(before) and not _is_list_or_table(block):
            code_indent = indent
        elif indent < code_indent:
            code_indent = 0
        section.blocks.append(block if code_indent or _is_code(block) else _strip_markup(block))
    yield section


def _pack(blocks: list[str]) -> Iterator[str]:
    """Pack whole blocks up to the target; no passage ends with a block that introduces the next (signature, colon)."""
    passages: list[list[str]] = [[]]
    overlapped = 0  # blocks of the last passage that repeat the end of the one before it
    for block in (piece for whole in blocks for piece in _split(whole)):
        passage = passages[-1]
        kept = len(passage)
        while kept > overlapped and _introduces_next(passage[kept - 1]):
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


def _split(block: str) -> Iterator[str]:
    """Split a block at line ends into pieces of at most `MAX_WORDS` words."""
    piece: list[str] = []
    words = 0
    for line in block.split("\n"):
        if piece and words + len(line.split()) > MAX_WORDS:
            yield "\n".join(piece)
            piece, words = [], 0
        piece.append(line)
        words += len(line.split())
    yield "\n".join(piece)


def _strip_markup(block: str) -> str:
    """Remove markup: the quotes of "literals", the stars of *emphasis* and **strong**, the frames of tables."""
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


def _introduces_next(block: str) -> bool:
    text = block.strip()
    return text.endswith(":") or ("\n" not in text and bool(_SIGNATURE.fullmatch(text)) and not text.endswith("."))


def _indent(block: str) -> int:
    return len(block) - len(block.lstrip())


def _words(blocks: list[str]) -> int:
    return sum(len(block.split()) for block in blocks)
