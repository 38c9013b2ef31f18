"""What is stored of files, vector stores, the files in them, batches and responses. Times are Unix seconds."""

import secrets
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from runtime.errors import InvalidRequest
from runtime.retrieval.attributes.filters import Scalar

FileStatus = Literal["in_progress", "completed", "cancelled", "failed", "deleted"]
"""`deleted`: hidden from clients, until its passages are deleted from the collection."""
ErrorCode = Literal["server_error", "unsupported_file", "invalid_file"]


class UnknownObject(InvalidRequest):
    """There is no file, vector store, batch or response with that id, or it belongs to another tenant."""

    code = "not_found"
    status = 404


class LimitExceeded(InvalidRequest):
    """A limit of `[stores]` is reached. Delete something first."""

    code = "limit_exceeded"
    status = 409


class Chunking(msgspec.Struct, frozen=True):
    """Tokens of a passage at most, as the embedder counts them, and those it repeats of the one before.

    max_tokens 0: as `trinity index build` does.
    """

    max_tokens: int = 0
    overlap_tokens: int = 0


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file. `name` is data of the client, never a path."""

    id: str
    tenant: str
    created_at: int
    name: str
    purpose: str
    bytes: int
    expires_at: int | None = None


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """A vector store. `columns`: see `collection.Columns`. `expires_days` after `last_active_at`, 0: never."""

    id: str
    tenant: str
    created_at: int
    last_active_at: int
    name: str = ""
    metadata: dict[str, str] = {}
    columns: dict[str, str] = {}
    expires_days: int = 0
    deleted: bool = False

    @property
    def expires_at(self) -> int | None:
        return self.last_active_at + 86_400 * self.expires_days if self.expires_days else None


class StoreFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in a store, or in a collection of the configuration: `store` is then its name, and `tenant` the file's.

    `revision` changes when it must be indexed again. `rechunked`: whether it was ever split in another way, of which
    passages may be left.
    """

    id: str
    store: str
    tenant: str
    created_at: int
    status: FileStatus = "in_progress"
    usage_bytes: int = 0
    attributes: dict[str, Scalar] = {}
    chunking: Chunking = Chunking()
    batch: str = ""
    error_code: ErrorCode = "server_error"
    error: str = ""
    revision: int = 0
    rechunked: bool = False


class NewFile(NamedTuple):
    """What an uploaded file is. expires_s: its lifetime, 0: no end."""

    name: str
    purpose: str
    expires_s: int = 0


class NewEntry(NamedTuple):
    """A file to be added to a store."""

    file: str
    attributes: Mapping[str, Scalar] = {}
    chunking: Chunking = Chunking()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Files that were added to a store together."""

    id: str
    store: str
    tenant: str
    created_at: int


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it was sent, and the conversation up to it as (role, text)."""

    id: str
    tenant: str
    created_at: int
    body: msgspec.Raw
    turns: list[tuple[str, str]]


Record = StoredFile | Store | StoreFile | Batch | StoredResponse


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed."""
    return f"{prefix}{secrets.token_hex(16)}"
