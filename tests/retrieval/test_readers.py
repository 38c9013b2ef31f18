"""File readers: title, sections with headings and pages, and reasons for unreadable files."""

import importlib.util
import io
import zipfile

import pytest

from runtime.errors import BuildRefused
from runtime.retrieval.ingestion import office
from runtime.retrieval.ingestion.readers import check_packages, read_file
from runtime.retrieval.ingestion.sections import Section, UnreadableFile
from tests.retrieval import sample_files

needs = {
    suffix: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed: [documents]")
    for suffix, name in {"pdf": "pypdf", "docx": "docx", "pptx": "pptx"}.items()
}

MARKDOWN = """---
title: "The handbook"
---
Before all headings.

# Leave
## Parental
Twelve weeks.

```sh
# no heading
```

Setext
------
Under it.
# Pay
- a list
---
* another
"""

HTML = """<!doctype html><html><head><title> The  handbook </title><style>p {}</style></head><body>
<nav>Home</nav><h1>The handbook</h1><p>Before &amp; after<br>a break</p><script>no()</script>
<h2>Leave</h2><ul><li>twelve <b>weeks</b></li><li>paid</li></ul><h3>Parental</h3>
<table><tr><td>a</td><td>b</td></tr></table>
<pre>  keep
    this</pre><h2>Pay</h2><p>Monthly."""


def test_markdown_is_split_at_headings() -> None:
    read = read_file("a.md", MARKDOWN.encode())
    assert read.title == "The handbook"
    assert read.sections == [
        Section("Before all headings."),
        Section("Twelve weeks.\n\n```sh\n# no heading\n```", "Leave › Parental"),
        Section("Under it.", "Leave › Setext"),
        Section("- a list\n---\n* another", "Pay"),
    ]


def test_html_is_reduced_to_visible_text() -> None:
    read = read_file("a.html", HTML.encode())
    assert read.title == "The handbook"
    assert read.sections == [
        Section("Before & after\na break"),
        Section("- twelve weeks\n- paid", "Leave"),
        Section("a b\n\n  keep\n    this", "Leave › Parental"),
        Section("Monthly.", "Pay"),
    ]


def test_html_is_decoded_by_its_declared_encoding() -> None:
    page = '<meta charset="iso-8859-1"><p>caf\u00e9</p>'
    assert read_file("a.htm", page.encode("latin-1")).sections == [Section("café")]
    assert read_file("a.htm", page.replace("iso-8859-1", "no-such").encode()).sections == [Section("café")]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", ["Leave: 12 weeks.\n", "Отпуск: двенадцать недель в году.\n", "café au lait " * 900])
def test_utf16_without_a_byte_order_mark_is_known_by_its_zero_bytes(encoding: str, text: str) -> None:
    content = text.encode(encoding)
    assert read_file("a.txt", content).sections == [Section(text)]
    with pytest.raises(UnreadableFile, match="not UTF-16 text at byte"):
        read_file("a.txt", content + b"x")


def test_a_stray_zero_byte_does_not_change_the_encoding() -> None:
    assert read_file("a.txt", b"one line\n" * 20 + b"\0" + b"another\n" * 20).sections[0].text.startswith("one line\n")


@needs["pptx"]
def test_a_presentation_has_one_section_per_slide_with_notes() -> None:
    read = read_file("a.pptx", sample_files.pptx(("Leave", "Twelve weeks.", "say it twice"), ("Pay", "Monthly.", "")))
    assert read.sections == [
        Section("Twelve weeks.\n\nsay it twice", "Leave", 1),
        Section("Monthly.", "Pay", 2),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", "not UTF-8 text at byte 3"),
        ("a.txt", "東京都千代田区".encode("utf-16-le"), "not UTF-8 text"),
        pytest.param("a.pdf", b"%PDF-1.4 and no more", ".", marks=needs["pdf"]),
        pytest.param("a.pdf", sample_files.pdf("", ""), "is it a scan", marks=needs["pdf"]),
        ("a.docx", b"no archive", "not a ZIP archive"),
        pytest.param("a.pptx", b"PK\x05\x06" + bytes(18), ".", marks=needs["pptx"]),
    ],
)
def test_an_unreadable_file_has_a_one_line_reason(name: str, content: bytes, message: str) -> None:
    with pytest.raises(UnreadableFile, match=message) as raised:
        read_file(name, content)
    assert str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_decompression_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", bytes(10_000))
    monkeypatch.setattr(office, "MAX_UNPACKED_BYTES", 9_999)
    with pytest.raises(UnreadableFile, match="unpacks to 10,000 bytes in 1 parts, the limits are 9,999"):
        read_file("a.docx", written.getvalue())


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_packages(["a.md", "b.html"])
    with pytest.raises(BuildRefused, match=r"\.pdf files need .*\[documents\]: pip install pypdf"):
        check_packages(["a.md", "B.PDF"])
