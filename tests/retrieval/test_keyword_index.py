"""The keyword index: BM25 results, bounded work, and arbitrary query text."""

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import GraphIndex
from runtime.errors import CollectionError, CollectionReplaced, DeadlineExceeded
from runtime.retrieval.collections.collection import Metric
from runtime.retrieval.collections.keyword_index import MAX_ROWS, MAX_WORDS, KeywordIndex, distances

LATER_NS = 1 << 62
TEXTS = [
    (0, "Cats", "cats are small carnivorous mammals that are kept as pets"),
    (1, "Volcanoes", "molten rock, ash and gases escape from below the surface"),
    (2, "Chess", "a board game for two players"),
    (3, "", "players of football, a game, are many"),
]


@pytest.fixture
def index() -> Iterator[KeywordIndex]:
    made = KeywordIndex.temporary()
    made.add(TEXTS)
    yield made
    made.close()


def search(index: KeywordIndex, text: str, depth: int = 10) -> list[int]:
    return [int(row) for row in index.search(text, depth, None, LATER_NS)]


def test_the_row_with_the_rarer_stems_comes_first(index: KeywordIndex) -> None:
    assert search(index, "the board games of a player") == [2, 3, 1]
    assert search(index, "Volcano?") == [1]
    assert sorted(search(index, "nothing of that")) == [0, 3]
    assert search(index, "the board games of a player", depth=1) == [2]


@pytest.mark.parametrize("text", ["", "?!", "xylophone", "__", "\0"])
def test_a_text_without_known_words_finds_nothing(index: KeywordIndex, text: str) -> None:
    assert search(index, text) == []


SYNTAX = ['"', "'", "*", "^", "(", ")", ":", "-", "+", "{", "}", ",", "\0", ";", "--", "%", "\ud800"]
WORDS = ["cats", "game", "title", "text", "rowid", "rank", "AND", "OR", "NOT", "NEAR", "words", "DROP", "TABLE"]


@settings(max_examples=200)
@given(parts=st.lists(st.sampled_from(SYNTAX + WORDS) | st.text(max_size=4), max_size=20), blank=st.booleans())
def test_query_text_is_never_parsed_as_syntax(parts: list[str], blank: bool) -> None:
    index = KeywordIndex.temporary()
    index.add(TEXTS)
    try:
        text = (" " if blank else "").join(parts)
        literal = " ".join(dict.fromkeys(word.lower() for word in re.findall(r"[^\W_]+", text)))
        assert sorted(search(index, text)) == sorted(search(index, literal))
        assert search(index, "mammals") == [0], "the table was changed"
    finally:
        index.close()


def test_frequent_words_are_skipped_and_ranked_rows_are_bounded() -> None:
    index = KeywordIndex.temporary()
    index.add((row, "", "common" + " halves" * (row % 2) + " rare" * (row == 77)) for row in range(MAX_ROWS + 1))
    assert search(index, "the common rare") == [77]
    assert search(index, "common") == []
    assert len(search(index, "halves", 1 << 20)) == (MAX_ROWS + 1) // 2
    assert search(index, "common halves rare", 1)[0] == 77
    index.close()


def test_only_the_first_words_of_a_query_are_searched(index: KeywordIndex) -> None:
    assert search(index, "zzz " * 1000 + "mammals") == []
    others = " ".join(f"w{number}" for number in range(MAX_WORDS - 1))
    assert search(index, f"{others} mammals") == [0]
    assert search(index, f"{others} more mammals") == []
    assert search(index, "mammals " + "x" * 1_000_000) == [0]


def test_filtered_rows_do_not_take_places_in_the_results() -> None:
    index = KeywordIndex.temporary()
    index.add((row, "", "word " * (1 + (row < 600))) for row in range(700))
    allowed = np.zeros(700, bool)
    allowed[[3, 650, 660]] = True
    assert index.search("word", 2, allowed.__getitem__, LATER_NS).tolist() == [3, 650]
    index.close()


def test_a_query_ends_at_its_deadline_and_the_next_one_works() -> None:
    index = KeywordIndex.temporary()
    index.add((row, "", "word") for row in range(3000))
    now = iter(range(10**9))
    with pytest.raises(DeadlineExceeded, match="keyword search exceeded"):
        index.search("word", 5, None, 3, clock=lambda: next(now))
    index.add([(3000, "", "another")])
    assert search(index, "another") == [3000]
    index.close()


def test_an_index_file_round_trips_and_an_invalid_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "words.sqlite"
    with pytest.raises(CollectionError, match=r"words\.sqlite is missing"):
        KeywordIndex.open(path)
    KeywordIndex.create(path, TEXTS)
    index = KeywordIndex.open(path)
    assert search(index, "football") == [3]
    with pytest.raises(CollectionError, match="cannot be written"):
        index.add([(4, "", "more")])
    index.close()
    with pytest.raises(CollectionReplaced):
        search(index, "football")
    for content in (b"", b"no database" * 100, path.read_bytes()[:5000]):
        path.write_bytes(content)
        with pytest.raises(CollectionError, match=r"damaged|cannot be read"):
            search(KeywordIndex.open(path), "football")
    path.unlink()
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE words (title TEXT)")
    foreign.close()
    with pytest.raises(CollectionError, match="has another schema"):
        KeywordIndex.open(path)


def test_a_file_that_cannot_be_opened_is_a_collection_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "words.sqlite"
    KeywordIndex.create(path, TEXTS)

    def refuse(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr("runtime.retrieval.collections.documents.sqlite3.connect", refuse)
    with pytest.raises(CollectionError, match=r"words\.sqlite is damaged: unable to open"):
        KeywordIndex.open(path)


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_distances_equal_those_of_a_vector_search(metric: Metric) -> None:
    vectors = np.random.default_rng(2).normal(size=(50, 24)).astype(np.float32) * 3
    index = GraphIndex.build(vectors, metric=metric, degree=8)
    query = np.random.default_rng(3).normal(size=24).astype(np.float32)
    ids, expected = index.exact(query[None], 50)
    np.testing.assert_allclose(distances(index.vectors(ids[0]), query, metric), expected[0], rtol=1e-4, atol=1e-4)
