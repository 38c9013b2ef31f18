"""The files of a collection's documents, in an order that pages can be cut from.

A document belongs to the file that its attribute `source` names, as `trinity index build` records it; one without is a
file of its own, with its id. Files come in the order of their names, then documents without one by row.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import chain, groupby, islice
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest
from runtime.retrieval.attributes.columns import Bits
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.state import State
from runtime.retrieval.passages import Attributes

SOURCE = "source"
_READ_AT_ONCE = 32  # documents
Rows = NDArray[np.int64]


class CollectionFile(NamedTuple):
    """A file. `attributes`: the document's if it is a document, otherwise the file's name."""

    id: str
    attributes: Attributes
    is_document: bool

    @classmethod
    def of(cls, document: Document) -> Self:
        """Return the file of a document."""
        if isinstance(source := document.attributes.get(SOURCE), str):
            return cls.of_name(source)
        return cls(document.id, document.attributes, is_document=True)

    @classmethod
    def of_name(cls, name: str) -> Self:
        return cls(name, {SOURCE: name}, is_document=False)


_Place = str | int | None
"""Between files: at one with this name, at the document of this row, or at an end."""


class _Part(NamedTuple):
    """Rows of a segment, or the growing ones. `names`: ascending; `named`: the number of each row's name, from 1 on, 0
    for none."""

    rows: Rows
    alive: Bits
    names: Sequence[str]
    named: NDArray[np.int32]

    def of_name(self, name: str) -> Rows:
        at = bisect_left(self.names, name)
        has = at < len(self.names) and self.names[at] == name
        found: Rows = self.rows[self.alive & (self.named == at + 1)] if has else self.rows[:0]
        return found

    def unnamed(self) -> Rows:
        found: Rows = self.rows[self.alive & (self.named == 0)]
        return found

    def occurring(self, low: _Place, high: _Place, *, descending: bool) -> Iterator[str]:
        """Yield the names of rows that are not deleted, between two places."""
        size = len(self.names)
        begin = 0 if low is None else bisect_right(self.names, low) if isinstance(low, str) else size
        end = bisect_left(self.names, high) if isinstance(high, str) else size
        counts = np.bincount(self.named[self.alive], minlength=size + 1)[1:]
        found = begin + np.flatnonzero(counts[begin:end])
        return (self.names[at] for at in (found[::-1] if descending else found))


class Files:
    """The files of a collection as of now. Methods block, for longer the more rows there are."""

    def __init__(self, state: State) -> None:
        """Raises `CollectionError` for damaged attributes."""
        self._state, found = state, state.snapshot()
        self._parts = [
            _Part(part.rows[: len(alive)], alive, *part.columns.strings(SOURCE, len(alive)))
            for part, alive in zip(found.parts, found.alive, strict=True)
        ]

    def rows_of(self, file: str) -> list[int]:
        """Return the rows of a file's documents, ascending; none if there is no such file."""
        found: list[int] = np.sort(np.concatenate([part.of_name(file) for part in self._parts])).tolist()
        if found:
            return found
        row = self._state.rows_of([file]).get(file, -1)
        return [row] if any(row in part.unnamed() for part in self._parts) else []

    def page(self, limit: int, after: str, before: str, *, descending: bool) -> tuple[list[CollectionFile], bool]:
        """Return one page of the files, and whether more follow. after, before: files, "": none.

        Raises `InvalidRequest` for one that does not exist.
        """
        begin, end = self._place(after, "after"), self._place(before, "before")
        low, high = (end, begin) if descending else (begin, end)
        backwards = bool(before) and not after
        found = list(islice(self._between(low, high, descending=descending != backwards), limit + 1))
        page = found[:limit]
        return page[::-1] if backwards else page, len(found) > limit

    def _place(self, file: str, param: str) -> _Place:
        if not file:
            return None
        if any(len(part.of_name(file)) for part in self._parts):
            return file
        if rows := self.rows_of(file):
            return rows[0]
        raise InvalidRequest(f"the collection has no file {file[:128]!r} to list others {param}", param)

    def _between(self, low: _Place, high: _Place, *, descending: bool) -> Iterator[CollectionFile]:
        parts = [part.occurring(low, high, descending=descending) for part in self._parts]
        names = (CollectionFile.of_name(name) for name, _ in groupby(merge(*parts, reverse=descending)))
        unnamed = self._unnamed(low, high, descending=descending)
        return chain(unnamed, names) if descending else chain(names, unnamed)

    def _unnamed(self, low: _Place, high: _Place, *, descending: bool) -> Iterator[CollectionFile]:
        rows = np.sort(np.concatenate([part.unnamed() for part in self._parts]))
        begin = np.searchsorted(rows, low, "right") if isinstance(low, int) else 0
        end = np.searchsorted(rows, high) if isinstance(high, int) else len(rows) if high is None else 0
        found = rows[begin:end][::-1] if descending else rows[begin:end]
        for at in range(0, len(found), _READ_AT_ONCE):
            read = self._state.documents(found[at : at + _READ_AT_ONCE].tolist())
            yield from (CollectionFile.of(one) for one in read if one is not None)
