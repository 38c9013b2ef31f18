"""Readers of the input files of a build: documents in .jsonl or .jsonl.gz, vectors in .npy. The input is untrusted.

Every error is a `CollectionError` that names the file and the line or row.
"""

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from numpy.typing import NDArray

from gpu.build.params import Progress, no_progress
from runtime.errors import CollectionError
from runtime.files import check_regular
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.passages import Attributes

DOCUMENT_SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_LINE_BYTES = 4 << 20
MAX_ID_CHARACTERS = 512
MAX_VECTOR_DIM = 16_384
VECTOR_DTYPES = ("float32", "float64", "float16", "uint8")


class _Line(msgspec.Struct):
    id: str | int
    text: str
    title: str | None = None
    attributes: Attributes | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


def read_source(path: Path, progress: Progress = no_progress) -> Iterable[Document] | NDArray[Any]:
    """Return the documents of a .jsonl or .jsonl.gz file, or the vectors of a .npy file."""
    if path.name.endswith(".npy"):
        return read_vectors(path)
    if not path.name.endswith(DOCUMENT_SUFFIXES):
        raise CollectionError(f"{path}: supported sources end in {', '.join(DOCUMENT_SUFFIXES)} or .npy")
    return read_documents(path, progress)


def read_documents(path: Path, progress: Progress = no_progress) -> Iterator[Document]:
    """Yield the documents of a .jsonl or .jsonl.gz file, one a line: id (string or integer), text, optional title and
    attributes.

    Other fields and blank lines are ignored. Reads one line at a time, of at most 4 MiB.
    """
    count = 0
    with _opened(path) as file:
        size = max(path.stat().st_size, 1)
        stream = gzip.GzipFile(fileobj=file) if path.name.endswith(".gz") else file
        number = 0
        while line := _next_line(stream, path, number := number + 1):
            if number % 1000 == 0:
                progress("read", min(file.tell() / size, 1.0))
            if stripped := line.strip():
                count += 1
                yield _document(stripped, f"{path}, line {number}")
    if not count:
        raise CollectionError(f"{path} contains no documents")
    progress("read", 1.0)


def read_vectors(path: Path) -> NDArray[Any]:
    """Memory-map the vectors of a .npy file: [n, d] of float32, float64, float16 or uint8; searched as float32.

    Does not check for non-finite values: `GraphIndex.build` and `GraphIndex.search` do.
    """
    vectors = _mapped(path)
    if vectors.ndim != 2 or vectors.dtype.name not in VECTOR_DTYPES or not vectors.dtype.isnative:
        raise CollectionError(
            f"{path} has {vectors.dtype} of shape {list(vectors.shape)}; vectors are a matrix of "
            f"{', '.join(VECTOR_DTYPES)}"
        )
    rows, dim = vectors.shape
    if rows == 0:
        raise CollectionError(f"{path} contains no vectors")
    if not 1 <= dim <= MAX_VECTOR_DIM:
        raise CollectionError(f"{path}: vectors have {dim} dimensions, outside 1..{MAX_VECTOR_DIM}")
    return vectors


def read_ids(path: Path) -> NDArray[np.int64]:
    """Read the ids of a .npy file as int64 [n]: unique non-negative integers."""
    ids = _mapped(path)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise CollectionError(f"{path} has {ids.dtype} of shape {list(ids.shape)}; ids are integers of shape [n]")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int64).max):
        raise CollectionError(f"{path}: ids range from {ids.min()} to {ids.max()}, outside 0..2^63 - 1")
    unique, first = np.unique(ids, return_index=True)
    if len(unique) != len(ids):
        duplicate = int(np.setdiff1d(np.arange(len(ids)), first)[0])
        raise CollectionError(f"{path}, row {duplicate}: duplicate id {ids[duplicate]}")
    return ids.astype(np.int64)


def read_truth(path: Path, queries: int, k: int) -> NDArray[Any]:
    """Read the true neighbours of a .npy file, nearest first: integers [queries, at least k]."""
    truth = _mapped(path)
    if truth.ndim != 2 or truth.dtype.kind not in "iu" or truth.shape[0] != queries or truth.shape[1] < k:
        raise CollectionError(
            f"{path} has {truth.dtype} of shape {list(truth.shape)}; the truth for {queries} queries and k {k} is a "
            f"matrix of integers with {queries} rows and at least {k} columns"
        )
    return truth


def _next_line(stream: BinaryIO | gzip.GzipFile, path: Path, number: int) -> bytes:
    try:
        line = stream.readline(MAX_LINE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CollectionError(f"{path}, line {number}: the gzip stream is damaged: {error}") from error
    if len(line) > MAX_LINE_BYTES:
        raise CollectionError(f"{path}, line {number}: longer than {MAX_LINE_BYTES:,} bytes")
    return line.removeprefix(BOM_UTF8) if number == 1 else line


def _document(line: bytes, where: str) -> Document:
    try:
        fields = _decode_line(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CollectionError(f"{where}: {explain_decode_error(line, error)}") from error
    identity = str(fields.id)
    if not 1 <= len(identity) <= MAX_ID_CHARACTERS:
        raise CollectionError(f"{where}: an id has 1 to {MAX_ID_CHARACTERS} characters, not {len(identity)}")
    if not fields.text.strip():
        raise CollectionError(f"{where}: document {identity!r} has an empty text")
    return Document(identity, fields.title or "", fields.text, fields.attributes or {})


def explain_decode_error(line: bytes, error: Exception) -> str:
    """Describe a line's decoding error; msgspec misleadingly calls an unpaired surrogate "truncated"."""
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "not valid UTF-8: an unpaired surrogate"
    except (ValueError, RecursionError):
        pass
    return str(error)


def _mapped(path: Path) -> NDArray[Any]:
    try:
        check_regular(path)
    except OSError as error:
        raise CollectionError(f"{path}: {error.strerror or error}") from error
    try:
        with path.open("rb") as file:
            begin = file.read(len(MAGIC_PREFIX))
        if begin[:2] != b"PK" and begin != MAGIC_PREFIX:  # numpy would take it for a pickle, and advise to allow it
            raise ValueError("it does not begin as one; write it with numpy.save")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy parses the header with Python's parser, so a damaged one may raise any error
        raise CollectionError(f"{path} is not a readable .npy file: {error}") from error
    if not isinstance(array, np.ndarray):  # its content is an .npz archive
        array.close()
        raise CollectionError(f"{path} is an archive of arrays, not a .npy file")
    return array


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise CollectionError(f"{path}: {error.strerror or error}") from error
