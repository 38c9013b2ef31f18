"""Which files are meant by what somebody named, and what they hold."""

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import BuildRefused, CollectionError
from runtime.retrieval.collections.sources import DOCUMENT_SUFFIXES
from runtime.retrieval.ingestion.readers import SUFFIXES
from runtime.retrieval.ingestion.sections import Unreadable

MAX_FILES = 1_000_000
MAX_FILE_BYTES = 128 << 20
_KNOWN = (*DOCUMENT_SUFFIXES, *SUFFIXES)


@dataclass(frozen=True, slots=True)
class Found:
    """A file, and its path relative to the sources' root, with slashes: what citations name."""

    path: Path
    source: str

    @property
    def is_lines(self) -> bool:
        """Whether it holds documents, a line each, and no text."""
        return self.source.endswith(DOCUMENT_SUFFIXES)


def root_of(paths: Sequence[Path]) -> Path:
    """The innermost folder that all of these are in; a folder that is named alone is its own."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    folders = [path if path.is_dir() else path.parent for path in absolute]
    return Path(os.path.commonpath(folders))


def find_files(paths: Sequence[Path], root: Path) -> list[Found]:
    """The files named, and those in the folders named and below, in order; none twice.

    In folders only what there is a reader for; nothing hidden, no links to folders. .jsonl is read where it is named.
    Raises `CollectionError` for what is not there, `BuildRefused` for a file that nobody reads, or too many.
    """
    found: dict[str, Found] = {}
    for path in paths:
        absolute = Path(os.path.abspath(path))
        if absolute.is_dir():
            inside = _walk(absolute)
        elif (absolute.exists() or path.suffix) and not path.name.lower().endswith(_KNOWN):
            raise CollectionError(f"{path}: a source ends in {', '.join(_KNOWN)} or .npy")
        elif not absolute.exists():
            raise CollectionError(f"{path}: No such file or directory")
        else:
            inside = [absolute]
        for one in inside:
            source = Path(os.path.relpath(one, root)).as_posix()
            found.setdefault(source, Found(one, source))
            if len(found) > MAX_FILES:
                raise BuildRefused(f"{path}: there are more than {MAX_FILES:,} files, the limit")
    return [found[source] for source in sorted(found)]


def read_bytes(path: Path) -> bytes:
    """A file's content. Raises `Unreadable`; its size is looked at first."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("it is no regular file")
            if status.st_size > MAX_FILE_BYTES:
                raise Unreadable(f"it has {status.st_size:,} bytes, the limit is {MAX_FILE_BYTES:,}")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    if len(content) > MAX_FILE_BYTES:
        raise Unreadable(f"it has more than {MAX_FILE_BYTES:,} bytes, the limit")
    return content


def checksum(found: Found) -> str:
    """SHA-256 of its content. Raises `Unreadable`, also for a name that could not be cited."""
    try:
        found.source.encode()
    except UnicodeEncodeError as error:
        raise Unreadable("its name is not UTF-8") from error
    if not found.is_lines:
        return hashlib.sha256(read_bytes(found.path)).hexdigest()
    try:
        with found.path.open("rb") as file:  # of any size: it is read line by line
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error


def _walk(folder: Path) -> list[Path]:
    files = []
    for directory, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        files += [
            Path(directory, name)
            for name in names
            if name.lower().endswith(SUFFIXES) and not name.startswith((".", "~$"))
        ]
    return files
