"""Collections: search of built collections, atomic builds, and detection of corruption."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.errors import CollectionError, ModelError
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import DESCRIPTION, FileChecksum, encode_with_checksum, read_description
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.embedding.loading import load_embedder
from runtime.retrieval.neighbors import recall

DOCUMENTS = [
    Document("cats", "", "Cats are small carnivorous mammals that are kept as pets."),
    Document("volcano", "Volcanoes", "Molten rock, ash and gases escape from below the surface."),
    Document("chess", "", "Chess is a board game for two players with sixteen pieces each."),
    *(Document(f"filler-{n}", "", f"Filler number {n * 7919}.") for n in range(40)),
]


def build(out: Path, **options: Any) -> Path:
    bulk_load.build(DOCUMENTS, out, embedder="hashing-256", degree=8, **options)
    return out


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return build(tmp_path / "docs")


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(200, 24)).astype(np.float32)


def test_vectors_alone_make_a_collection_without_documents(tmp_path: Path, vectors: np.ndarray) -> None:
    np.save(tmp_path / "v.npy", vectors)
    bulk_load.build(np.load(tmp_path / "v.npy", "r"), tmp_path / "mapped", metric="l2", degree=8, dtype="float16")
    bulk_load.build(vectors, tmp_path / "in-memory", metric="l2", degree=8, dtype="float16")
    for name in ("mapped", "in-memory"):
        CollectionReader.verify(tmp_path / name)
        with CollectionReader(tmp_path / name) as collection:
            assert collection.documents([7]) == [Document("7", "", "", row=7)]
            assert collection.embedder is None
            ids, _ = collection.search(vectors, k=1)
            np.testing.assert_array_equal(ids[:, 0], np.arange(200))


def test_progress_reports_every_stage_from_begin_to_end(tmp_path: Path) -> None:
    told: dict[str, list[float]] = {}
    build(tmp_path / "docs", progress=lambda stage, done: told.setdefault(stage, []).append(done))
    assert next(iter(told)) == "embed"
    for parts in told.values():
        assert parts == sorted(parts)
        assert parts[-1] == 1.0


# ---- all or nothing


def test_a_failed_build_leaves_no_files(tmp_path: Path, vectors: np.ndarray) -> None:
    def broken() -> Iterator[Document]:
        yield DOCUMENTS[0]
        raise KeyboardInterrupt

    bad = vectors.copy()
    bad[17, 3] = np.nan
    attempts: list[tuple[type[BaseException], str, Any, dict[str, Any]]] = [
        (KeyboardInterrupt, "^$", broken(), {}),
        (
            CollectionError,
            "documents 1 and 2 have the same id 'a'",
            [Document("a", "", "x"), Document("a", "", "y")],
            {},
        ),
        (CollectionError, "no documents", [], {}),
        (CollectionError, "row 17 holds nan", bad, {"embedder": None}),
        (CollectionError, "degree is 1, outside", vectors, {"embedder": None, "degree": 1}),
        (CollectionError, "none of cosine, l2, ip", vectors, {"embedder": None, "metric": "l3"}),
        (CollectionError, "not from hashing-256, whose vectors have 256 dimensions", vectors, {}),
        (CollectionError, "200 vectors do not match 43 documents", DOCUMENTS, {"embedder": None, "vectors": vectors}),
        (CollectionError, "the source contains vectors", vectors, {"vectors": vectors}),
        (CollectionError, "documents have their own ids", DOCUMENTS, {"ids": np.arange(43)}),
        (ModelError, "unknown embedder", DOCUMENTS, {"embedder": "hishing"}),
    ]
    for kind, message, source, options in attempts:
        with pytest.raises(kind, match=message):
            bulk_load.build(source, tmp_path / "parent" / "docs", **({"embedder": "hashing-256"} | options))
        assert not (tmp_path / "parent").exists() or not os.listdir(tmp_path / "parent")


def test_an_existing_directory_is_replaced_only_with_force(copy: Path) -> None:
    before = (copy / "collection.json").read_bytes()
    with pytest.raises(CollectionError, match="already exists: use another --out, or --force"):
        build(copy, seed=1)
    assert (copy / "collection.json").read_bytes() == before
    bulk_load.build(DOCUMENTS[:20], copy, embedder="hashing-64", degree=4, force=True)
    with CollectionReader(copy) as found:
        assert found.state.count == 20
    CollectionReader.verify(copy)
    assert os.listdir(copy.parent) == ["docs"]


@pytest.mark.parametrize("closed", ["", "segments/0/index"])
def test_an_unreadable_collection_is_not_reported_as_foreign(
    copy: Path, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)  # what is above it may be root's
    copy.parent.chmod(0o755)
    (copy / closed).chmod(0)
    try:
        with as_nobody(), pytest.raises(CollectionError, match=r"^docs/\S+ cannot be read: Permission denied$"):
            CollectionReader(Path("docs"))
    finally:
        (copy / closed).chmod(0o755)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Drop root's privileges for the block, because root can read any file."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_readers_keep_the_replaced_collection_open(copy: Path) -> None:
    with CollectionReader(copy) as old:
        bulk_load.build(DOCUMENTS[3:], copy, embedder="hashing-64", degree=4, force=True)
        ids, _ = old.search(load_embedder("hashing-256").embed(["a board game"]), k=1)
        assert [found and found.id for found in old.documents(ids[0].tolist())] == ["chess"]


def test_foreign_files_are_never_deleted(tmp_path: Path, copy: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(copy)
    (copy / "segments/0/index" / "notes.txt").write_text("mine")
    for name, message in [
        ("mine", "not a collection and will not be replaced"),
        ("file", "not a directory"),
        ("link", "not a directory"),
        ("docs", "notes.txt is not part of a collection"),
    ]:
        with pytest.raises(CollectionError, match=message):
            build(tmp_path / name, force=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert (copy / "segments/0/index" / "notes.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["docs", "file", "link", "mine"]


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CollectionError, match=r"file.* cannot be made"):
        build(tmp_path / "file" / "docs")


# ---- damage


def test_directories_that_are_not_collections_are_named(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(CollectionError, match=r"no collection at .*nowhere"):
        CollectionReader(tmp_path / "nowhere")
    for content in (None, "{}", "[]", "nonsense", '{"format": "trinity-index"}', "9" * 100_000):
        (tmp_path / "other").mkdir(exist_ok=True)
        if content is not None:
            (tmp_path / "other" / "collection.json").write_text(content)
        for call in (CollectionReader, CollectionReader.verify):
            with pytest.raises(CollectionError, match="other is not a collection"):
                call(tmp_path / "other")
    manifest = (copy / "collection.json").read_text()
    (copy / "collection.json").write_text(manifest.replace('"version": 1', '"version": 2'))
    with pytest.raises(CollectionError, match="has version 2; this Trinity reads 1"):
        CollectionReader(copy)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shards": 10**15}, r"Expected `int` <= 8 - at `\$.shards`"),
        ({"shards": -1}, r"Expected `int` >= 1 - at `\$.shards`"),
        ({"dtype": "int8"}, "is of int8 rows, which no longer exist: build it anew"),
        ({"size": 43, "files": {}}, "does not list index/meta.json"),
    ],
)
def test_an_invalid_manifest_with_a_valid_checksum_is_refused(copy: Path, change: dict[str, Any], says: str) -> None:
    manifest = read_description(copy)
    if "files" in change:
        change |= {"files": {name: FileChecksum(*checksum) for name, checksum in change["files"].items()}}
        (copy / "MANIFEST").unlink()  # as in a bulk load of an earlier version
        shutil.rmtree(copy / "log")
    (copy / DESCRIPTION).write_bytes(encode_with_checksum(msgspec.structs.replace(manifest, **change)))
    for call in (CollectionReader, CollectionReader.verify):
        with pytest.raises(CollectionError, match=says):
            call(copy)


@pytest.mark.parametrize(
    ("embedder", "copied", "says"),
    [
        ("hashing-256", ["segments/0/index"], "meta.json is damaged: its checksum"),
        ("hashing-64", ["segments", "MANIFEST"], "is not an index of this collection"),
    ],
)
def test_the_index_of_another_collection_is_refused(
    copy: Path, tmp_path: Path, embedder: str, copied: list[str], says: str
) -> None:
    bulk_load.build(DOCUMENTS[::-1], tmp_path / "other", embedder=embedder, degree=8)
    for name in copied:
        (copy / name).rename(tmp_path / Path(name).name)
        (tmp_path / "other" / name).rename(copy / name)
    with pytest.raises(CollectionError, match=says):
        CollectionReader(copy)


def test_recall_counts_the_true_neighbours_in_any_order() -> None:
    truth = np.array([[1, 2, 3, 9], [4, 5, 6, 9]])
    assert recall(np.array([[3, 2, 1], [6, 7, -1]]), truth) == pytest.approx(4 / 6)
    assert recall(np.array([[1], [9]]), truth) == 0.5
