"""Folders of files as collections: citation data and incremental updates."""

import errno
import importlib.util
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from runtime.errors import BuildRefused, CollectionBusy, CollectionError
from runtime.retrieval.collections import bulk_load
from runtime.retrieval.collections.description import read_description
from runtime.retrieval.collections.disk import writing
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.reader import CollectionReader
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.collections.validation import UpsertDocument
from runtime.retrieval.collections.writer import CollectionWriter
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.ingestion import source_files
from runtime.retrieval.ingestion.ingest import IngestReport, add, ingest
from tests.retrieval import sample_files
from tests.retrieval.sample_files import CountingEmbedder

has_documents = all(importlib.util.find_spec(name) for name in ("pypdf", "docx", "pptx"))
SPEC = "hashing-64"


class Handbook:
    """A folder of files and its collection."""

    def __init__(self, home: Path) -> None:
        self.folder, self.out = home / "handbook", home / "docs"
        self.folder.mkdir()

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def ingest(self, *paths: Path, **options: object) -> IngestReport:
        given = {"degree": 4, "force": True, **options}
        return ingest(paths or [self.folder], self.out, SPEC, CountingEmbedder(), **given)  # type: ignore[arg-type]

    def add(self, *paths: Path) -> tuple[IngestReport, list[str]]:
        """Update the collection; return the outcome of the files and the embedded passages."""
        embedder = CountingEmbedder()
        done = add(list(paths) or [self.folder], self.out, load=lambda spec, **rest: embedder)
        return done, embedder.passages

    @property
    def documents(self) -> list[Document]:
        with CollectionReader(self.out) as collection:
            return [
                msgspec.structs.replace(found, row=-1)
                for found in collection.documents(sorted(collection.state.alive_rows().tolist()))
                if found is not None
            ]

    @property
    def texts(self) -> dict[str, str]:
        return {document.id: document.text for document in self.documents}

    def check_vectors(self) -> None:
        """Assert that every passage is found by its vector."""
        with CollectionReader(self.out) as collection:
            documents = self.documents
            vectors = CountingEmbedder().embed([f"{document.title}\n{document.text}" for document in documents])
            kept = collection.state.vectors(np.arange(len(documents)))
        np.testing.assert_allclose(kept, vectors, atol=1e-3)


@pytest.fixture
def handbook(tmp_path: Path) -> Handbook:
    return Handbook(tmp_path)


@pytest.mark.skipif(not has_documents, reason="pypdf, python-docx or python-pptx is not installed: [documents]")
def test_passages_have_path_heading_and_page_for_every_file_type(handbook: Handbook) -> None:
    handbook.write("leave.md", "# Leave\n\n## Parental\n\nTwelve weeks.")
    handbook.write("plain.txt", "Only text.")
    handbook.write("web/page.html", "<title>Web</title><h2>Part</h2><p>On the web.")
    handbook.write("scans/report.pdf", sample_files.pdf("first page", "second page", title="Report"))
    handbook.write("letter.docx", sample_files.docx("Letter", ("Greeting", "Dear all.")))
    handbook.write("talk.pptx", sample_files.pptx(("Begin", "Slide text", "")))
    done = handbook.ingest()
    assert (done.read, done.skipped) == (6, {})
    assert handbook.documents == [
        Document("leave.md#1", "Leave: Parental", "Twelve weeks.", {"source": "leave.md", "heading": "Parental"},
                 "leave.md"),
        Document("letter.docx#1", "Letter: Greeting", "Dear all.\n\nleft | right",
                 {"source": "letter.docx", "heading": "Greeting"}, "letter.docx"),
        Document("plain.txt#1", "plain", "Only text.", {"source": "plain.txt"}, "plain.txt"),
        Document("scans/report.pdf#1", "Report", "first page", {"source": "scans/report.pdf", "page": 1},
                 "scans/report.pdf"),
        Document("scans/report.pdf#2", "Report", "second page", {"source": "scans/report.pdf", "page": 2},
                 "scans/report.pdf"),
        Document("talk.pptx#1", "talk: Begin", "Slide text", {"source": "talk.pptx", "heading": "Begin", "page": 1},
                 "talk.pptx"),
        Document("web/page.html#1", "Web: Part", "On the web.", {"source": "web/page.html", "heading": "Part"},
                 "web/page.html"),
    ]  # fmt: skip
    handbook.check_vectors()


