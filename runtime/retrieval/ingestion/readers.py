"""Readers by file suffix, and the packages they need."""

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import PurePath

from runtime.errors import BuildRefused
from runtime.retrieval.ingestion.office import read_docx, read_pdf, read_pptx
from runtime.retrieval.ingestion.sections import ParsedFile, Section, UnreadableFile
from runtime.retrieval.ingestion.text import read_html, read_markdown, read_text

_READERS: dict[str, Callable[[bytes], ParsedFile]] = {
    ".md": read_markdown,
    ".markdown": read_markdown,
    ".txt": read_text,
    ".html": read_html,
    ".htm": read_html,
    ".pdf": read_pdf,
    ".docx": read_docx,
    ".pptx": read_pptx,
}
_NEEDED = {".pdf": "pypdf", ".docx": "docx", ".pptx": "pptx"}
SUFFIXES = tuple(_READERS)
PLAIN = (".md", ".markdown", ".txt")
"""Safe to read in this process: time and memory are linear in their size."""


def check_packages(names: Iterable[str]) -> None:
    """Raise `BuildRefused`, with the install command, if a package is missing that one of these files needs."""
    for suffix in {PurePath(name).suffix.lower() for name in names} & set(_NEEDED):
        if importlib.util.find_spec(_NEEDED[suffix]) is None:
            raise BuildRefused(
                f"{suffix} files need a missing package of the extra [documents]: "
                "pip install pypdf python-docx python-pptx"
            )


def read_file(name: str, content: bytes) -> ParsedFile:
    """Return a file's sections. Raises `UnreadableFile`, whatever a library raises for a damaged file."""
    try:
        read = _READERS[PurePath(name).suffix.lower()](content)
    except (UnreadableFile, MemoryError):
        raise
    except Exception as error:  # libraries raise exceptions of any class
        raise UnreadableFile(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}") from error
    sections = [Section(_storable(one.text), _storable(one.heading), one.page) for one in read.sections]
    return ParsedFile(_storable(read.title), sections)


def _storable(text: str) -> str:
    """Replace characters that databases and models do not accept: unpaired surrogates, NUL."""
    return text.encode("utf-8", "replace").decode().replace("\x00", " ")
