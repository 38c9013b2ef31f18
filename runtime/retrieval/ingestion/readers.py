"""Which reader takes which file, and what it needs."""

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import PurePath

from runtime.errors import BuildRefused
from runtime.retrieval.ingestion.html import read_html
from runtime.retrieval.ingestion.office import read_docx, read_pptx
from runtime.retrieval.ingestion.pdf import read_pdf
from runtime.retrieval.ingestion.sections import Read, Unreadable
from runtime.retrieval.ingestion.text import read_markdown, read_text

_READERS: dict[str, Callable[[bytes], Read]] = {
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


def check_packages(names: Iterable[str]) -> None:
    """Raises `BuildRefused`, with what installs it, where a package is missing that one of these files needs."""
    for suffix in {PurePath(name).suffix.lower() for name in names} & set(_NEEDED):
        if importlib.util.find_spec(_NEEDED[suffix]) is None:
            raise BuildRefused(
                f"{suffix} files need a package that is missing, of the extra [documents]: "
                "pip install pypdf python-docx python-pptx"
            )


def read_file(name: str, content: bytes) -> Read:
    """A file's sections. Raises `Unreadable`, whatever a library makes of a file that is none."""
    try:
        return _READERS[PurePath(name).suffix.lower()](content)
    except (Unreadable, MemoryError):
        raise
    except Exception as error:  # of any class, for any file
        raise Unreadable(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}") from error
