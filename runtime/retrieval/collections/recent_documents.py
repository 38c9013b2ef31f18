"""Documents that were read lately, in memory: a passage found again, as by the probes of an answer, needs no file."""

from collections.abc import Iterable, Sequence

from runtime.retrieval.collections.documents import Document
from runtime.retrieval.passages import size_of

LIMIT_BYTES = 16 << 20
OBJECTS_BYTES = 512  # of a document besides its texts; those of bare vectors have nearly none


class RecentDocuments:
    """Documents by row, in at most `limit_bytes`; the ones added first are forgotten first. Not thread-safe.

    A row denotes one document for ever, so none is ever outdated.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes, self._bytes = limit_bytes, 0
        self._sizes: dict[int, int] = {}  # in the order of addition
        self._documents: dict[int, Document] = {}

    def find(self, rows: Sequence[int]) -> dict[int, Document]:
        """Return those that are here."""
        known = self._documents
        return {row: known[row] for row in rows if row in known}

    def add(self, documents: Iterable[tuple[int, Document]]) -> None:
        """Add documents with their rows."""
        for row, document in documents:
            if row not in self._documents:
                size = OBJECTS_BYTES + size_of(document.id, document.title, document.text, document.attributes)
                self._documents[row], self._sizes[row] = document, size
                self._bytes += size
        while self._bytes > self._limit_bytes:
            oldest = next(iter(self._sizes))
            self._bytes -= self._sizes.pop(oldest)
            del self._documents[oldest]