def test_a_second_run_embeds_only_the_ten_changed_files_of_two_hundred(handbook: Handbook) -> None:
    kinds = {"md": "# Title {0}\n\ntext {0}", "txt": "text {0}", "html": "<h1>Title {0}</h1><p>text {0}</p>"}
    if has_documents:
        kinds["pdf"] = ""

    def write(number: int, text: str) -> None:
        kind = list(kinds)[number % len(kinds)]
        content = sample_files.pdf(f"text {text}") if kind == "pdf" else kinds[kind].format(text)
        handbook.write(f"{number % 7}/{number}.{kind}", content)

    for number in range(200):
        write(number, f"number {number}")
    assert handbook.ingest().embedded == 200
    for number in range(0, 200, 20):
        write(number, f"changed {number}")
    done, embedded = handbook.add()
    assert (done.read, done.unchanged, done.kept, done.embedded) == (10, 190, 190, 10)
    assert sorted(text.split()[-1] for text in embedded) == sorted(str(number) for number in range(0, 200, 20))
    assert sum("changed" in text for text in handbook.texts.values()) == 10
    handbook.check_vectors()


def test_only_the_changed_passages_of_a_file_are_embedded(handbook: Handbook) -> None:
    page = "# Rules\n\n" + "\n\n".join(f"## Part {n}\n\n" + f"rule{n} " * 60 for n in range(5))
    handbook.write("rules.md", page)
    handbook.ingest(passage_tokens=64)
    handbook.write("rules.md", page.replace("rule3", "law"))
    done, embedded = handbook.add()
    assert (done.embedded, done.kept) == (1, 4)
    assert embedded == [f"Rules: Part 3\n{'law ' * 60}".strip()]
    handbook.check_vectors()


def test_new_files_are_added_removed_ones_deleted_and_others_kept(handbook: Handbook) -> None:
    handbook.write("a/one.txt", "one")
    handbook.write("a/two.txt", "two")
    handbook.write("b/three.txt", "three")
    handbook.ingest()
    (handbook.folder / "a" / "one.txt").unlink()
    (handbook.folder / "b" / "three.txt").unlink()
    handbook.write("a/new.txt", "new")
    done, embedded = handbook.add(handbook.folder / "a")
    assert (done.read, done.gone, done.unchanged, embedded) == (1, 1, 1, ["new\nnew"])
    assert sorted(handbook.texts) == ["a/new.txt#1", "a/two.txt#1", "b/three.txt#1"]
    assert handbook.add()[0].gone == 1
    assert sorted(handbook.texts) == ["a/new.txt#1", "a/two.txt#1"]


def test_without_changes_nothing_is_built(handbook: Handbook) -> None:
    handbook.write("one.txt", "one")
    handbook.ingest()
    identity = read_description(handbook.out).identity
    inode = handbook.out.stat().st_ino
    assert not handbook.add()[0].changed
    assert (read_description(handbook.out).identity, handbook.out.stat().st_ino) == (identity, inode)


def test_unreadable_files_are_skipped_by_name_and_keep_their_passages(handbook: Handbook) -> None:
    handbook.write("good.txt", "good")
    handbook.write("bad.txt", b"\xff\xfe\x00")
    handbook.write("empty.md", "\n\n")
    done = handbook.ingest()
    assert done.skipped == {"bad.txt": "not UTF-16 text at byte 2", "empty.md": "there is no text in it"}
    handbook.write("good.txt", b"caf\xe9")
    done, _ = handbook.add()
    assert set(done.skipped) == {"bad.txt", "empty.md", "good.txt"}
    assert handbook.texts == {"good.txt#1": "good"}
    handbook.write("good.txt", "better")
    assert handbook.add()[0].read == 1
    assert handbook.texts == {"good.txt#1": "better"}


def test_files_that_cannot_be_read_are_skipped_with_the_reason(
    handbook: Handbook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "MAX_FILE_BYTES", 10)
    handbook.write("good.txt", "good")
    handbook.write("long.txt", "x" * 11)
    os.mkfifo(handbook.folder / "pipe.md")  # without blocking
    Path(os.fsdecode(os.fsencode(handbook.folder) + b"/caf\xe9.txt")).write_text("coffee")
    skipped = {
        "caf\udce9.txt": "its name is not UTF-8",
        "long.txt": "it has 11 bytes, the limit is 10",
        "pipe.md": "it is a pipe, not a regular file",
    }
    assert handbook.ingest().skipped == skipped
    assert handbook.add()[0].skipped == skipped
    assert handbook.texts == {"good.txt#1": "good"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("notes.odt", b"x", r"no file there ends in .*\.pdf"), ("bad.txt", b"caf\xe9", r"bad\.txt: not UTF-8")],
)
def test_a_folder_without_a_supported_or_readable_file_is_an_error_that_says_why(
    handbook: Handbook, name: str, content: bytes, message: str
) -> None:
    handbook.write(name, content)
    with pytest.raises(CollectionError, match=f"no documents[:;] {message}"):
        handbook.ingest()
    assert not handbook.out.exists()


