"""The files of a collection's documents, in an order that pages can be cut from.

A document belongs to the file that its attribute `source` names, as `trinity index build` records it; one without is a
file of its own, with its id. Files come in the order of their names, then documents without one by row.
"""

from bisect import bisect_left
from collections.abc import Container, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.part import Rows
from runtime.retrieval.collections.state import State
from runtime.retrieval.passages import Attributes

SOURCE = "source"


class CollectionFile(NamedTuple):
    """A file. `attributes`: the document's if it is a document, otherwise the file's name."""

    id: str
    attributes: Attributes
    is_document: bool


def file_of(document: Document) -> CollectionFile:
    """Return the file of a document."""
    source = document.attributes.get(SOURCE)
    return _named(source) if isinstance(source, str) else CollectionFile(document.id, document.attributes, True)


def _named(name: str) -> CollectionFile:
    return CollectionFile(name, {SOURCE: name}, is_document=False)


class Files:
    """The files of a collection as of now. Methods block, for longer the more rows there are.

    hidden: files that are not listed. pending: such that are nevertheless, behind all others, in this order; they may
    have no documents yet.
    """

    def __init__(self, state: State, hidden: Container[str] = (), pending: Sequence[str] = ()) -> None:
        """Raises `CollectionError` for damaged attributes."""
        self._state, snapshot = state, state.snapshot()
        self._hidden, self._pending = hidden, pending
        self._parts: list[tuple[Rows, Sequence[str], NDArray[np.int32]]] = []
        """The rows that are not deleted, names in order, and the number of each row's name, from 1 on; 0: none."""
        for part, alive in zip(snapshot.parts, snapshot.alive, strict=True):
            names, numbers = part.columns.strings(SOURCE, alive.size)
            self._parts.append((part.rows[: alive.size][alive.mask], names, numbers[alive.mask]))

    def __len__(self) -> int:
        return len(self._names) + len(self._unnamed) + len(self._pending)

    @cached_property
    def _names(self) -> list[str]:
        counts = ((names, np.bincount(numbers)) for _, names, numbers in self._parts)
        present = {names[at - 1] for names, count in counts for at in np.flatnonzero(count).tolist() if at}
        return sorted(name for name in present if name not in self._hidden)

    @cached_property
    def _unnamed(self) -> Rows:
        return np.sort(np.concatenate([rows[numbers == 0] for rows, _, numbers in self._parts]))

    def rows_of(self, file: str) -> list[int]:
        """Return the rows of a file's documents, ascending; none if there is no such file."""
        of_file: list[int] = []
        for rows, names, numbers in self._parts:
            at = bisect_left(names, file)
            if at < len(names) and names[at] == file:
                of_file += rows[numbers == at + 1].tolist()
        row = self._state.rows_of([file]).get(file)
        return [row] if not of_file and row is not None and row in self._unnamed else sorted(of_file)

    def page(self, limit: int, after: str, before: str, *, descending: bool) -> tuple[list[CollectionFile], bool]:
        """Return one page of the files, and whether more follow. after, before: files, "": none.

        Raises `InvalidRequest` for one that does not exist.
        """
        begin, end = (before, after) if descending else (after, before)
        low = self._place(begin, "before" if descending else "after") + 1 if begin else 0
        high = self._place(end, "after" if descending else "before") if end else len(self)
        between = range(low, max(low, high))
        page = between[-limit:] if descending != (bool(before) and not after) else between[:limit]
        return self._files(page[::-1] if descending else page), len(between) > limit

    def _place(self, file: str, param: str) -> int:
        """Return the place of a file in the order of all."""
        at = bisect_left(self._names, file)
        if self._names[at : at + 1] == [file]:
            return at
        if file in self._pending:
            return len(self) - len(self._pending) + self._pending.index(file)
        if not (rows := self.rows_of(file)):
            raise InvalidRequest(f"the collection has no file {file[:128]!r} to list others {param}", param)
        return len(self._names) + int(np.searchsorted(self._unnamed, rows[0]))

    def _files(self, places: range) -> list[CollectionFile]:
        count, end = len(self._names), len(self) - len(self._pending)
        rows = {at: int(self._unnamed[at - count]) for at in places if count <= at < end}
        documents = dict(zip(rows, self._state.documents([*rows.values()]), strict=True))

        def entry(at: int) -> CollectionFile | None:
            if at in documents:
                document = documents[at]
                return None if document is None else file_of(document)
            return _named(self._names[at] if at < count else self._pending[at - end])

        return [file for file in map(entry, places) if file is not None]
