"""The collections of a node as its clients see them."""

from pathlib import Path

import numpy as np

from runtime.node.config import parse_config
from runtime.node.placement.plan import resolve
from runtime.retrieval.collections.collection import Collection
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.manifest import read_manifest
from runtime.retrieval.library import Library
from runtime.retrieval.search.results import SearchResult


def test_who_opens_it_again_sees_collections_as_they_were_built_anew(tmp_path: Path) -> None:
    def build(words: str) -> None:
        documents = [Document(str(n), f"title {n}", f"{words} {n}") for n in range(40)]
        Collection.build(documents, tmp_path / "docs", embedder="hashing-64", force=True)

    build("old")
    plan = resolve(parse_config({"collections": [{"name": "docs", "path": str(tmp_path / "docs")}]}))
    library = Library(plan)
    embedder = library.embedder("docs")
    build("new")
    library.look_again()
    assert library.embedder("docs") is embedder  # which takes long to load
    identity = read_manifest(tmp_path / "docs").identity
    result = SearchResult(1, np.array([7]), np.array([0.5], np.float32), identity=identity)
    assert [passage.text for passage in library.passages("docs", result)] == ["new 7"]