def test_a_link_out_of_the_folder_is_skipped_and_one_within_it_is_read(handbook: Handbook) -> None:
    secret = handbook.folder.parent / "secret.txt"
    secret.write_text("secret")
    handbook.write("good.txt", "good")
    (handbook.folder / "within.txt").symlink_to("good.txt")
    (handbook.folder / "out.txt").symlink_to(secret)
    (handbook.folder / "loop.txt").symlink_to("loop.txt")
    done = handbook.ingest()
    assert done.skipped == {
        "loop.txt": "Too many levels of symbolic links",
        "out.txt": "it is a link to a file outside of the folder: specify that file itself",
    }
    assert handbook.texts == {"good.txt#1": "good", "within.txt#1": "good"}
    link = handbook.folder / "out.txt"
    assert handbook.ingest(link).read == 1  # an explicitly named file is always read


def test_files_of_an_unreadable_folder_are_kept(handbook: Handbook, monkeypatch: pytest.MonkeyPatch) -> None:
    handbook.write("a/one.txt", "one")
    handbook.write("b/two.txt", "two")
    handbook.ingest()
    scandir = os.scandir

    def refusing(path: str) -> object:
        if path == str(handbook.folder / "a"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    handbook.write("b/two.txt", "three")
    done, _ = handbook.add()
    assert (done.read, done.gone, done.skipped) == (1, 0, {"a": "Permission denied"})
    assert handbook.texts == {"a/one.txt#1": "one", "b/two.txt#1": "three"}


def test_hidden_and_unsupported_files_are_skipped_in_folders(handbook: Handbook) -> None:
    for name in (".git/config.txt", ".hidden.txt", "~$open.docx", "photo.jpg", "lines.jsonl", "seen.txt"):
        handbook.write(name, "text")
    assert handbook.ingest().read == 1
    assert list(handbook.texts) == ["seen.txt#1"]


def test_jsonl_documents_and_files_can_be_combined_and_both_are_updated(handbook: Handbook) -> None:
    lines = handbook.write("lines.jsonl", '{"id": "a", "text": "alpha"}\n{"id": "b", "text": "beta"}\n')
    note = handbook.write("note.txt", "note")
    handbook.ingest(lines, note)
    assert handbook.texts == {"a": "alpha", "b": "beta", "note.txt#1": "note"}
    assert CollectionDocuments(handbook.out).file_count() == 3  # as many as searches can name
    handbook.write("lines.jsonl", '{"id": "b", "text": "beta"}\n{"id": "c", "text": "gamma"}\n')
    done, embedded = handbook.add(lines)
    assert (done.embedded, done.kept, embedded) == (1, 2, ["gamma"])
    assert handbook.texts == {"note.txt#1": "note", "b": "beta", "c": "gamma"}


def test_a_changed_file_replaces_documents_that_were_written_with_its_ids(handbook: Handbook) -> None:
    lines = handbook.write("faq.jsonl", '{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n')
    handbook.ingest(lines)
    with CollectionWriter(handbook.out, embedder=HashingEmbedder(64), background=False) as writer:
        writer.upsert([UpsertDocument(id, f"written {id}") for id in ("a", "c", "d")])
    assert handbook.add(lines)[0].read == 0
    assert handbook.texts == {"b": "two", "a": "written a", "c": "written c", "d": "written d"}
    handbook.write("faq.jsonl", '{"id": "a", "text": "one"}\n{"id": "c", "text": "three"}\n')
    report, embedded = handbook.add(lines)
    assert (report.read, report.kept) == (1, 1)
    assert embedded == ["one", "three"]
    assert handbook.texts == {"a": "one", "c": "three", "d": "written d"}
    handbook.check_vectors()


def test_concurrent_runs_on_one_collection_are_serialized(handbook: Handbook) -> None:
    handbook.write("one.txt", "one")
    handbook.ingest()
    with writing(handbook.out), pytest.raises(CollectionBusy, match="has a writer already"):
        handbook.add()
    handbook.add()


def test_collections_that_cannot_be_updated_are_refused(handbook: Handbook, tmp_path: Path) -> None:
    handbook.write("one.txt", "one")
    with pytest.raises(CollectionError, match="there is no collection at"):
        handbook.add()
    bulk_load.build(np.eye(20, 8, dtype=np.float32), handbook.out, degree=4)
    with pytest.raises(BuildRefused, match="was built from vectors"):
        handbook.add()
    with pytest.raises(CollectionError, match="No such file"):
        handbook.ingest(tmp_path / "nowhere")
    with pytest.raises(CollectionError, match=r"photo.jpg: supported sources end in .jsonl, .jsonl.gz, .md"):
        handbook.ingest(handbook.write("photo.jpg", b"x"))
    with pytest.raises(BuildRefused, match=r"passage_tokens is 15, outside 16\.\."):
        handbook.ingest(passage_tokens=15)
