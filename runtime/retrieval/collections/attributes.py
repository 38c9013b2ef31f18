"""Columns of the attributes of the documents that a collection is built from, for filters."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from runtime.errors import CollectionError, InvalidDocument
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.attributes.schema import Schema, extend_schema
from runtime.retrieval.collections.documents import Document


class AttributeCollector:
    """Collects the attributes of a stream of documents into columns."""

    def __init__(self, declared: Schema) -> None:
        """declared: attributes whose types are given."""
        self._columns, self._schema = Columns(), dict(declared)

    def collect(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents unchanged. Raises `CollectionError` if an attribute's type differs between documents."""
        for number, document in enumerate(documents, 1):
            if document.attributes:
                try:
                    self._schema = extend_schema(self._schema, document.attributes)
                except InvalidDocument as error:
                    raise CollectionError(f"document {number}, {document.id!r}: {error.message}") from error
            self._columns.append([document.attributes], self._schema)
            yield document

    def write(self, path: Path) -> None:
        """Write the columns to a file, if any document has an attribute."""
        if self._columns.schema:
            path.write_bytes(self._columns.encode())
