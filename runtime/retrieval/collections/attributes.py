"""Columns of the attributes of the documents that a collection is built from, for filters."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from runtime.errors import CollectionError, InvalidDocument
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.attributes.schema import Schema, extend_schema
from runtime.retrieval.collections.description import ATTRIBUTES
from runtime.retrieval.collections.documents import Document


class AttributeCollector:
    """Collects the attributes of a stream of documents into columns, of each shard its own."""

    def __init__(self, declared: Schema, shards: int) -> None:
        """declared: attributes whose types are given."""
        self._columns, self.schema = [Columns() for _ in range(shards)], dict(declared)

    def collect(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents unchanged. Raises `CollectionError` if an attribute's type differs between documents."""
        for number, document in enumerate(documents):
            if document.attributes:
                try:
                    self.schema = extend_schema(self.schema, document.attributes)
                except InvalidDocument as error:
                    raise CollectionError(f"document {number + 1}, {document.id!r}: {error.message}") from error
            self._columns[number % len(self._columns)].append([document.attributes], self.schema)
            yield document

    def write(self, folders: Sequence[Path]) -> None:
        """Write the columns of each shard to its folder, if any document has an attribute."""
        for columns, folder in zip(self._columns, folders, strict=True):
            if any(one.schema for one in self._columns):
                (folder / ATTRIBUTES).write_bytes(columns.encode())
