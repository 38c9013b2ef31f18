"""The growing segment: the rows of the log in memory, searched exactly (the memtable of an LSM tree)."""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from gpu.index.rows import Rows as Vectors
from gpu.index.rows import aligned_empty, code_shape
from runtime.errors import CollectionError
from runtime.retrieval.attributes.columns import Bits, Columns
from runtime.retrieval.attributes.schema import Schema
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.log import Upsert, decode_vectors
from runtime.retrieval.collections.part import OnDocument, Part, Rows, RowSet, ignore
from runtime.retrieval.keywords.index import Postings, Searched

_INITIAL_ROWS = 8192  # untouched pages take no memory
_PART = 64  # documents that are appended at once, with up to 256 strings in each list: some ms


class GrowingSegment(Part):
    """Consecutive rows from `first` on, which are appended.

    postings: the keyword index of the first rows; searches add the others.
    """

    def __init__(self, first: int, dim: int, metric: str) -> None:
        super().__init__(0)
        self.first = first
        self.documents: list[Document] = []
        self.postings, self._adding = Postings(), threading.Lock()
        self._dim, self._metric = dim, metric
        self._columns = Columns()
        self._matrix = self._allocate(_INITIAL_ROWS)
        self._by_id: dict[str, int] = {}
        self._replaced: dict[int, int] = {}  # the row that each row replaced

    @property
    def next_row(self) -> int:
        return self.first + self.size

    @property
    def rows(self) -> Rows:
        return np.arange(self.first, self.next_row)

    def locate(self, rows: Rows) -> tuple[Bits, Rows]:
        here = (rows >= self.first) & (rows < self.next_row)
        return here, rows[here] - self.first

    @property
    def all_vectors(self) -> Vectors:
        """The vectors for exact search, which reads the first `size`."""
        centre = np.zeros(self._dim, np.float32)
        return Vectors(self._metric, "float32", self._dim, self._matrix, centre, 1.0)

    def vectors(self, positions: Rows) -> NDArray[np.float32]:
        vectors: NDArray[np.float32] = self._matrix[positions, : self._dim]
        return vectors

    def prepare(self, operation: Upsert, schema: Schema) -> Iterator[None]:
        """Do the work of `append` in parts; the rows are not there before it. Raises `CollectionError` if they are not
        the next rows."""
        if operation.first != self.next_row:
            raise CollectionError(f"the log has row {operation.first} instead of row {self.next_row}")
        total = self.size + len(operation.ids)
        self._reserve(total)
        self._matrix[self.size : total, : self._dim] = decode_vectors(operation, self._dim)
        parts = zip(operation.ids, operation.titles, operation.texts, operation.attributes, strict=True)
        documents = (Document(*one, row=row) for row, one in enumerate(parts, operation.first))
        while part := list(islice(documents, _PART)):
            self.documents += part
            self._columns.append([one.attributes for one in part], schema)
            yield

    def append(self, operation: Upsert) -> None:
        """Append the rows of an upsert, after all of `prepare`."""
        total = self.size + len(operation.ids)
        self._by_id.update(zip(operation.ids, range(self.size, total), strict=True))
        self._replaced.update(zip(operation.successors, operation.replaced, strict=False))
        self._alive = self._alive.extended(len(operation.ids))

    def replaced_by(self, row: int, before: int) -> int:
        """Return the last row before `before` that a row replaced, at once or one after the other, as far as growing
        rows tell; the row itself if it is before; -1: none."""
        while row >= before:
            row = self._replaced.get(row, -1)
        return row

    def add_postings(self, count: int, more: Callable[[], bool]) -> None:
        """Add rows to the keyword index until it has `count`, or after one or more `more` is false. Thread-safe."""
        while len(self.postings) < count:
            with self._adding:
                if len(self.postings) < count:
                    document = self.documents[len(self.postings)]
                    self.postings.add(document.title, document.text)
            if not more():
                break

    def searched(self, visible: Bits) -> Searched:
        return Searched(self.postings, self.rows, visible[: len(self.postings)])

    def document_lookup(self) -> Callable[[int], Document | None]:
        first, documents = self.first, self.documents
        return lambda row: documents[row - first] if 0 <= row - first < len(documents) else None

    def find(self, rows: Sequence[int], on_read: OnDocument = ignore) -> dict[int, Document]:
        first, documents = self.first, self.documents
        by_row = {row: documents[row - first] for row in rows if 0 <= row - first < len(documents)}
        for document in by_row.values():
            on_read(document)
        return by_row

    def rows_of(self, ids: Sequence[str]) -> dict[str, int]:
        return {name: self.first + self._by_id[name] for name in ids if name in self._by_id}

    @property
    def columns(self) -> Columns:
        return self._columns

    def tail(self, first: int, schema: Schema) -> "GrowingSegment":
        """Return the segment that remains when the rows before `first` are sealed."""
        if first <= self.first:
            return self
        rest = GrowingSegment(first, self._dim, self._metric)
        begin = first - self.first
        if begin < self.size:
            rest.documents = self.documents[begin : self.size]
            rest._columns.append([document.attributes for document in rest.documents], schema)
            rest._by_id = {document.id: at for at, document in enumerate(rest.documents)}
            rest._replaced = {row: before for row, before in self._replaced.items() if row >= first}
            rest._reserve(len(rest.documents))
            rest._alive = RowSet.of(self._alive.mask[begin:])
            rest._matrix[: rest.size] = self._matrix[begin : self.size]
        return rest

    def _reserve(self, total: int) -> None:
        """Make room for so many rows in all."""
        if total > len(self._matrix):
            matrix = self._allocate(max(total, 2 * len(self._matrix)))
            matrix[: self.size] = self._matrix[: self.size]
            self._matrix = matrix  # running searches keep the old one

    def _allocate(self, count: int) -> NDArray[np.float32]:
        matrix: NDArray[np.float32] = aligned_empty(*code_shape(count, self._dim, "float32"))
        matrix[:, self._dim :] = 0
        return matrix
