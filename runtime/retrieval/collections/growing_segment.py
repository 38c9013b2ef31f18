"""The growing segment: the rows of the log in memory, searched exactly (the memtable of an LSM tree)."""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from gpu.index.rows import Rows, aligned_empty, code_shape
from runtime.errors import CollectionError
from runtime.retrieval.attributes.columns import Bits, Columns
from runtime.retrieval.attributes.evaluation import Work
from runtime.retrieval.attributes.filters import AttributeBinding, Filter
from runtime.retrieval.attributes.schema import Schema
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.operations import Upsert, decode_vectors

_INITIAL_ROWS = 8192  # untouched pages take no memory
_PART = 64  # documents that are appended at once, with up to 256 strings in each list: some ms


class GrowingSegment:
    """The `count` consecutive rows from `first` on."""

    def __init__(self, first: int, dim: int, metric: str) -> None:
        self.first, self.count = first, 0
        self.documents: list[Document] = []
        self._dim, self._metric = dim, metric
        self.columns = Columns()
        self._matrix = self._allocate(_INITIAL_ROWS)
        self._alive = np.ones(_INITIAL_ROWS, bool)
        self._by_id: dict[str, int] = {}

    @property
    def next_row(self) -> int:
        return self.first + self.count

    @property
    def alive(self) -> Bits:
        """Bool [count], whether each row is not deleted. A view."""
        return self._alive[: self.count]

    @property
    def rows(self) -> Rows:
        """The vectors as `Rows` for exact search, which reads the first `count`."""
        return Rows(self._metric, "float32", self._dim, self._matrix, np.zeros(self._dim, np.float32), 1.0)

    def vectors(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors at some positions, float32 [n, d]."""
        found: NDArray[np.float32] = self._matrix[positions, : self._dim]
        return found

    def append(self, operation: Upsert, schema: Schema) -> None:
        """Append the rows of an upsert. Raises `CollectionError` if they are not the next rows."""
        for _ in self.prepare(operation, schema):
            pass
        self.append_prepared(operation)

    def prepare(self, operation: Upsert, schema: Schema) -> Iterator[None]:
        """Do the work of `append` in parts; the rows are not there before `append_prepared`."""
        if operation.first != self.next_row:
            raise CollectionError(f"the log has row {operation.first} instead of row {self.next_row}")
        total = self.count + len(operation.ids)
        if total > len(self._matrix):
            matrix = self._allocate(max(total, 2 * len(self._matrix)))
            matrix[: self.count] = self._matrix[: self.count]
            alive = np.ones(len(matrix), bool)
            alive[: self.count] = self._alive[: self.count]
            self._matrix, self._alive = matrix, alive  # running searches keep the old arrays
        self._matrix[self.count : total, : self._dim] = decode_vectors(operation, self._dim)
        parts = zip(operation.ids, operation.titles, operation.texts, operation.attributes, strict=True)
        documents = (Document(*one, row=row) for row, one in enumerate(parts, operation.first))
        while part := list(islice(documents, _PART)):
            self.documents += part
            self.columns.append([one.attributes for one in part], schema)
            yield

    def append_prepared(self, operation: Upsert) -> None:
        """Append the rows of an upsert after all of `prepare`."""
        total = self.count + len(operation.ids)
        self._by_id.update(zip(operation.ids, range(self.count, total), strict=True))
        self.count = total

    def document_lookup(self) -> Callable[[int], Document | None]:
        """Return a lookup of the documents by row that does not keep the vectors in memory."""
        first, documents = self.first, self.documents
        return lambda row: documents[row - first] if 0 <= row - first < len(documents) else None

    def delete(self, rows: NDArray[np.int64]) -> None:
        """Mark those of the rows that are in this segment as deleted."""
        here = rows[(rows >= self.first) & (rows < self.next_row)]
        self._alive[here - self.first] = False

    def row_of(self, name: str) -> int | None:
        """Return the row of a document, or None if it is not here or deleted."""
        position = self._by_id.get(name)
        return None if position is None or not self._alive[position] else self.first + position

    def passing(self, filter: Filter, work: Work | None = None, count: int | None = None) -> Bits:
        """Return whether each of the first `count` rows (default: all) passes a filter, bool [count].

        On any thread: rows may be appended meanwhile.
        """
        return self.columns.matching(filter, work, self.count if count is None else count)

    def held_by(self, owner: AttributeBinding) -> Bits:
        return self.columns.held_by(owner)

    def tail(self, first: int, schema: Schema) -> "GrowingSegment":
        """Return the segment that remains when the rows before `first` are sealed."""
        if first <= self.first:
            return self
        rest = GrowingSegment(first, self._dim, self._metric)
        begin = rest.first - self.first
        if begin < self.count:
            documents = self.documents[begin:]
            operation = Upsert(
                rest.first,
                [document.id for document in documents],
                [document.title for document in documents],
                [document.text for document in documents],
                [dict(document.attributes) for document in documents],
                np.ascontiguousarray(self._matrix[begin : self.count, : self._dim]).tobytes(),
                [],
            )
            rest.append(operation, schema)
            rest._alive[: rest.count] = self._alive[begin : self.count]
        return rest

    def _allocate(self, count: int) -> NDArray[np.float32]:
        matrix: NDArray[np.float32] = aligned_empty(*code_shape(count, self._dim, "float32"))
        matrix[:, self._dim :] = 0
        return matrix
