"""Documents that were read lately, in memory: a passage found again, as by the probes of an answer, needs no file."""

from collections.abc import Iterable, Sequence

import msgspec

from runtime.retrieval.collections.documents import Document
from runtime.retrieval.passages import size_of

LIMIT_BYTES = 16 << 20
OBJECTS_BYTES = 600  # of a document besides its texts; those of bare vectors have nearly none
_NEVER = -1


class Recent(msgspec.Struct, eq=False):
    """A document in memory and the bytes of its texts. `shown_at`: the collection's sequence at which it was known to
    be neither deleted nor replaced."""

    document: Document
    size: int
    shown_at: int = _NEVER


class RecentDocuments:
    """Documents by row, in at most `limit_bytes`; the ones added first are forgotten first. Not thread-safe.

    A row denotes one document for ever, so none is ever outdated.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes, self._bytes = limit_bytes, 0
        self._documents: dict[int, Recent] = {}  # in the order of addition

    def find(self, rows: Sequence[int]) -> dict[int, Recent]:
        """Return those that are here."""
        known = self._documents
        return {row: known[row] for row in rows if row in known}

    def add(self, documents: Iterable[tuple[int, Document]]) -> None:
        """Add documents with their rows."""
        for row, document in documents:
            if row not in self._documents:
                size = size_of(document.id, document.title, document.text, document.attributes)
                self._documents[row] = Recent(document, size)
                self._bytes += OBJECTS_BYTES + size
        while self._bytes > self._limit_bytes:
            oldest = self._documents.pop(next(iter(self._documents)))
            self._bytes -= OBJECTS_BYTES + oldest.size
