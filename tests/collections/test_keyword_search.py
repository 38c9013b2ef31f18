"""Keyword search of a collection under writes, deletes, sealing and merging."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import Unavailable
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.search import search_keywords
from runtime.retrieval.collections.segment import Segment
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.keywords.index import Searched
from runtime.testing.waiting import until
from tests.collections.small_collections import new_writer, open_writer, vector_of
from tests.retrieval.sample_files import without_words

LATER_NS = 1 << 62


def standing() -> float:
    """A clock: a search adds all documents, however long it takes."""
    return 0.0


class KeywordHarness:
    def __init__(self, directory: Path) -> None:
        self.writer: CollectionWriter = new_writer(directory, seal_rows=1 << 20)
        self.documents = CollectionDocuments(directory, standing)

    def upsert(self, *names: str, words: str = "entry", **attributes: Any) -> None:
        self.writer.upsert([
            UpsertDocument(name, f"{words} {name}", attributes=attributes, vector=vector_of(len(name)))
            for name in names
        ])  # fmt: skip

    def find(self, text: str, depth: int = 1000, wanted: dict[str, Any] | None = None) -> list[str]:
        """Return the ids found by keywords, best first."""
        passing = None if wanted is None else parse_filter(wanted)
        rows, distances = self.documents.search_keywords(text, vector_of(0), depth, passing, LATER_NS)
        found = self.documents.get(rows.tolist())
        assert len(rows) == len(distances)
        assert np.isfinite(distances).all()
        return [one.id for one in found if one is not None]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[KeywordHarness]:
    made = KeywordHarness(tmp_path / "live")
    yield made
    made.documents.close()
    made.writer.close()


def test_written_documents_are_found_and_deleted_or_replaced_ones_are_not(harness: KeywordHarness) -> None:
    assert harness.find("entry") == []
    harness.upsert("a", "b")
    assert harness.find("entry b")[0] == "b"
    harness.writer.delete(["b"])
    harness.upsert("a", words="other")
    assert harness.find("entry") == []
    assert harness.find("other") == ["a"]


def test_sealing_and_merging_do_not_change_results(harness: KeywordHarness) -> None:
    harness.upsert(*(f"a{n}" for n in range(40)))
    assert len(harness.find("entry")) == 40
    harness.writer.flush()
    harness.writer.delete(["a3"])
    harness.upsert("late")
    assert sorted(harness.find("entry")) == sorted([*(f"a{n}" for n in range(40) if n != 3), "late"])
    harness.writer.compact()
    until(lambda: "a3" not in harness.find("a3 late") and harness.find("late") == ["late"])
    assert len(harness.find("entry")) == 40


def test_a_segment_of_an_older_version_without_an_index_is_refused_until_it_is_merged(harness: KeywordHarness) -> None:
    harness.upsert("a", "b")
    harness.writer.flush()
    harness.writer.close()
    without_words(harness.documents.directory)
    harness.documents.close()
    harness.documents = CollectionDocuments(harness.documents.directory, standing)
    harness.writer = open_writer(harness.documents.directory, seal_rows=1 << 20)
    with pytest.raises(Unavailable, match="`trinity index compact` makes one"):
        harness.find("entry")
    harness.writer.compact()
    assert sorted(harness.find("entry")) == ["a", "b"]


MANY = [f"a{n}" for n in range(40)]
"""Documents that take many searches to be added, if each adds one."""


Find = Callable[..., list[str]]


@contextmanager
def searching(harness: KeywordHarness, clock: Callable[[], float]) -> Iterator[Find]:
    """Yield a search for the ids of documents with words of a text, by an index with this clock."""
    with CollectionReader(harness.documents.directory) as reader:

        def find(text: str, wanted: dict[str, Any] | None = None) -> list[str]:
            reader.poll()
            passing = None if wanted is None else parse_filter(wanted)
            rows, _ = search_keywords(reader.state, text, vector_of(0), 1000, passing, LATER_NS, clock)
            return sorted(one.id for one in harness.documents.get(rows.tolist()) if one is not None)

        yield find


def test_a_search_adds_the_documents_written_before_it(harness: KeywordHarness) -> None:
    with searching(harness, standing) as find:
        harness.upsert("first")
        assert find("entry") == ["first"]
        for words in ("one", "two"):
            harness.upsert(*MANY, words=words)
            assert find(words) == sorted(MANY)


def test_searches_of_several_threads_add_each_document_once(harness: KeywordHarness) -> None:
    harness.upsert(*MANY)
    with searching(harness, standing) as find, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(find, ["entry"] * 4)) == [sorted(MANY)] * 4


def test_a_search_goes_on_if_another_thread_finds_its_segments_merged_away(harness: KeywordHarness) -> None:
    during: Iterator[Callable[[], None]] = iter(())

    def merging() -> float:  # between a search's snapshot and its first use of a segment's file
        for merge in during:
            merge()
            assert documents.was_written
        return 0.0

    harness.documents.close()
    harness.documents = documents = CollectionDocuments(harness.documents.directory, merging)
    for name in "ab":
        harness.upsert(name)
        harness.writer.flush()
    assert documents.was_written
    during = iter([harness.writer.compact])
    assert harness.find("entry") == ["a", "b"]
    assert not list(during)


def test_a_search_adds_no_more_documents_than_its_time_allows(harness: KeywordHarness) -> None:
    now = itertools.count(0, 2)
    with searching(harness, lambda: float(next(now))) as find:  # each search adds one
        harness.upsert("first", "second")
        assert find("entry") == ["first"]
        assert find("entry") == ["first", "second"]


def test_replaced_documents_are_found_until_their_new_versions_are_in_the_index(harness: KeywordHarness) -> None:
    now = itertools.count()
    with searching(harness, lambda: float(next(now))) as find:  # each search adds one
        harness.upsert("first")
        until(lambda: find("entry") == ["first"])
        harness.upsert(*MANY, tenant="acme")
        harness.writer.flush()
        until(lambda: find("entry") == sorted([*MANY, "first"]))
        for number in range(2):
            harness.upsert(*MANY, words=f"entry entry{number}", tenant="acme")
            if number == 1:
                harness.writer.delete(["a7"])  # of which the index has an older version
            expected = sorted(name for name in MANY if number != 1 or name != "a7")
            assert find("entry", {"type": "eq", "key": "tenant", "value": "acme"}) == expected
            assert find("entry") == sorted([*expected, "first"])
            until(lambda number=number, expected=expected: find(f"entry{number}") == expected)  # type: ignore[misc]


def test_a_search_finds_one_version_of_a_document_whose_newer_one_another_search_adds_meanwhile(
    harness: KeywordHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.upsert(*MANY)
    harness.writer.flush()
    harness.upsert(*MANY)
    searched, now = Segment.searched, itertools.count()
    with CollectionReader(harness.documents.directory) as reader:

        def searched_meanwhile(segment: Segment, visible: Bits) -> Searched | None:
            reader.state.growing.add_postings(len(MANY), lambda: True)
            return searched(segment, visible)

        monkeypatch.setattr(Segment, "searched", searched_meanwhile)
        rows, _ = search_keywords(reader.state, "entry", vector_of(0), 1000, None, LATER_NS, lambda: float(next(now)))
        found = [one.id for one in reader.documents(rows.tolist()) if one is not None]
    assert sorted(found) == sorted(MANY)


def test_keyword_search_applies_filters(harness: KeywordHarness) -> None:
    harness.upsert("a", "b", tenant="acme")
    harness.writer.flush()
    harness.upsert("c", "d", tenant="blue")
    harness.upsert("e", tenant="acme")
    assert sorted(harness.find("entry", wanted={"type": "eq", "key": "tenant", "value": "acme"})) == ["a", "b", "e"]
    assert harness.find("entry", 1, wanted={"type": "eq", "key": "tenant", "value": "blue"})[0] in ("c", "d")


def test_the_distance_is_to_the_texts_vector(harness: KeywordHarness) -> None:
    harness.upsert("near")
    harness.writer.flush()
    harness.upsert("nearer", words="words of")
    rows, distances = harness.documents.search_keywords("near nearer", vector_of(4), 5, None, LATER_NS)
    told = {
        one.id: distance for one, distance in zip(harness.documents.get(rows.tolist()), distances, strict=True) if one
    }
    assert told["near"] == 0.0
    assert told["nearer"] == pytest.approx(float(np.square(vector_of(6) - vector_of(4)).sum()), rel=1e-5)
