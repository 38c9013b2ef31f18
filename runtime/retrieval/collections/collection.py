"""A built collection: an index and the documents of its vectors, in one immutable directory.

Collection.build(Path("passages.jsonl"), Path("docs"))
with Collection.open(Path("docs")) as docs:
    ids, distances = docs.search(load_embedder(docs.embedder).embed(["…"]), k=4)
    passages = docs.documents.get(ids[0])
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu import GpuError, GraphIndex
from gpu.build.params import BuildDevice, BuildParams, check_within
from gpu.index.storage import CODE_FILES
from runtime.errors import BuildRefused, CollectionError
from runtime.retrieval.collections.attributes import AttributeCollector
from runtime.retrieval.collections.checksums import open_consistent
from runtime.retrieval.collections.directory import atomic_directory
from runtime.retrieval.collections.documents import Document, DocumentStore, Sources
from runtime.retrieval.collections.keyword_index import KeywordIndex
from runtime.retrieval.collections.manifest import (
    ATTRIBUTES,
    DOCUMENTS,
    INDEX,
    KEYWORDS,
    MAX_SHARDS,
    Manifest,
    checksum_file,
    has_checksum,
    index_folders,
    read_manifest,
    write_manifest,
)
from runtime.retrieval.collections.sources import (
    DOCUMENT_SUFFIXES,
    Progress,
    no_progress,
    read_documents,
    read_ids,
    read_vectors,
)
from runtime.retrieval.embedding.embedder import Embedder, EmbedderSpec, Vectors, embedder_name, embedding_text
from runtime.retrieval.embedding.loading import DEFAULT_EMBEDDER, embedder_dim, load_embedder
from runtime.retrieval.neighbors import merge_neighbors

Metric = Literal["cosine", "l2", "ip"]
Dtype = Literal["float32", "float16", "int8"]
Source = Path | Iterable[Document] | NDArray[Any]
KnownVectors = Callable[[], tuple[NDArray[np.int64], Vectors]]
_EMBED_BATCH = 64  # texts a thread between two progress reports


@dataclass(frozen=True)
class CollectionInfo:
    """Description of a collection, read without opening its index.

    `index_bytes`, `document_bytes` and `keyword_bytes` are sizes on disk; `code_bytes` is the part of `index_bytes`
    that neighbour codes take. 0 for parts that the collection does not have.
    """

    directory: Path
    size: int
    dim: int
    metric: str
    dtype: str
    degree: int
    shards: int
    embedder: EmbedderSpec | None
    index_bytes: int
    document_bytes: int
    keyword_bytes: int = 0
    code_bytes: int = 0


class Collection:
    """An open collection, read-only: any number of processes and threads may use it."""

    def __init__(
        self,
        indexes: Sequence[GraphIndex],
        documents: DocumentStore | None,
        embedder: EmbedderSpec | None,
        identity: str,
    ) -> None:
        """Use `open`."""
        self.shards = tuple(indexes)  # one index, or one a shard
        self.documents = documents  # by row, which is the id in the indexes; None in a collection of bare vectors
        self.embedder = embedder  # None: queries must be vectors
        self.identity = identity  # see `Manifest.identity`

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Map a collection into memory. Checks the sizes of its files, not their contents: see `verify`.

        Raises `CollectionError` that names the missing, foreign or damaged file.
        """
        return open_consistent(directory, lambda manifest: cls._open(directory, manifest), cls.close)

    @classmethod
    def _open(cls, directory: Path, manifest: Manifest) -> Self:
        with index_errors():
            indexes = [GraphIndex.load(directory / folder) for folder in manifest.indexes]
        size = sum(index.size for index in indexes)
        if size != manifest.size or {(i.dim, i.metric) for i in indexes} != {(manifest.dim, manifest.metric)}:
            raise CollectionError(f"{directory / INDEX} is not the index that {directory}'s manifest describes")
        documents = DocumentStore.open(directory / DOCUMENTS, size) if DOCUMENTS in manifest.files else None
        return cls(indexes, documents, manifest.embedder, manifest.identity)

    @property
    def index(self) -> GraphIndex:
        """The index of an unsharded collection. Raises `CollectionError` for a sharded one."""
        if len(self.shards) > 1:
            raise CollectionError(f"the collection has {len(self.shards)} shards, each with an index of its own")
        return self.shards[0]

    @property
    def dim(self) -> int:
        return self.shards[0].dim

    @property
    def metric(self) -> str:
        return self.shards[0].metric

    def search(
        self,
        queries: NDArray[Any],
        k: int = 10,
        top_m: int = 64,
        search_width: int = 1,
        patience: int | None = None,
        threads: int = 1,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Search all shards; parameters and result as of `GraphIndex.search`."""
        with index_errors():
            found = [index.search(queries, k, top_m, search_width, patience, threads) for index in self.shards]
        return found[0] if len(found) == 1 else merge_neighbors(found, k)

    def vectors(self, rows: NDArray[np.int64]) -> Vectors:
        """Return the vectors of these rows, float32 [n, d], in the precision of the index."""
        return gather_vectors(self.shards, rows)

    def close(self) -> None:
        """Close the document store; the index's memory is freed with its last reference."""
        if self.documents is not None:
            self.documents.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def info(directory: Path) -> CollectionInfo:
        """Describe a collection. Raises `CollectionError` as `open` does."""
        manifest = read_manifest(directory)
        folders = [directory / folder for folder in manifest.indexes]
        try:
            files = [(path.name, path.stat().st_size) for folder in folders for path in folder.iterdir()]
        except OSError as error:
            raise CollectionError(f"{error.filename} cannot be read: {error.strerror}") from error
        return CollectionInfo(
            directory=directory,
            size=manifest.size,
            dim=manifest.dim,
            metric=manifest.metric,
            dtype=manifest.dtype,
            degree=manifest.degree,
            shards=len(manifest.indexes),
            embedder=manifest.embedder,
            index_bytes=sum(size for _, size in files),
            document_bytes=manifest.files[DOCUMENTS].bytes if DOCUMENTS in manifest.files else 0,
            keyword_bytes=manifest.files[KEYWORDS].bytes if KEYWORDS in manifest.files else 0,
            code_bytes=sum(size for name, size in files if name in CODE_FILES),
        )

    @staticmethod
    def verify(directory: Path) -> None:
        """Read every file and compare its checksum. Raises `CollectionError` that names the damaged file."""
        manifest = read_manifest(directory)
        for name, checksum in manifest.files.items():
            if not has_checksum(directory / name, checksum):
                raise CollectionError(f"{directory / name} is damaged: its checksum is not the one it was built with")
        with index_errors():
            for folder in manifest.indexes:
                GraphIndex.load(directory / folder).verify()
        Collection.open(directory).close()

    @staticmethod
    def build(
        source: Source,
        out: Path,
        *,
        metric: Metric = "cosine",
        embedder: EmbedderSpec | None = None,
        model: Embedder | None = None,
        sources: Sources | None = None,
        known_vectors: KnownVectors | None = None,
        vectors: Path | NDArray[Any] | None = None,
        ids: Path | NDArray[np.int64] | None = None,
        degree: int = 32,
        dtype: Dtype = "float32",
        neighbor_codes: bool | None = None,
        code_bits: int = 0,
        shards: int = 1,
        seed: int = 0,
        threads: int = 1,
        device: BuildDevice = "cpu",
        force: bool = False,
        progress: Progress = no_progress,
    ) -> None:
        """Build a collection at `out`, atomically.

        source: a path (.jsonl, .jsonl.gz or .npy), documents, or vectors [n, d] of float32, float16 or uint8.
        embedder: the embedder of the documents (None: all-minilm-l6-v2). For vectors, the embedder that made them, so
            that queries may be texts.
        model: that embedder, if it is already loaded (`choose_embedder`).
        sources: the files that the documents are read from; filled in while they are read.
        known_vectors: called when all documents are read; returns the rows that already have a vector, and the vectors.
        vectors: the documents' vectors by row, if they are already known; may be a .npy file.
        ids: int64 [n], the ids that a search returns in place of row numbers, for bare vectors only; may be a file.
        shards: number of shards, each for one pool worker: row i goes to shard i mod shards and keeps its id.
        degree, dtype, neighbor_codes, code_bits, seed, device: see `GraphIndex.build`; neighbour codes are on by
            default, except with int8. threads: cores to use.
        force: replace an existing collection at `out`.
        progress: called with a stage's name and the fraction of it that is done, 0..1.

        Raises `BuildRefused` for an invalid argument, before reading (before embedding, if it depends on the number of
        rows); `CollectionError` for an invalid source or `out`, `ModelError` for the embedder.
        """
        codes = dtype != "int8" if neighbor_codes is None else neighbor_codes
        check_arguments(BuildParams, metric, degree, dtype, codes, code_bits, seed, threads, device)
        check_arguments(check_within, "shards", shards, 1, MAX_SHARDS)
        if embedder is not None:
            embedder_dim(embedder)
        bare = _read_bare_vectors(source)
        if bare is not None and vectors is not None:
            raise BuildRefused("the source contains vectors: give separate vectors only with documents")
        if bare is None and ids is not None:
            raise BuildRefused("documents have their own ids: give ids only with bare vectors")
        if device == "cuda":
            _check_gpu_build()
        given = read_vectors(vectors) if isinstance(vectors, Path) else vectors if bare is None else bare
        if given is not None:
            _check_embedder(embedder, given)
            _check_shards(shards, len(given))
        own_ids = read_ids(ids) if isinstance(ids, Path) else ids
        columns = AttributeCollector()
        with atomic_directory(out, replace=force) as building:
            if bare is not None:
                matrix = bare
            elif given is not None:
                matrix = given
                read = columns.collect(_documents(source, progress))
                with DocumentStore.create(building / DOCUMENTS, read) as documents:
                    if len(matrix) != documents.size:
                        raise CollectionError(f"{len(matrix)} vectors do not match {documents.size} documents")
                    KeywordIndex.create(building / KEYWORDS, documents.texts())
            else:
                embedder = embedder or DEFAULT_EMBEDDER
                # Loaded before the documents are read: it may be missing, and reading may take long.
                model = model or load_embedder(embedder, threads=threads, for_build=True)
                read = columns.collect(_documents(source, progress))
                with DocumentStore.create(building / DOCUMENTS, read, sources=sources) as documents:
                    _check_shards(shards, documents.size)
                    KeywordIndex.create(building / KEYWORDS, documents.texts())
                    matrix = _embed(documents, model, known_vectors, threads, progress)
            columns.write(building / ATTRIBUTES)
            if own_ids is None and shards > 1:
                own_ids = np.arange(len(matrix))
            if own_ids is not None and own_ids.shape != (len(matrix),):
                raise CollectionError(f"ids have shape {list(own_ids.shape)}; they need shape [{len(matrix)}]")
            for shard, folder in enumerate(index_folders(shards)):
                with index_errors():
                    index = GraphIndex.build(
                        matrix[shard::shards],
                        metric=metric,
                        degree=degree,
                        dtype=dtype,
                        neighbor_codes=codes,
                        code_bits=code_bits,
                        ids=None if own_ids is None else own_ids[shard::shards],
                        seed=seed,
                        threads=threads,
                        device=device,
                        progress=_shard_progress(progress, shard, shards),
                    )
                    index.save(building / folder)
            _seal(building, index, len(matrix), shards, embedder)


def gather_vectors(shards: Sequence[GraphIndex], rows: NDArray[np.int64]) -> Vectors:
    """Gather the vectors of rows of a collection with documents, float32 [n, d], in the precision of its indexes."""
    found = np.empty((len(rows), shards[0].dim), np.float32)
    for shard, index in enumerate(shards):
        mine = np.flatnonzero(rows % len(shards) == shard)
        found[mine] = index.vectors(rows[mine] // len(shards))
    return found


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


def _read_bare_vectors(source: Source) -> NDArray[Any] | None:
    if isinstance(source, np.ndarray):
        return source
    if isinstance(source, Path) and source.name.endswith(".npy"):
        return read_vectors(source)
    return None


def _documents(source: Source, progress: Progress) -> Iterable[Document]:
    if not isinstance(source, Path):
        return source
    if not source.name.endswith(DOCUMENT_SUFFIXES):
        raise CollectionError(f"{source}: supported sources end in {', '.join(DOCUMENT_SUFFIXES)} or .npy")
    return read_documents(source, progress)


def _embed(
    documents: DocumentStore, model: Embedder, known_vectors: KnownVectors | None, threads: int, progress: Progress
) -> Vectors:
    vectors = np.empty((documents.size, model.dim), np.float32)
    missing = np.arange(documents.size)
    if known_vectors is not None:
        rows, known = known_vectors()
        vectors[rows] = known
        missing = np.setdiff1d(missing, rows)
    batch = _EMBED_BATCH * threads
    for begin in range(0, len(missing), batch):
        progress("embed", begin / len(missing))
        rows = missing[begin : begin + batch]
        texts = [embedding_text(found.title, found.text) for found in documents.get(rows)]
        vectors[rows] = model.embed(texts, "passage")
    progress("embed", 1.0)
    return vectors


def _check_embedder(embedder: EmbedderSpec | None, vectors: NDArray[Any]) -> None:
    if embedder is not None and vectors.shape[1:] != (embedder_dim(embedder),):
        raise CollectionError(
            f"vectors of shape {list(vectors.shape)} are not from {embedder_name(embedder)}, "
            f"whose vectors have {embedder_dim(embedder)} dimensions"
        )


def _seal(building: Path, index: GraphIndex, size: int, shards: int, embedder: EmbedderSpec | None) -> None:
    metas = [f"{folder}/meta.json" for folder in index_folders(shards)]
    files = [name for name in (DOCUMENTS, ATTRIBUTES, KEYWORDS, *metas) if (building / name).exists()]
    manifest = Manifest(
        size=size,
        dim=index.dim,
        metric=index.metric,
        dtype=index.dtype,
        degree=index.degree,
        embedder=embedder,
        files={name: checksum_file(building / name) for name in files},
        shards=msgspec.UNSET if shards == 1 else shards,
    )
    write_manifest(building, manifest)


@contextmanager
def index_errors() -> Iterator[None]:
    """Raise `GpuError` as `CollectionError`."""
    try:
        yield
    except GpuError as error:
        raise CollectionError(str(error)) from error
