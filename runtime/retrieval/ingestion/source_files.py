"""Which files are meant by what somebody named, and what they hold."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from runtime.errors import BuildRefused, CollectionError
from runtime.retrieval.collections.sources import DOCUMENT_SUFFIXES
from runtime.retrieval.ingestion.readers import SUFFIXES
from runtime.retrieval.ingestion.sections import UnreadableFile

MAX_FILES = 1_000_000
MAX_FILE_BYTES = 128 << 20
_KNOWN = (*DOCUMENT_SUFFIXES, *SUFFIXES)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, and its path relative to the sources' root, with slashes: what citations name."""

    path: Path
    source: str
    folder: Path | None = None
    """The folder that was named, of a file that was found in one: no link may lead out of it."""

    @property
    def is_lines(self) -> bool:
        """Whether it holds documents, a line each, and no text."""
        return self.source.endswith(DOCUMENT_SUFFIXES)


def common_root(paths: Sequence[Path]) -> Path:
    """The innermost folder that all of these are in; a folder that is named alone is its own."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    folders = [path if path.is_dir() else path.parent for path in absolute]
    return Path(os.path.commonpath(folders))


def find_files(paths: Sequence[Path], root: Path, unread: dict[str, str]) -> list[SourceFile]:
    """The files named, and those in the folders named and below, in order; none twice.

    In folders only what there is a reader for; nothing hidden, no links to folders. .jsonl is read where it is named.
    Folders that cannot be looked into are put into `unread`, with the reason, by their path relative to `root`.
    Raises `CollectionError` for what is not there, `BuildRefused` for a file that nobody reads, or too many.
    """
    found: dict[str, SourceFile] = {}
    for path in paths:
        absolute = Path(os.path.abspath(path))
        folder = absolute if absolute.is_dir() else None
        if folder is not None:
            inside = _walk(folder, lambda at, reason: unread.setdefault(_relative(at, root), reason))
        elif (absolute.exists() or path.suffix) and not path.name.lower().endswith(_KNOWN):
            raise CollectionError(f"{path}: a source ends in {', '.join(_KNOWN)} or .npy")
        elif not absolute.exists():
            raise CollectionError(f"{path}: No such file or directory")
        else:
            inside = [absolute]
        for one in inside:
            source = _relative(one, root)
            found.setdefault(source, SourceFile(one, source, folder))
            if len(found) > MAX_FILES:
                raise BuildRefused(f"{path}: there are more than {MAX_FILES:,} files, the limit")
    return [found[source] for source in sorted(found)]


def read_bytes(found: SourceFile) -> bytes:
    """A file's content. Raises `UnreadableFile`; its size is looked at first."""
    with _opened(found) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise UnreadableFile(f"it has {size:,} bytes, the limit is {MAX_FILE_BYTES:,}")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise UnreadableFile(f"it has more than {MAX_FILE_BYTES:,} bytes, the limit")
    return content


def checksum(found: SourceFile) -> str:
    """SHA-256 of its content. Raises `UnreadableFile`, also for a name that could not be cited."""
    if not found.is_lines:
        return hashlib.sha256(read_bytes(found)).hexdigest()
    with _opened(found) as file:  # of any size: it is read line by line
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _opened(found: SourceFile) -> Iterator[BufferedReader]:
    """The file, if it is a regular one that no link outside of its folder stands for. Raises `UnreadableFile`."""
    try:
        found.source.encode()
    except UnicodeEncodeError as error:
        raise UnreadableFile("its name is not UTF-8") from error
    try:
        # A pipe without a writer would be waited for without O_NONBLOCK, which says nothing to a file.
        with os.fdopen(os.open(found.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnreadableFile("it is no regular file")
            if found.folder is not None:
                opened = Path(f"/proc/self/fd/{file.fileno()}").resolve()  # not by its name: that may have changed
                if not opened.is_relative_to(found.folder.resolve()):
                    raise UnreadableFile("it is a link to a file outside of the folder: name that file itself")
            yield file
    except OSError as error:
        raise UnreadableFile(error.strerror or str(error)) from error


def _relative(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def _walk(folder: Path, unread: Callable[[Path, str], object]) -> list[Path]:
    files = []
    for directory, below, names in os.walk(folder, onerror=lambda e: unread(Path(e.filename), e.strerror or str(e))):
        below[:] = sorted(name for name in below if not name.startswith("."))
        files += [
            Path(directory, name)
            for name in names
            if name.lower().endswith(SUFFIXES) and not name.startswith((".", "~$"))
        ]
    return files
