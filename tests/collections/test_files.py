"""The files of a collection, listed in pages, are those that its documents name."""

import random
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.bulk_load import create
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.files import Files
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter

NAMES = ("a.md", "b/leave.pdf", "b/pay.pdf", "ö.txt", "z")
DIM = 16


def document(number: int, source: str) -> Document:
    return Document(f"{source}#{number}", "", f"text {number}", {"source": source} if source else {})


def in_pages(files: Files, size: int, *, descending: bool = False) -> list[str]:
    """All files, by following the pages."""
    found: list[str] = []
    more = True
    while more:
        page, more = files.page(size, found[-1] if found else "", "", descending=descending)
        assert len(page) == size or not more
        found += [file.id for file in page]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_pages_of_any_size_and_direction_list_each_file_once(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    sources = ("", *NAMES)
    first = [document(number, choose.choice(sources)) for number in range(60)]
    bulk_load.build(first, tmp_path / "docs", embedder=f"hashing-{DIM}", degree=4, shards=1 + seed % 2)
    alive = {one.id: one for one in first}
    with CollectionWriter(tmp_path / "docs", background=False, seal_rows=8) as writer:
        for step in range(6):
            more = [document(100 + 10 * step + number, choose.choice(sources)) for number in range(4)]
            alive |= {one.id: one for one in more}
            vectors = np.random.default_rng(step).normal(size=(len(more), DIM))
            writer.upsert([
                UpsertDocument(one.id, one.text, attributes=one.attributes, vector=vector)
                for one, vector in zip(more, vectors, strict=True)
            ])  # fmt: skip
            for id in choose.sample(sorted(alive), 10):
                del alive[id]
                writer.delete([id])
        files = Files(writer.state)
        rows = writer.state.rows_of(list(alive))
        named = sorted({str(one.attributes["source"]) for one in alive.values() if one.attributes})
        loose = sorted((id for id, one in alive.items() if not one.attributes), key=rows.__getitem__)
        expected = named + loose
        for size in (1, 2, 7, 100):
            assert in_pages(files, size) == expected
            assert in_pages(files, size, descending=True) == expected[::-1]
        for at in range(1, len(expected)):
            page, follow = files.page(2, "", expected[at], descending=False)
            assert ([file.id for file in page], follow) == (expected[max(at - 2, 0) : at], at > 2)
        for file in expected:
            mine = [rows[id] for id, one in alive.items() if one.attributes.get("source", id) == file]
            assert files.rows_of(file) == sorted(mine)
        assert not files.rows_of("a.md#nothing")
        pending = ["new", "a.md"]
        expected = [file for file in expected if file not in ("a.md", "z")] + pending
        files = Files(writer.state, {"new", "a.md", "z"}, pending)
        for size in (1, 2, 7, 100):
            assert in_pages(files, size) == expected
            assert in_pages(files, size, descending=True) == expected[::-1]


def test_a_passage_is_no_file_and_one_that_is_unknown_is_no_place_in_the_list(tmp_path: Path) -> None:
    bulk_load.build([document(1, "a.md")], tmp_path / "docs", embedder=f"hashing-{DIM}", degree=2)
    with CollectionWriter(tmp_path / "docs", background=False) as writer:
        files = Files(writer.state)
        assert files.rows_of("a.md") == [0]
        assert files.rows_of("a.md#1") == []
        for param in ("after", "before"):
            edges = {"after": "", "before": ""} | {param: "a.md#1"}
            with pytest.raises(InvalidRequest, match=rf"no file 'a\.md#1' to list others {param}") as raised:
                files.page(5, **edges, descending=False)
            assert raised.value.param == param


def test_without_the_attribute_or_with_one_of_another_type_each_document_is_a_file(tmp_path: Path) -> None:
    create(tmp_path / "docs", DIM)
    with CollectionWriter(tmp_path / "docs", background=False) as writer:
        assert Files(writer.state).page(5, "", "", descending=True) == ([], False)
        writer.upsert([UpsertDocument(id, attributes={"source": 7}, vector=np.ones(DIM)) for id in ("x", "y")])
        found, _ = Files(writer.state).page(5, "", "", descending=True)
        assert [(file.id, file.attributes) for file in found] == [("y", {"source": 7}), ("x", {"source": 7})]


def test_passages_are_read_while_the_files_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bulk_load.build([document(0, "a.md")], tmp_path / "docs", embedder=f"hashing-{DIM}", degree=4)
    documents, strings = CollectionDocuments(tmp_path / "docs"), Columns.strings
    found: list[str] = []

    def scanned(columns: Columns, name: str, size: int) -> Any:
        reader = Thread(target=lambda: found.extend(one.id for one in documents.get([0]) if one))
        reader.start()
        reader.join(60)
        return strings(columns, name, size)

    monkeypatch.setattr(Columns, "strings", scanned)
    documents.files()
    assert found[:1] == ["a.md#0"]
    documents.close()
