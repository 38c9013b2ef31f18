"""The attributes of the documents that a collection is built from, kept by column for filters."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from runtime.errors import CollectionError, InvalidDocument
from runtime.retrieval.attributes.columns import Columns
from runtime.retrieval.attributes.schema import AttributeType, extend_schema
from runtime.retrieval.collections.documents import Document


class AttributeCollector:
    """The attributes of documents that go by, by column."""

    def __init__(self) -> None:
        self._columns, self._schema = Columns(), dict[str, AttributeType]()

    def collect(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents. Raises `CollectionError` for an attribute that is of another type than before."""
        for number, document in enumerate(documents, 1):
            if document.attributes:
                try:
                    self._schema = extend_schema(self._schema, document.attributes)
                except InvalidDocument as error:
                    raise CollectionError(f"document {number}, {document.id!r}: {error.message}") from error
            self._columns.append(document.attributes, self._schema)
            yield document

    def write(self, path: Path) -> None:
        """Keep them for filters, where there are any."""
        if self._schema:
            path.write_bytes(self._columns.encode())
