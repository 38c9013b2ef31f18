"""The keyword index: BM25 results, bounded work, and arbitrary query text."""

import errno
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu import GraphIndex
from runtime.errors import CollectionError, CollectionReplaced, DeadlineExceeded
from runtime.retrieval.collections.bulk_load import Metric
from runtime.retrieval.collections.search import distances
from runtime.retrieval.keywords.index import (
    CHUNK,
    MAX_DOCUMENT_WORDS,
    MAX_ROWS,
    KeywordFile,
    Postings,
    Searched,
    Texts,
    search_indexes,
)
from runtime.retrieval.keywords.words import stem, words_of

LATER_NS = 1 << 62
TEXTS = [
    ("Cats", "cats are small carnivorous mammals that are kept as pets"),
    ("Volcanoes", "molten rock, ash and gases escape from below the surface"),
    ("Chess", "a board game for two players"),
    ("", "players of football, a game, are many"),
]


def postings(texts: Texts) -> Postings:
    made = Postings()
    add(made, texts)
    return made


def add(index: Postings, texts: Texts) -> None:
    for title, text in texts:
        index.add(title, text)


@pytest.fixture
def index() -> Postings:
    return postings(TEXTS)


def search(
    index: Postings | KeywordFile, text: str, depth: int = 10, visible: NDArray[np.bool_] | None = None
) -> list[int]:
    count = len(index.lengths)
    shown = np.ones(count, bool) if visible is None else visible
    return [int(row) for row in search_indexes([Searched(index, np.arange(count), shown)], text, depth, LATER_NS)]


def test_the_row_with_the_rarer_stems_comes_first(index: Postings) -> None:
    assert search(index, "the board games of a player") == [2, 3, 1]
    assert search(index, "Volcano?") == [1]
    assert sorted(search(index, "nothing of that")) == [0, 3]
    assert search(index, "the board games of a player", depth=1) == [2]


@pytest.mark.parametrize("text", ["", "?!", "xylophone", "__", "\0", "\ud800 * '"])
def test_a_text_without_known_words_finds_nothing(index: Postings, text: str) -> None:
    assert search(index, text) == []


def test_of_long_words_and_long_texts_the_beginning_is_indexed(index: Postings) -> None:
    """A word of a megabyte would take minutes to stem."""
    assert words_of("y" * 1_000_000 + " next") == ["y" * 64, "next"]
    add(index, [("", " ".join(f"q{number}" for number in range(MAX_DOCUMENT_WORDS + 1))), ("", "y" * 1_000_000)])
    assert search(index, f"q{MAX_DOCUMENT_WORDS - 1}") == [4]
    assert search(index, f"q{MAX_DOCUMENT_WORDS}") == []
    assert search(index, "y" * 100) == [5]


def test_frequent_words_are_skipped_and_ranked_rows_are_bounded() -> None:
    index = postings(("", "common" + " halves" * (row % 2) + " rare" * (row == 77)) for row in range(MAX_ROWS + 1))
    assert search(index, "the common rare") == [77]
    assert search(index, "common") == []
    assert len(search(index, "halves", 1 << 20)) == (MAX_ROWS + 1) // 2
    assert search(index, "common halves rare", 1)[0] == 77


DOCUMENT = st.lists(st.sampled_from(["cat", "dog", "mouse", "heron", "the"]), max_size=12).map(" ".join)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), DOCUMENT, DOCUMENT), max_size=20), DOCUMENT, st.integers(1, 8))
def test_results_depend_on_visible_documents_only(
    documents: list[tuple[bool, str, str]], query: str, depth: int
) -> None:
    """Searches give the same results as in an index without the other documents, in the same order."""
    both = postings((title, text) for _, title, text in documents)
    alone = postings((title, text) for shown, title, text in documents if shown)
    visible = np.array([shown for shown, _, _ in documents], bool)
    found = search(both, query, depth, visible)
    assert found == np.flatnonzero(visible)[search(alone, query, depth)].tolist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), DOCUMENT), max_size=20), DOCUMENT)
def test_results_do_not_depend_on_how_documents_are_divided_among_indexes(
    documents: list[tuple[int, str]], query: str
) -> None:
    rows = [np.flatnonzero([place == part for place, _ in documents]) for part in range(3)]
    parts: list[Postings | KeywordFile] = [postings(("", documents[row][1]) for row in some) for some in rows[:2]]
    with TemporaryDirectory() as folder:
        path = Path(folder, "keywords.sqlite")
        KeywordFile.create(path, (("", documents[row][1]) for row in rows[2]))
        parts.append(KeywordFile(path, len(rows[2])))
    searched = [Searched(part, some, np.ones(len(some), bool)) for part, some in zip(parts, rows, strict=True)]
    whole = postings(("", text) for _, text in documents)
    assert search_indexes(searched, query, 10, LATER_NS).tolist() == search(whole, query)


