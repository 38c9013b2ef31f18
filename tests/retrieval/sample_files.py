"""Small files of every supported type, and an embedder that counts."""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from runtime.retrieval.collections.description import (
    KEYWORDS,
    MANIFEST,
    checksum_file,
    encode_with_checksum,
)
from runtime.retrieval.collections.segment import CONTENTS, Contents, segment_path
from runtime.retrieval.collections.upgrade import read_manifest
from runtime.retrieval.embedding.embedder import HashingEmbedder, TextKind, Vectors


class CountingEmbedder(HashingEmbedder):
    """Records the passages that it embeds."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__(dim)
        self.passages: list[str] = []

    def embed(self, texts: Sequence[str], kind: TextKind = "query") -> Vectors:
        if kind == "passage":
            self.passages += texts
        return super().embed(texts, kind)


def pdf(*pages: str, title: str = "") -> bytes:
    """Return a PDF with a line of text on each page."""
    streams = [f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() if text else b"" for text in pages]
    first = 4
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>"
        % (len(pages), b" ".join(b"%d 0 R" % (first + 2 * n) for n in range(len(pages)))),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, stream in enumerate(streams):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (first + 2 * number + 1)
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
    objects.append(f"<< /Title ({title}) >>".encode())
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    begin = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size %d /Root 1 0 R /Info %d 0 R >>\n" % (len(objects) + 1, len(objects))
    return bytes(out + b"startxref\n%d\n%%%%EOF\n" % begin)


def docx(title: str, *sections: tuple[str, str]) -> bytes:
    """Return a Word file: a title, headings with a paragraph each, and a table at the end."""
    from docx import Document

    document = Document()
    document.add_heading(title, 0)
    for heading, text in sections:
        document.add_heading(heading, 1)
        document.add_paragraph(text)
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "left", "right"
    written = io.BytesIO()
    document.save(written)
    return written.getvalue()


def pptx(*slides: tuple[str, str, str]) -> bytes:
    """Return a presentation with a title, text and notes per slide."""
    from pptx import Presentation

    presentation = Presentation()
    for title, text, notes in slides:
        slide = presentation.slides.add_slide(presentation.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = text
        slide.notes_slide.notes_text_frame.text = notes
    written = io.BytesIO()
    presentation.save(written)
    return written.getvalue()


def docx_of(body: str) -> bytes:
    """Return a Word file with the given XML body."""
    name, space = "word/document.xml", "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    written = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(docx("Title"))) as whole,
        zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for entry in whole.namelist():
            replaced = f'<w:document xmlns:w="{space}"><w:body>{body}</w:body></w:document>'.encode()
            out.writestr(entry, replaced if entry == name else whole.read(entry))
    return written.getvalue()


def without_words(path: Path) -> None:
    """Remove the keyword index from a bulk load, as in those of older versions."""
    found, segments = read_manifest(path), []
    for info in found.segments:
        folder = segment_path(path, info)
        (folder / KEYWORDS).unlink()
        contents = msgspec.json.decode((folder / CONTENTS).read_bytes(), type=Contents)
        del contents.files[KEYWORDS]
        (folder / CONTENTS).write_bytes(msgspec.json.encode(contents))
        segments.append(msgspec.structs.replace(info, sha256=checksum_file(folder / CONTENTS).sha256))
    (path / MANIFEST).write_bytes(encode_with_checksum(msgspec.structs.replace(found, segments=segments)))
