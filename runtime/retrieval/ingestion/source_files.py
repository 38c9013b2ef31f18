"""Discovery of source files, their content and checksums."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from runtime.errors import BuildRefused, CollectionError
from runtime.files import open_regular
from runtime.retrieval.ingestion.build_inputs import DOCUMENT_SUFFIXES
from runtime.retrieval.ingestion.readers import SUFFIXES
from runtime.retrieval.ingestion.sections import UnreadableFile

MAX_FILES = 1_000_000
MAX_FILE_BYTES = 128 << 20
SUPPORTED = (*DOCUMENT_SUFFIXES, *SUFFIXES)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file. `source`: its path relative to the sources' root, with slashes, as citations show it."""

    path: Path
    source: str
    folder: Path | None = None
    """The folder in which it was found; a symbolic link must not lead out of it."""

    @property
    def is_jsonl(self) -> bool:
        """Whether it contains one document per line instead of text."""
        return self.source.endswith(DOCUMENT_SUFFIXES)


def common_root(paths: Sequence[Path]) -> Path:
    """Return the innermost folder that contains all paths; of a single folder the folder itself."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    folders = [path if path.is_dir() else path.parent for path in absolute]
    return Path(os.path.commonpath(folders))


def find_files(paths: Sequence[Path], root: Path, unread: dict[str, str]) -> list[SourceFile]:
    """Return the given files and the files below the given folders, sorted, without duplicates.

    In folders only files with a supported suffix, no hidden ones, no links to folders; .jsonl files must be given
    explicitly. Folders that cannot be listed are added to `unread`, with the reason, by their path relative to `root`.
    Raises `CollectionError` for missing paths and unsupported files, `BuildRefused` for too many files.
    """
    files: dict[str, SourceFile] = {}
    for path in paths:
        absolute = Path(os.path.abspath(path))
        folder = absolute if absolute.is_dir() else None
        if folder is not None:
            inside = _walk(folder, lambda at, reason: unread.setdefault(_relative(at, root), reason))
        elif (absolute.exists() or path.suffix) and not path.name.lower().endswith(SUPPORTED):
            raise CollectionError(f"{path}: supported sources end in {', '.join(SUPPORTED)} or .npy")
        elif not absolute.exists():
            raise CollectionError(f"{path}: No such file or directory")
        else:
            inside = [absolute]
        for inside_path in inside:
            source = _relative(inside_path, root)
            files.setdefault(source, SourceFile(inside_path, source, folder))
            if len(files) > MAX_FILES:
                raise BuildRefused(f"{path}: there are more than {MAX_FILES:,} files, the limit")
    return [files[source] for source in sorted(files)]


def read_bytes(source_file: SourceFile) -> bytes:
    """Return a file's content; its size is checked first. Raises `UnreadableFile`."""
    with _opened(source_file, MAX_FILE_BYTES) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:  # it grew
        raise UnreadableFile(f"it has more than {MAX_FILE_BYTES:,} bytes, the limit")
    return content


def checksum(source_file: SourceFile) -> str:
    """Return the SHA-256 of a file's content. Raises `UnreadableFile`, also for a name that is not UTF-8."""
    if not source_file.is_jsonl:
        return hashlib.sha256(read_bytes(source_file)).hexdigest()
    with _opened(source_file) as file:  # without size limit: it is read line by line
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _opened(source_file: SourceFile, max_bytes: int | None = None) -> Iterator[BufferedReader]:
    """Open a regular file that is not a link out of its folder. Raises `UnreadableFile`."""
    try:
        source_file.source.encode()
    except UnicodeEncodeError as error:
        raise UnreadableFile("its name is not UTF-8") from error
    try:
        with open(open_regular(source_file.path, max_bytes=max_bytes), "rb") as file:
            if source_file.folder is not None:
                opened = Path(f"/proc/self/fd/{file.fileno()}").resolve()  # the opened file: the name may have changed
                if not opened.is_relative_to(source_file.folder.resolve()):
                    raise UnreadableFile("it is a link to a file outside of the folder: specify that file itself")
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