def test_documents_are_added_by_one_thread_while_another_reads_lengths() -> None:
    index = Postings()
    with ThreadPoolExecutor(1) as thread:
        adding = thread.submit(add, index, [("", f"cat w{number % 50}") for number in range(20_000)])
        while not adding.done():
            assert set(index.lengths.tolist()) <= {2}
        adding.result()
    assert search(index, "w7", 1 << 20) == list(range(7, 20_000, 50))


def test_documents_are_ranked_by_bm25() -> None:
    texts = ["cat", "cat cat", "cat dog", "dog", "cat and many other words of no interest to this query"]
    index = postings(("", text) for text in texts)
    assert search(index, "cat") == [1, 0, 2, 4]
    assert search(index, "cats or dogs") == [2, 3, 1, 0, 4]


def test_the_index_of_a_file_equals_that_in_memory_across_chunks(tmp_path: Path) -> None:
    texts = [("", f"word{row % 1000} all{row % 5000}") for row in range(CHUNK + 2000)]
    KeywordFile.create(tmp_path / "keywords.sqlite", texts)
    stored, memory = KeywordFile(tmp_path / "keywords.sqlite", len(texts)), postings(texts)
    assert len(memory) == len(texts)
    for query in ("word7", "all4999 word999", "word0 all0"):
        assert search(stored, query, 100) == search(memory, query, 100) != []
    stored.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [("The CAFÉ's prices", ["the", "cafe", "s", "price"]), ("relational flies_agreed", ["relat", "fli", "agre"]),
     ("hopping, controlled happy 1950s", ["hop", "control", "happi", "1950"]), ("ни 猫 sky", ["ни", "猫", "sky"])],
)  # fmt: skip
def test_words_are_compared_without_case_accents_and_english_endings(text: str, words: list[str]) -> None:
    assert [stem(word) for word in words_of(text)] == words


def test_a_query_ends_at_its_deadline_and_the_next_one_works() -> None:
    index = postings(("", "word") for _ in range(3000))
    now = iter(range(10**9))
    searched = [Searched(index, np.arange(3000), np.ones(3000, bool))]
    with pytest.raises(DeadlineExceeded, match="keyword search exceeded"):
        search_indexes(searched, "a word and another", 5, 3, clock=lambda: next(now))
    add(index, [("", "another")])
    assert search(index, "another") == [3000]


def test_an_index_file_round_trips_and_an_invalid_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keywords.sqlite"
    with pytest.raises(CollectionError, match=r"keywords\.sqlite is missing"):
        KeywordFile(path, len(TEXTS))
    KeywordFile.create(path, TEXTS)
    index = KeywordFile(path, len(TEXTS))
    assert search(index, "football") == [3]
    index.close()
    with pytest.raises(CollectionReplaced):
        search(index, "football")
    with pytest.raises(CollectionError, match="has 4 documents, not 5"):
        KeywordFile(path, 5)
    for content in (b"", b"no database" * 100, path.read_bytes()[:5000]):
        path.write_bytes(content)
        with pytest.raises(CollectionError, match=r"damaged|cannot be read"):
            search(KeywordFile(path, len(TEXTS)), "football")
    path.unlink()
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE words (title TEXT)")
    foreign.close()
    with pytest.raises(CollectionError, match="is not a keyword index"):
        KeywordFile(path, len(TEXTS))


def test_a_file_that_cannot_be_opened_is_a_collection_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keywords.sqlite"
    KeywordFile.create(path, TEXTS)

    def refuse(*_: object, **__: object) -> None:
        error = sqlite3.OperationalError("unable to open database file")
        error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
        raise error

    monkeypatch.setattr("runtime.retrieval.databases.sqlite3.connect", refuse)
    with pytest.raises(CollectionError, match=r"keywords\.sqlite cannot be opened: unable to open"):
        KeywordFile(path, len(TEXTS))
    with monkeypatch.context() as denied:
        denied.setattr(os, "open", partial(_denied, os.open, path))
        with pytest.raises(CollectionError, match=r"keywords\.sqlite cannot be opened: Permission denied"):
            KeywordFile(path, len(TEXTS))


def _denied(open_: Callable[..., int], path: Path, wanted: Path, *options: Any, **named: Any) -> int:
    if wanted == path:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return open_(wanted, *options, **named)


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_distances_equal_those_of_a_vector_search(metric: Metric) -> None:
    vectors = np.random.default_rng(2).normal(size=(50, 24)).astype(np.float32) * 3
    index = GraphIndex.build(vectors, metric=metric, degree=8)
    query = np.random.default_rng(3).normal(size=24).astype(np.float32)
    ids, expected = index.exact(query[None], 50)
    np.testing.assert_allclose(distances(index.vectors(ids[0]), query, metric), expected[0], rtol=1e-4, atol=1e-4)
