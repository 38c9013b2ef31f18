"""What a collection is built from: documents in .jsonl or .jsonl.gz, vectors in .npy. Nothing in them is trusted.

Every error is a `CollectionError` that names the file and the line or row.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.passages import Attributes

DOCUMENT_SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_LINE_BYTES = 4 << 20
MAX_ID_CHARACTERS = 512
MAX_VECTOR_DIM = 16_384
VECTOR_DTYPES = ("float32", "float64", "float16", "uint8")

Progress = Callable[[str, float], None]  # a stage's name, and the part of it that is done, 0..1


def no_progress(stage: str, done: float) -> None:
    """For callers that do not want to hear."""


class _Line(msgspec.Struct):
    id: str | int
    text: str
    title: str | None = None
    attributes: Attributes | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


def read_documents(path: Path, progress: Progress = no_progress) -> Iterator[Document]:
    """The documents of a .jsonl or .jsonl.gz file: a line each, with id (string or integer), text, maybe title and
    attributes.

    Other fields and blank lines are passed over. Reads one line at a time, of at most 4 MiB.
    """
    found = 0
    with _opened(path) as file:
        size = max(path.stat().st_size, 1)
        stream = gzip.GzipFile(fileobj=file) if path.name.endswith(".gz") else file
        number = 0
        while line := _next_line(stream, path, number := number + 1):
            if number % 1000 == 0:
                progress("read", min(file.tell() / size, 1.0))
            if stripped := line.strip():
                found += 1
                yield _document(stripped, f"{path}, line {number}")
    if not found:
        raise CollectionError(f"{path}: there are no documents")
    progress("read", 1.0)


def read_vectors(path: Path) -> NDArray[Any]:
    """The vectors of a .npy file, memory-mapped: [n, d] of float32, float64, float16 or uint8; searched as float32.

    Whether all values are finite is seen by whoever reads them all: `GraphIndex.build`, `GraphIndex.search`.
    """
    vectors = _mapped(path)
    if vectors.ndim != 2 or vectors.dtype.name not in VECTOR_DTYPES or not vectors.dtype.isnative:
        raise CollectionError(
            f"{path}: vectors are a matrix of {', '.join(VECTOR_DTYPES)}, "
            f"not {vectors.dtype} of shape {list(vectors.shape)}"
        )
    rows, dim = vectors.shape
    if rows == 0:
        raise CollectionError(f"{path}: there are no vectors")
    if not 1 <= dim <= MAX_VECTOR_DIM:
        raise CollectionError(f"{path}: vectors have {dim} dimensions, the limits are 1 and {MAX_VECTOR_DIM}")
    return vectors


def read_ids(path: Path) -> NDArray[np.int64]:
    """The ids of a .npy file as int64 [n]: integers, none negative, no two equal."""
    ids = _mapped(path)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise CollectionError(f"{path}: ids are a row of integers, not {ids.dtype} of shape {list(ids.shape)}")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int64).max):
        raise CollectionError(f"{path}: ids are from 0 to 2^63 - 1, these from {ids.min()} to {ids.max()}")
    unique, first = np.unique(ids, return_index=True)
    if len(unique) != len(ids):
        again = int(np.setdiff1d(np.arange(len(ids)), first)[0])
        raise CollectionError(f"{path}, row {again}: the id {ids[again]} was there before: ids must differ")
    return ids.astype(np.int64)


def read_truth(path: Path, queries: int, k: int) -> NDArray[Any]:
    """The true neighbours of a .npy file, nearest first: integers [queries, at least k]."""
    truth = _mapped(path)
    if truth.ndim != 2 or truth.dtype.kind not in "iu" or truth.shape[0] != queries or truth.shape[1] < k:
        raise CollectionError(
            f"{path}: the truth for {queries} queries and k {k} is a matrix of integers with {queries} rows and {k} "
            f"columns or more, not {truth.dtype} of shape {list(truth.shape)}"
        )
    return truth


def _next_line(stream: BinaryIO | gzip.GzipFile, path: Path, number: int) -> bytes:
    try:
        line = stream.readline(MAX_LINE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CollectionError(f"{path}, line {number}: the gzip stream is damaged: {error}") from error
    if len(line) > MAX_LINE_BYTES:
        raise CollectionError(f"{path}, line {number}: longer than {MAX_LINE_BYTES:,} bytes")
    return line


def _document(line: bytes, where: str) -> Document:
    try:
        found = _decode_line(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CollectionError(f"{where}: {explain_decode_error(line, error)}") from error
    identity = str(found.id)
    if not 1 <= len(identity) <= MAX_ID_CHARACTERS:
        raise CollectionError(f"{where}: an id has 1 to {MAX_ID_CHARACTERS} characters, not {len(identity)}")
    if not found.text.strip():
        raise CollectionError(f"{where}: the text of {identity!r} is empty")
    return Document(identity, found.title or "", found.text, found.attributes or {})


def explain_decode_error(line: bytes, error: Exception) -> str:
    """What is wrong with a line; msgspec's own words mislead at an unpaired surrogate ("truncated")."""
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "not valid UTF-8: an unpaired surrogate"
    except (ValueError, RecursionError):
        pass
    return str(error)


def _mapped(path: Path) -> NDArray[Any]:
    with _opened(path):
        pass
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header goes to Python's own parser, with any of its errors
        raise CollectionError(f"{path} is not a readable .npy file: {error}") from error
    if not isinstance(array, np.ndarray):  # an .npz archive, by its content
        array.close()
        raise CollectionError(f"{path} is an archive of arrays, not a .npy file")
    return array


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise CollectionError(f"{path}: {error.strerror or error}") from error
