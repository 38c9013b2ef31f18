"""Documents are embedded on several threads, by builds and by writers, and their vectors are in order."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.embedding.bulk import embed_passages
from runtime.retrieval.embedding.embedder import COMPUTED, TextKind, Vectors

SOON_S = 60.0


class Embedder:
    """Embeds numbers, on a circle; the first calls wait until `threads` are embedding at the same time."""

    name, dim, max_tokens, max_concurrency, turn, tokenizing = "hashing-16", 16, 1000, 1, COMPUTED, None

    def __init__(self, threads: int = 1) -> None:
        self._together = threading.Barrier(threads)
        self._met = threading.Event()

    def count_tokens(self, text: str) -> int:
        return len(text)

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        assert kind == "passage"
        if not self._met.is_set():
            self._together.wait(SOON_S)
            self._met.set()
        return np.stack([vector_of(int(text)) for text in texts])


def vector_of(number: int) -> Vectors:
    vector = np.zeros(16, np.float32)
    vector[:2] = np.cos(number / 100), np.sin(number / 100)
    return vector


def test_vectors_are_in_the_order_of_lists_of_which_the_next_is_made_meanwhile() -> None:
    made: list[int] = []

    def lists() -> Iterator[list[str]]:
        for first in range(0, 200, 40):
            made.append(first)
            yield [str(number) for number in range(first, first + 40)]

    embedded = embed_passages(Embedder(threads=2), lists(), 2)
    found = [next(embedded)]
    assert made == [0, 40, 80]  # and no more: a million passages do not wait in memory
    found += embedded
    np.testing.assert_array_equal(np.concatenate(found), [vector_of(number) for number in range(200)])


def test_a_text_that_cannot_be_embedded_ends_it_with_its_error() -> None:
    class Refusing(Embedder):
        def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
            raise InvalidRequest("the text has an unpaired surrogate")

    with closing(embed_passages(Refusing(), [["1"]], 1)) as embedded, pytest.raises(InvalidRequest, match="surrogate"):
        next(embedded)


def _build(directory: Path) -> None:
    documents = [Document(str(number), "", str(number)) for number in range(300)]
    bulk_load.build(
        documents, directory, embedder="hashing-16", model=Embedder(threads=2), metric="l2", degree=4, threads=2
    )


def _upsert(directory: Path) -> None:
    bulk_load.create(directory, 16, embedder="hashing-16", metric="l2")
    with CollectionWriter(directory, embedder=Embedder(threads=2), threads=2, background=False) as writer:
        writer.upsert([UpsertDocument(str(number), str(number)) for number in range(300)])


@pytest.mark.parametrize("store", [_build, _upsert])
def test_documents_are_embedded_on_all_threads(store: Callable[[Path], None], tmp_path: Path) -> None:
    store(tmp_path / "docs")
    with CollectionWriter(tmp_path / "docs", background=False) as writer:
        (row,) = writer.state.rows_of(["17"]).values()
        np.testing.assert_array_equal(writer.state.vectors(np.array([row]))[0], vector_of(17))
