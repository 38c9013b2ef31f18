"""Validation of the documents that a collection's writer receives, and their vectors."""

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from gpu import GpuError
from gpu.index.rows import checked_vectors
from runtime.errors import Forbidden, InvalidDocument
from runtime.retrieval.attributes.filters import AttributeBinding
from runtime.retrieval.attributes.schema import AttributeType, Schema, extend_schema, preview
from runtime.retrieval.collections.description import Description
from runtime.retrieval.embedding.bulk import embed_passages
from runtime.retrieval.embedding.embedder import Embedder, embedding_text
from runtime.retrieval.passages import Attributes

MAX_BATCH = 4096  # documents
MAX_ID_BYTES = 512
MAX_TEXT_BYTES = 4 << 20


class UpsertDocument(msgspec.Struct, frozen=True):
    """A document to upsert. `vector`: d numbers, or None to embed the title and text."""

    id: str
    text: str = ""
    title: str = ""
    attributes: Attributes = {}
    vector: ArrayLike | None = None


def check_batch(documents: Sequence[UpsertDocument]) -> None:
    """Raise `InvalidDocument` if the batch, an id or a text cannot be stored."""
    if len(documents) > MAX_BATCH:
        raise InvalidDocument(f"the batch has {len(documents)} documents; the limit is {MAX_BATCH}", "documents")
    seen: set[str] = set()
    for number, document in enumerate(documents):
        for name in ("id", "text", "title"):
            value = getattr(document, name)
            if not isinstance(value, str):
                raise InvalidDocument(
                    f"the {name} of document {number + 1} is {preview(value)}; it must be a string", name
                )
            try:
                size = len(value.encode())
            except UnicodeEncodeError as error:
                raise InvalidDocument(f"the {name} of document {number + 1} holds an unpaired surrogate") from error
            limit = MAX_ID_BYTES if name == "id" else MAX_TEXT_BYTES
            if size > limit:
                raise InvalidDocument(f"the {name} of document {number + 1} has {size} bytes; the limit is {limit}")
        if not document.id:
            raise InvalidDocument(f"document {number + 1} has an empty id", "id")
        if document.id in seen:
            raise InvalidDocument(f"the batch contains the id {document.id!r} twice", "id")
        seen.add(document.id)


def schema_with(schema: Schema, documents: Sequence[UpsertDocument]) -> Schema:
    """Return the schema extended by the documents' attributes. Raises `InvalidDocument`, which names the document."""
    for document in documents:
        try:
            schema = extend_schema(schema, document.attributes)
        except InvalidDocument as error:
            raise InvalidDocument(f"document {document.id!r}: {error.message}", error.param) from error
    return schema


def as_owned(documents: Sequence[UpsertDocument], owner: AttributeBinding, schema: Schema) -> list[UpsertDocument]:
    """Return an owner's documents with its attribute as a string, or as a list if the collection has lists.

    Raises `Forbidden` if one belongs to another, and `InvalidDocument` if they have attributes that are new to the
    collection, except its own: those that all owners share, and their types, are not for one to determine.
    """
    for document in documents:
        if not owner.holds(document.attributes):
            raise Forbidden(f"document {document.id!r} does not have the {owner.key!r} of its writer", "attributes")
    lists = schema.get(owner.key) is AttributeType.STRINGS
    bound = {owner.key: [owner.value] if lists else owner.value}
    owned = [replace(document, attributes={**document.attributes, **bound}) for document in documents]
    if new := sorted(schema_with(schema, owned).keys() - schema.keys() - {owner.key}):
        raise InvalidDocument(
            f"attribute {new[0]!r} is new, and an API key that is bound to {owner.key!r} introduces none: declare it "
            "when the collection is built, or write a document with it with a key without a restriction",
            "attributes",
        )
    return owned


def to_stored_value(value: object) -> "str | int | float | bool | list[str]":
    """Convert an attribute's value to the type that the log stores."""
    return list(value) if isinstance(value, list | tuple) else value  # type: ignore[return-value]


def resolve_vectors(
    documents: Sequence[UpsertDocument], description: Description, embedder: Embedder | None, threads: int = 1
) -> NDArray[np.float32]:
    """Return the vectors, float32 [documents, d]: given or embedded on `threads` threads, and normalised if the metric
    requires it.

    Raises `InvalidDocument`.
    """
    matrix = np.empty((len(documents), description.dim), np.float32)
    texts = [number for number, document in enumerate(documents) if document.vector is None]
    if texts and embedder is None:
        raise InvalidDocument(f"document {documents[texts[0]].id!r} has no vector, and the collection has no embedder")
    if texts and embedder is not None:
        passages = [embedding_text(documents[number].title, documents[number].text) for number in texts]
        (embedded,) = embed_passages(embedder, [passages], threads)
        if embedded.shape[1] != description.dim:
            raise InvalidDocument(f"the embedder's vectors have {embedded.shape[1]} dimensions, not {description.dim}")
        matrix[texts] = embedded
    for number, document in enumerate(documents):
        if document.vector is not None:
            try:
                with np.errstate(over="ignore"):  # values beyond float32 become inf, which is rejected below
                    vector = np.asarray(document.vector, np.float32)
            except (ValueError, TypeError) as error:
                raise InvalidDocument(f"the vector of document {document.id!r} is invalid: {error}") from error
            if vector.shape != (description.dim,):
                raise InvalidDocument(
                    f"the vector of document {document.id!r} has shape {list(vector.shape)}; the vectors of this "
                    f"collection have {description.dim} dimensions",
                    "vector",
                )
            matrix[number] = vector
    try:
        return checked_vectors(matrix, description.metric)
    except GpuError as error:
        _, row, reason = str(error).split(" ", 2)  # "row 3 holds …"
        raise InvalidDocument(f"the vector of document {documents[int(row)].id!r} {reason}", "vector") from error
