"""Collections of the node's configuration as stores: their files are documents, with the attributes `source`, which is
the file's id, and `filename`.

Such a store has no record, only its uploaded files have, and all keys that may access the whole collection share them.
Those that a build has read are known to the collection alone.
"""

from collections.abc import Callable, Iterable, Mapping

from runtime.errors import InvalidRequest
from runtime.retrieval.attributes.filters import Scalar
from runtime.retrieval.attributes.schema import extend_schema
from runtime.retrieval.collections.files import SOURCE
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.stores.collection import FILENAME


class ConfiguredCollections:
    """The collections by these names. documents: returns the open documents of one, or raises `Unavailable`."""

    def __init__(self, names: Iterable[str], documents: Callable[[str], CollectionDocuments]) -> None:
        self._names, self._documents = frozenset(names), documents

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def check(self, name: str, files: Iterable[Mapping[str, Scalar]]) -> None:
        """Check that files with these attributes can be added. Raises `InvalidRequest`, `Unavailable`."""
        documents = self._documents(name)
        if documents.embedder is None:
            raise InvalidRequest(
                f"collection {name!r} was built from vectors and has no embedder: files cannot be added to it",
                "vector_store_id",
            )
        if documents.description.demanded is not None:
            raise InvalidRequest(
                f"collection {name!r} demands the attribute {documents.description.demanded!r} of every search: files "
                "cannot be added to it, only documents by PUT /v1/collections/…/documents",
                "vector_store_id",
            )
        schema = documents.state.schema
        for attributes in files:
            for own in (SOURCE, FILENAME):
                if own in attributes:
                    raise InvalidRequest(
                        f"attribute {own!r} of a file of collection {name!r} is set by the node: choose another name",
                        "attributes",
                    )
            schema = extend_schema(schema, document_attributes("", "", attributes))


def document_attributes(file: str, filename: str, attributes: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the attributes of an uploaded file's passages in a configured collection."""
    return {SOURCE: file, FILENAME: filename, **attributes}
