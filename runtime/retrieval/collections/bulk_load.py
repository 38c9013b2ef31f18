"""Making collections: by a bulk load of documents or vectors into one segment a shard, or empty."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpu import GpuError
from gpu.build.params import BuildDevice, BuildParams, Progress, check_within, no_progress
from gpu.index.rows import MAX_DIM
from runtime.errors import BuildRefused, CollectionBusy, CollectionError, InvalidDocument, OutputRefused
from runtime.retrieval.attributes.schema import AttributeType, Schema, extend_schema
from runtime.retrieval.collections.description import (
    DESCRIPTION,
    DOCUMENTS,
    FORMAT,
    MANIFEST,
    MAX_SHARDS,
    VERSION,
    Description,
    Manifest,
    SegmentInfo,
    encode_with_checksum,
    make_folders,
)
from runtime.retrieval.collections.directory import atomic_directory
from runtime.retrieval.collections.disk import Disk
from runtime.retrieval.collections.documents import Document, DocumentStore, Sources
from runtime.retrieval.collections.log import begin_log_file
from runtime.retrieval.collections.segment import index_errors
from runtime.retrieval.collections.segment_build import index_and_seal, write_documents
from runtime.retrieval.embedding.bulk import embed_passages, list_size
from runtime.retrieval.embedding.embedder import Embedder, EmbedderSpec, Vectors, embedder_name, embedding_text
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER, embedder_dim, load_embedder

Metric = Literal["cosine", "l2", "ip"]
Dtype = Literal["float32", "float16"]
Source = Iterable[Document] | NDArray[Any]
KnownVectors = Callable[[], tuple[NDArray[np.int64], Vectors]]
_RETRY_S = 0.01


def build(
    source: Source,
    out: Path,
    *,
    metric: Metric = "cosine",
    embedder: EmbedderSpec | None = None,
    demanded: str | None = None,
    schema: Schema | None = None,
    model: Embedder | None = None,
    sources: Sources | None = None,
    known_vectors: KnownVectors | None = None,
    vectors: NDArray[Any] | None = None,
    ids: NDArray[np.int64] | None = None,
    degree: int = 32,
    dtype: Dtype = "float32",
    neighbor_codes: bool = True,
    code_bits: int = 0,
    shards: int = 1,
    seed: int = 0,
    threads: int = 1,
    device: BuildDevice = "cpu",
    force: bool = False,
    locked: bool = False,
    disk: Disk | None = None,
    progress: Progress = no_progress,
) -> None:
    """Build a collection at `out`, atomically.

    source: documents, or vectors [n, d] of float32, float64, float16 or uint8; of no vectors, an empty collection.
    embedder: the embedder of the documents (None: all-minilm-l6-v2). For vectors, the embedder that made them, so
        that queries may be texts.
    demanded: an attribute that the filter of every search must bind. schema: attributes whose types are given.
    model: that embedder, if it is already loaded (`choose_embedder`).
    sources: the files that the documents are read from; filled in while they are read.
    known_vectors: called when all documents are read; returns the rows that already have a vector, and the vectors.
    vectors: the documents' vectors by row, if they are already known.
    ids: int64 [n], the ids that a search returns in place of row numbers, for bare vectors only.
    shards: number of shards, each for one pool worker: row i goes to shard i mod shards and keeps its id.
    degree, dtype, neighbor_codes, code_bits, seed, device: see `GraphIndex.build`. threads: cores to use.
    force: replace an existing collection at `out`. locked: the caller holds its writer's lock. disk: of the files that
        begin the collection.
    progress: called with a stage's name and the fraction of it that is done, 0..1.

    Raises `BuildRefused` for an invalid argument, before reading (before embedding, if it depends on the number of
    rows); `CollectionError` for an invalid source or `out`, `ModelError` for the embedder.
    """
    check_arguments(BuildParams, metric, degree, dtype, code_bits, seed, threads, device)
    check_arguments(check_within, "shards", shards, 1, MAX_SHARDS)
    if embedder is not None:
        embedder_dim(embedder)
    matrix, documents = (source, None) if isinstance(source, np.ndarray) else (vectors, source)
    if documents is None and vectors is not None:
        raise BuildRefused("the source contains vectors: give separate vectors only with documents")
    if documents is not None and ids is not None:
        raise BuildRefused("documents have their own ids: give ids only with bare vectors")
    if device == "cuda":
        _check_gpu_build()
    empty = documents is None and matrix is not None and matrix.ndim == 2 and len(matrix) == 0
    if matrix is None:
        embedder = embedder or DEFAULT_EMBEDDER
        # Loaded before the documents are read: it may be missing, and reading may take long.
        model = model or load_embedder(embedder, for_build=True)
    else:
        _check_embedder(embedder, matrix)
        if empty:
            check_arguments(check_within, "dim", matrix.shape[1], 1, MAX_DIM)
        else:
            _check_shards(shards, len(matrix))
    declared = ({} if demanded is None else {demanded: AttributeType.STRING}) | dict(schema or {})
    disk = disk or Disk()
    with atomic_directory(out, replace=force, locked=locked) as building:
        make_folders(building)
        folders = [] if empty else [building / "segments" / str(shard) for shard in range(shards)]
        for folder in folders:
            folder.mkdir()
        schema = dict(declared)
        if documents is not None:
            with _written_documents(building, folders, _extending(schema, documents), schema, sources) as store:
                if matrix is None:
                    assert model is not None, "loaded above"
                    matrix = _embed(store, model, known_vectors, threads, progress)
                elif len(matrix) != store.last_row + 1:
                    raise CollectionError(f"{len(matrix)} vectors do not match {store.last_row + 1} documents")
        assert matrix is not None, "given, or embedded"
        if ids is None and shards > 1:
            ids = np.arange(len(matrix))
        if ids is not None and ids.shape != (len(matrix),):
            raise CollectionError(f"ids have shape {list(ids.shape)}; they need shape [{len(matrix)}]")
        segments = []
        for shard, folder in enumerate(folders):
            index, info = index_and_seal(
                disk,
                folder,
                shard,
                matrix[shard::shards],
                _shard_progress(progress, shard, shards),
                metric=metric,
                degree=degree,
                dtype=dtype,
                neighbor_codes=neighbor_codes,
                code_bits=code_bits,
                ids=None if ids is None else ids[shard::shards],
                seed=seed,
                threads=threads,
                device=device,
            )
            segments.append(info)
            degree = index.degree
        next_row = len(matrix) if ids is None else 1 + int(ids.max(initial=-1))
        begin_collection(
            disk, building, segments, next_row, schema, dim=matrix.shape[1], metric=metric, dtype=dtype, degree=degree,
            embedder=embedder, shards=shards, demanded=demanded, declared=declared,
        )  # fmt: skip


def create(directory: Path, dim: int, **options: Any) -> None:
    """Create an empty collection of vectors of `dim` dimensions; `options` are those of `build`, and it raises as that
    does."""
    check_arguments(check_within, "dim", dim, 1, MAX_DIM)
    build(np.empty((0, dim), np.float32), directory, **options)


def ensure(directory: Path, dim: int, **options: Any) -> None:
    """Create an empty collection unless it is there, as several processes may at once; `options` are those of `create`.

    Raises as `create`, but nothing if something else is there, which opening it reports.
    """
    while not os.path.lexists(directory):
        try:
            create(directory, dim, **options)
        except CollectionBusy:  # another process creates it
            time.sleep(_RETRY_S)
        except OutputRefused:
            if not os.path.lexists(directory):
                raise


def begin_collection(
    disk: Disk, directory: Path, segments: list[SegmentInfo], next_row: int, schema: Schema, **described: Any
) -> None:
    """Complete a collection whose folders and segments are there, with an empty log. `described`: the fields of its
    `Description`. Raises `OSError`."""
    description = Description(format=FORMAT, version=VERSION, sha256="", **described).identified(segments)
    begin_log_file(disk, directory, description.identity, 0)
    manifest = Manifest(0, segments, 0, next_row, len(segments), dict(schema))
    disk.write_file(directory / MANIFEST, encode_with_checksum(manifest))
    disk.write_file(directory / DESCRIPTION, encode_with_checksum(description))


@contextlib.contextmanager
def _written_documents(
    building: Path, folders: Sequence[Path], documents: Iterable[Document], schema: Schema, sources: Sources | None
) -> Iterator[DocumentStore]:
    """Write documents into the folders of the shards; yield all of them."""
    if len(folders) == 1:
        write_documents(folders[0], documents, schema, sources)
        with DocumentStore(folders[0] / DOCUMENTS) as store:
            yield store
        return
    whole = building / DOCUMENTS
    DocumentStore.write(whole, documents, sources=sources)
    with DocumentStore(whole) as store:
        _check_shards(len(folders), store.last_row + 1)
        for shard, folder in enumerate(folders):
            own = (document for document in store.all() if document.row % len(folders) == shard)
            write_documents(folder, own, schema, sources)
        yield store
    whole.unlink()


def _extending(schema: dict[str, AttributeType], documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents, and add their attributes to a schema. Raises `CollectionError` if an attribute's type
    differs between them."""
    for number, document in enumerate(documents, 1):
        if document.attributes:
            try:
                schema |= extend_schema(schema, document.attributes)
            except InvalidDocument as error:
                raise CollectionError(f"document {number}, {document.id!r}: {error.message}") from error
        yield document


