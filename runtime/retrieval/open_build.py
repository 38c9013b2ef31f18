"""An open build of a collection in a client process: its documents, its keyword index, its embedder's description."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from runtime.errors import CollectionError
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.collections.collection import document_bytes
from runtime.retrieval.collections.description import DESCRIPTION, DOCUMENTS
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.embedding.embedder import EmbedderSpec, embedder_name
from runtime.retrieval.neighbors import Neighbors, fuse_ranks
from runtime.retrieval.search.query import SearchResult


@dataclass(frozen=True)
class OpenBuild:
    """One build of a collection: its open documents, and when the directory was made.

    It is one build for its lifetime, however it is written to: a row stands for one text. `stamp`: `documents_stamp` at
    the time of opening.
    """

    documents: CollectionDocuments
    created_at: int
    stamp: tuple[int, ...]

    @property
    def identity(self) -> str:
        return self.documents.description.identity

    @property
    def embedder(self) -> EmbedderSpec | None:
        """The embedder that the collection was built with."""
        return self.documents.description.embedder

    @property
    def dim(self) -> int:
        return self.documents.description.dim

    @property
    def summary(self) -> CollectionSummary:
        """The collection's size and properties as of now."""
        state, about = self.documents.state, self.documents.description
        size = state.count
        sealed = [(segment.store.file_count if segment.store else 0) or segment.size for segment in state.segments]
        return CollectionSummary(
            is_open=True,
            size=size,
            files=min(sum(sealed) + state.growing.size, size),
            document_bytes=document_bytes(state),
            created_at=self.created_at,
            dim=about.dim,
            metric=about.metric,
            embedder="" if about.embedder is None else embedder_name(about.embedder),
        )

    def fuse(self, result: SearchResult, keywords: Neighbors, k: int, weight: float) -> SearchResult:
        """Fuse a result of the pools with one of a keyword search. Raises `CollectionError`."""
        by_vector, by_words = self.documents.align((result.ids, result.distances), keywords)
        ids, distances = fuse_ranks(by_vector, by_words, k, weight)
        return structs.replace(result, ids=ids, distances=distances)

    def close(self) -> None:
        """Close the files."""
        self.documents.close()


def documents_stamp(directory: Path) -> tuple[int, ...]:
    """Return device, inode, size, mtime and ctime of each file that contains documents; () if there is none."""
    paths = [directory / DOCUMENTS, *sorted(directory.glob(f"segments/*/{DOCUMENTS}"))]
    stamp: list[int] = []
    for path in paths:
        with suppress(OSError):
            found = os.stat(path)
            stamp += (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return tuple(stamp)


def _built_at(directory: Path) -> int:
    try:
        return int(os.stat(directory / DESCRIPTION).st_mtime)
    except OSError:
        return 0


def open_build(directory: Path) -> OpenBuild:
    """Open the build that a directory contains now. Raises `CollectionError`."""
    stamp = documents_stamp(directory)
    return OpenBuild(CollectionDocuments(directory), _built_at(directory), stamp)


def check_documents(directory: Path, identity: str) -> None:
    """Open the documents of a build once. Raises `CollectionError` if they are damaged or of another build."""
    found = open_build(directory)
    found.close()
    if found.identity != identity:
        raise CollectionError(f"{directory} was replaced by another collection while it was opened")
