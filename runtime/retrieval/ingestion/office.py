"""Readers of Word, PowerPoint and PDF files, by python-docx, python-pptx and pypdf."""

import io
import logging
import re
import zipfile
from typing import Any

from runtime.retrieval.ingestion.sections import Outline, ParsedFile, Section, UnreadableFile

MAX_UNPACKED_BYTES = 512 << 20
MAX_ENTRIES = 20_000


def read_docx(content: bytes) -> ParsedFile:
    """Return sections by headings, with a table's rows as lines."""
    _check_archive(content)
    from docx import Document  # of the extra [documents]
    from docx.table import Table

    document, outline = Document(io.BytesIO(content)), Outline()
    for item in document.iter_inner_content():
        if isinstance(item, Table):
            outline.text(_table(item))
            continue
        style = str(getattr(item.style, "name", "") or "")
        if style == "Title":
            outline.heading(1, item.text)
        elif heading := re.fullmatch(r"Heading ([1-9])", style):
            outline.heading(int(heading[1]) + bool(outline.title), item.text)
        else:
            outline.text(item.text)
    read = outline.read()
    return ParsedFile(read.title or (document.core_properties.title or "").strip(), read.sections)


def read_pptx(content: bytes) -> ParsedFile:
    """Return a section per slide: its number as the page, its title as the heading, its notes last."""
    _check_archive(content)
    from pptx import Presentation  # of the extra [documents]

    presentation, sections = Presentation(io.BytesIO(content)), []
    for number, slide in enumerate(presentation.slides, 1):
        title = slide.shapes.title
        texts = [_shape(shape) for shape in slide.shapes if title is None or shape.shape_id != title.shape_id]
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            texts.append(slide.notes_slide.notes_text_frame.text)
        heading = " ".join(title.text_frame.text.split()) if title is not None else ""
        body = "\n\n".join(text for text in texts if text.strip())
        sections.append(Section(body or heading, heading, number))
    return ParsedFile((presentation.core_properties.title or "").strip(), sections)


def _shape(shape: Any) -> str:
    if getattr(shape, "has_table", False):
        return _table(shape.table)
    if hasattr(shape, "shapes"):  # a group
        return "\n\n".join(filter(None, map(_shape, shape.shapes)))
    return str(shape.text_frame.text) if shape.has_text_frame else ""


def _table(table: Any) -> str:
    return "\n".join(" | ".join(" ".join(cell.text.split()) for cell in row.cells) for row in table.rows)


def _check_archive(content: bytes) -> None:
    """Raise `UnreadableFile` for a ZIP bomb, before anything is unpacked."""
    try:
        entries = zipfile.ZipFile(io.BytesIO(content)).infolist()
    except zipfile.BadZipFile as error:
        raise UnreadableFile("it is not a ZIP archive") from error
    unpacked = sum(entry.file_size for entry in entries)
    if len(entries) > MAX_ENTRIES or unpacked > MAX_UNPACKED_BYTES:
        raise UnreadableFile(f"it unpacks to {unpacked:,} bytes in {len(entries):,} parts, the limits are "
                         f"{MAX_UNPACKED_BYTES:,} and {MAX_ENTRIES:,}")  # fmt: skip


# ---- PDF, by pypdf: a section per page


MAX_PAGES = 10_000


def read_pdf(content: bytes) -> ParsedFile:
    """Return a section per page. Raises `UnreadableFile` for a file with a password, without text (a scan), or with too
    many pages."""
    from pypdf import PdfReader  # of the extra [documents]

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it logs every irregularity of a readable file
    reader = PdfReader(io.BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnreadableFile("it has a password")
    if len(reader.pages) > MAX_PAGES:
        raise UnreadableFile(f"it has {len(reader.pages):,} pages, the limit is {MAX_PAGES:,}")
    sections = [Section(page.extract_text(), page=number) for number, page in enumerate(reader.pages, 1)]
    if not any(section.text.strip() for section in sections):
        raise UnreadableFile("it contains no text: is it a scan?")
    title = reader.metadata.title if reader.metadata else None
    return ParsedFile(str(title or "").strip(), sections)
