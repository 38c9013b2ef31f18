"""Documents as they come to a live collection's writer: what they may be, and their vectors."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpu import GpuError
from gpu.index.rows import checked_vectors
from runtime.errors import Forbidden, InvalidDocument
from runtime.retrieval.attributes.filters import AttributeBinding
from runtime.retrieval.embedding.embedder import Embedder, embedding_text
from runtime.retrieval.live.storage.manifest import Description
from runtime.retrieval.passages import Attributes

MAX_BATCH = 4096  # documents
MAX_ID_BYTES = 512
MAX_TEXT_BYTES = 4 << 20


class UpsertDocument(msgspec.Struct, frozen=True):
    """A document to store. `vector`: d numbers, or None to have it embedded from title and text."""

    id: str
    text: str = ""
    title: str = ""
    attributes: Attributes = {}
    vector: ArrayLike | None = None


def check(documents: Sequence[UpsertDocument]) -> None:
    """Raises `InvalidDocument` for a batch, an id or a text that cannot be stored."""
    if len(documents) > MAX_BATCH:
        raise InvalidDocument(f"the batch has {len(documents)} documents; the limit is {MAX_BATCH}", "documents")
    seen: set[str] = set()
    for number, document in enumerate(documents):
        for name in ("id", "text", "title"):
            value = getattr(document, name)
            if not isinstance(value, str):
                raise InvalidDocument(
                    f"the {name} of document {number + 1} is {value!r:.80}; it must be a string", name
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
            raise InvalidDocument(f"the id {document.id!r} comes twice in the batch", "id")
        seen.add(document.id)


def check_owner(documents: Sequence[UpsertDocument], owner: AttributeBinding) -> None:
    """Raises `Forbidden` for a document that is not the owner's."""
    for document in documents:
        if not owner.holds(document.attributes):
            raise Forbidden(f"document {document.id!r} has another {owner.key!r} than its writer's", "attributes")


def plain(value: object) -> "str | int | float | bool | list[str]":
    """An attribute's value as the log has it."""
    return list(value) if isinstance(value, list | tuple) else value  # type: ignore[return-value]


def _bad_vector(documents: Sequence[UpsertDocument], matrix: NDArray[np.float32], metric: str) -> InvalidDocument:
    """Of the first document whose vector cannot be stored."""
    for document, vector in zip(documents, matrix, strict=True):
        try:
            checked_vectors(vector[None], metric)
        except GpuError as error:
            why = str(error).removeprefix("row 0 ")
            return InvalidDocument(f"the vector of document {document.id!r} {why}", "vector")
    raise AssertionError("each vector can be stored")


def resolve_vectors(
    documents: Sequence[UpsertDocument], description: Description, embedder: Embedder | None
) -> NDArray[np.float32]:
    """float32 [documents, d], as the metric wants them. Raises `InvalidDocument`."""
    matrix = np.empty((len(documents), description.dim), np.float32)
    texts = [number for number, document in enumerate(documents) if document.vector is None]
    if texts and embedder is None:
        raise InvalidDocument(f"document {documents[texts[0]].id!r} has no vector, and there is no embedder")
    if texts and embedder is not None:
        found = embedder.embed(
            [embedding_text(documents[number].title, documents[number].text) for number in texts], "passage"
        )
        if found.shape[1] != description.dim:
            raise InvalidDocument(f"the embedder's vectors have {found.shape[1]} numbers, not {description.dim}")
        matrix[texts] = found
    for number, document in enumerate(documents):
        if document.vector is not None:
            try:
                with np.errstate(over="ignore"):  # what is beyond float32 becomes inf, which is refused below
                    vector = np.asarray(document.vector, np.float32)
            except (ValueError, TypeError) as error:
                raise InvalidDocument(f"the vector of document {document.id!r} is none: {error}") from error
            if vector.shape != (description.dim,):
                raise InvalidDocument(
                    f"the vector of document {document.id!r} has shape {list(vector.shape)}; this collection's "
                    f"have {description.dim} numbers",
                    "vector",
                )
            matrix[number] = vector
    try:
        return checked_vectors(matrix, description.metric)
    except GpuError as error:
        raise _bad_vector(documents, matrix, description.metric) from error