def _shard_progress(progress: Progress, shard: int, shards: int) -> Progress:
    """Scale the progress of one shard to the progress of all."""
    return lambda stage, fraction: progress(stage, (shard + fraction) / shards)


def check_arguments(check: Callable[..., object], *arguments: object) -> None:
    """Run a check of the index on arguments; raise its `GpuError` as `BuildRefused`."""
    try:
        check(*arguments)
    except GpuError as error:
        raise BuildRefused(str(error)) from error


def _check_shards(shards: int, rows: int) -> None:
    if shards > rows:
        raise BuildRefused(f"shards is {shards}, outside 1..{rows}: each shard needs one of the {rows} vectors")


def _check_gpu_build() -> None:
    from gpu.build.graph import check_gpu_build  # compiled code that only this device needs

    with index_errors():
        check_gpu_build()


def _embed(
    documents: DocumentStore, model: Embedder, known_vectors: KnownVectors | None, threads: int, progress: Progress
) -> Vectors:
    vectors = np.empty((documents.last_row + 1, model.dim), np.float32)
    missing = np.arange(documents.last_row + 1)
    if known_vectors is not None:
        rows, known = known_vectors()
        vectors[rows] = known
        missing = np.setdiff1d(missing, rows)
    size, done = list_size(model, threads), 0
    texts = (
        [embedding_text(document.title, document.text) for document in documents.get(missing[begin : begin + size])]
        for begin in range(0, len(missing), size)
    )
    progress("embed", 0.0)
    with contextlib.closing(embed_passages(model, texts, threads)) as embedded:
        for batch in embedded:
            vectors[missing[done : done + len(batch)]] = batch
            done += len(batch)
            progress("embed", done / len(missing))
    progress("embed", 1.0)
    return vectors


def _check_embedder(embedder: EmbedderSpec | None, vectors: NDArray[Any]) -> None:
    if embedder is not None and vectors.shape[1:] != (embedder_dim(embedder),):
        raise CollectionError(
            f"vectors of shape {list(vectors.shape)} are not from {embedder_name(embedder)}, "
            f"whose vectors have {embedder_dim(embedder)} dimensions"
        )
