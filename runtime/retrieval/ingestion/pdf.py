"""PDF, by pypdf: a section a page."""

import io
import logging

from runtime.retrieval.ingestion.sections import Read, Section, Unreadable

MAX_PAGES = 10_000


def read_pdf(content: bytes) -> Read:
    """The pages' texts. Raises `Unreadable` for one with a password, without text (a scan), or with too many pages."""
    from pypdf import PdfReader  # of the extra [documents]

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it tells every oddity of a file that it can read all the same
    reader = PdfReader(io.BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        raise Unreadable("it has a password")
    if len(reader.pages) > MAX_PAGES:
        raise Unreadable(f"it has {len(reader.pages):,} pages, the limit is {MAX_PAGES:,}")
    sections = [Section(page.extract_text(), page=number) for number, page in enumerate(reader.pages, 1)]
    if not any(section.text.strip() for section in sections):
        raise Unreadable("there is no text in it: is it a scan?")
    title = reader.metadata.title if reader.metadata else None
    return Read(str(title or "").strip(), sections)
