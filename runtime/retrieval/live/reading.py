"""The documents of a live collection for who answers with them: as of now, whatever the pool has found a moment ago."""

import threading
from collections.abc import Sequence
from pathlib import Path

from runtime.retrieval.collections.documents import Document
from runtime.retrieval.live.checksums import LiveChecksums
from runtime.retrieval.live.documents import StoredDocument
from runtime.retrieval.live.manifest import Description
from runtime.retrieval.live.reader import LiveReader
from runtime.retrieval.live.segment import DOCUMENTS
from runtime.retrieval.passages import Attributes


class LiveDocuments:
    """As `DocumentStore`, but a row may be gone. Any number of threads may ask."""

    def __init__(self, directory: Path) -> None:
        """Raises `CollectionError`."""
        self.path, self._lock = directory, threading.Lock()
        self._reader = LiveReader(directory, beside=True, compared=(DOCUMENTS,))

    @property
    def checksums(self) -> LiveChecksums:
        """Of the documents alone."""
        return self._reader.checksums

    @property
    def description(self) -> Description:
        return self._reader.description

    @property
    def size(self) -> int:
        """Documents that are there."""
        return self._reader.state.count

    def get(self, rows: Sequence[int]) -> list[Document | None]:
        """The documents of these rows, in their order; None for a deleted one. Raises `CollectionError`."""
        with self._lock:
            self._reader.poll()
            state = self._reader.state
            if max(rows, default=-1) >= state.growing.next_row:  # found in a segment that is not open here yet
                self._reader.catch_up()
            gone = state.deleted(rows)
            found = state.documents(rows)
        return [
            None if one is None or dead else Document(one.id, one.title, one.text, attributes_of(one))
            for one, dead in zip(found, gone, strict=True)
        ]

    def close(self) -> None:
        self._reader.close()


def attributes_of(document: StoredDocument) -> Attributes:
    """As passages have them."""
    return {
        name: value if isinstance(value, str | int | float) else list(value)
        for name, value in document.attributes.items()
    }
