"""Operations of a log record, in MessagePack. A record is applied atomically."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import CollectionError
from runtime.retrieval.passages import Attributes


class Upsert(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Documents under consecutive rows from `first` on; `replaced` are the rows of the documents that they replace.

    successors: the rows that replace these; empty in logs of older versions. vectors: float32 [documents, d] as bytes,
    normalised for cosine.
    """

    first: int
    ids: list[str]
    titles: list[str]
    texts: list[str]
    attributes: list[Attributes]
    vectors: bytes
    replaced: list[int]
    successors: list[int] = []


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Deleted rows."""

    rows: list[int]


Operation = Upsert | Delete


def encode(operations: list[Operation]) -> bytes:
    return msgspec.msgpack.encode(operations)


def decode(payload: bytes, dim: int) -> list[Operation]:
    """Decode a payload. Raises `CollectionError` if it is damaged or its vectors do not have this dimension."""
    try:
        operations: list[Any] = msgspec.msgpack.decode(payload, type=list[Upsert | Delete])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CollectionError(f"a record of the log cannot be read: {error}") from error
    for operation in operations:
        if isinstance(operation, Upsert):
            count = len(operation.ids)
            same = count == len(operation.titles) == len(operation.texts) == len(operation.attributes)
            same &= len(operation.successors) in (0, len(operation.replaced))
            if not same or len(operation.vectors) != count * dim * 4 or operation.first < 0:
                raise CollectionError("a record of the log is damaged: its fields are inconsistent")
    return operations


def decode_vectors(operation: Upsert, dim: int) -> NDArray[np.float32]:
    """Return the vectors, float32 [documents, d]."""
    return np.frombuffer(operation.vectors, np.float32).reshape(-1, dim)
