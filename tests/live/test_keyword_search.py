"""Keyword search of a live collection under writes, deletes, sealing and merging."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import Unavailable
from runtime.retrieval.attributes.filters import parse_filter
from runtime.retrieval.live.reader import LiveDocumentStore
from runtime.retrieval.live.validation import UpsertDocument
from runtime.retrieval.live.writer import LiveWriter
from runtime.testing.waiting import until
from tests.live.small_collections import new_writer, vector_of

LATER_NS = 1 << 62


class Stand:
    def __init__(self, directory: Path) -> None:
        self.writer: LiveWriter = new_writer(directory, seal_rows=1 << 20)
        self.documents = LiveDocumentStore(directory)

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
def stand(tmp_path: Path) -> Iterator[Stand]:
    made = Stand(tmp_path / "live")
    yield made
    made.documents.close()
    made.writer.close()


def test_written_documents_are_found_and_deleted_or_replaced_ones_are_not(stand: Stand) -> None:
    assert stand.find("entry") == []
    stand.upsert("a", "b")
    assert stand.find("entry b")[0] == "b"
    stand.writer.delete(["b"])
    stand.upsert("a", words="other")
    assert stand.find("entry") == []
    assert stand.find("other") == ["a"]


def test_sealing_and_merging_do_not_change_results(stand: Stand) -> None:
    stand.upsert(*(f"a{n}" for n in range(40)))
    assert len(stand.find("entry")) == 40
    stand.writer.flush()
    stand.writer.delete(["a3"])
    stand.upsert("late")
    assert sorted(stand.find("entry")) == sorted([*(f"a{n}" for n in range(40) if n != 3), "late"])
    stand.writer.compact()
    until(lambda: "a3" not in stand.find("a3 late") and stand.find("late") == ["late"])
    assert len(stand.find("entry")) == 40


def test_a_large_collection_is_indexed_in_the_background_and_then_followed(stand: Stand) -> None:
    stand.upsert(*(f"a{n}" for n in range(1000)))
    stand.writer.flush()
    stand.upsert(*(f"b{n}" for n in range(500)))
    stand.writer.delete([f"a{n}" for n in range(1, 1000)])
    with pytest.raises(Unavailable, match="is being built"):
        stand.find("entry")

    def searched() -> bool:
        try:
            return len(stand.find("entry")) == 501
        except Unavailable:
            return False

    until(searched)
    stand.upsert("c")
    assert stand.find("c") == ["c"]
    stand.upsert(*(f"d{n}" for n in range(1000)))
    until(lambda: stand.find("d999") == ["d999"])


def test_keyword_search_applies_filters(stand: Stand) -> None:
    stand.upsert("a", "b", tenant="acme")
    stand.writer.flush()
    stand.upsert("c", "d", tenant="blue")
    stand.upsert("e", tenant="acme")
    assert sorted(stand.find("entry", wanted={"type": "eq", "key": "tenant", "value": "acme"})) == ["a", "b", "e"]
    assert stand.find("entry", 1, wanted={"type": "eq", "key": "tenant", "value": "blue"})[0] in ("c", "d")


def test_the_distance_is_to_the_texts_vector(stand: Stand) -> None:
    stand.upsert("near")
    stand.writer.flush()
    stand.upsert("nearer", words="words of")
    rows, distances = stand.documents.search_keywords("near nearer", vector_of(4), 5, None, LATER_NS)
    told = {
        one.id: distance for one, distance in zip(stand.documents.get(rows.tolist()), distances, strict=True) if one
    }
    assert told["near"] == 0.0
    assert told["nearer"] == pytest.approx(float(np.square(vector_of(6) - vector_of(4)).sum()), rel=1e-5)


def test_an_index_with_mostly_deleted_rows_is_rebuilt(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.retrieval.live.keyword_search._MAX_DELETED", 10)
    for round_number in range(30):
        stand.upsert("a", "b", words=f"round{round_number}")
        assert sorted(stand.find(f"round{round_number}")) == ["a", "b"]
        assert stand.find(f"round{round_number - 1}") == []
