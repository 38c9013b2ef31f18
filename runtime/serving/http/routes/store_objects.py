"""Bodies and objects of clients' vector stores, their files and batches, in OpenAI's format."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.responses import Response

from runtime.retrieval.stores.catalogue import Usage
from runtime.retrieval.stores.records import Batch, Chunking, Store, StoreFile
from runtime.retrieval.stores.service import Stores
from runtime.serving.http.parsing import StrictModel, field_error, given, json_name
from runtime.serving.http.responses import Json, json_response

MAX_BATCH_FILES = 2000
_MAX_FIELDS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_STATUSES = ("in_progress", "completed", "failed", "cancelled")


def check_metadata(value: object) -> object:
    """Validate up to 16 strings by name."""
    return _check_fields("metadata", value, str, "a string")


def _validate_attributes(value: object) -> object:
    return _check_fields("attributes", value, (str, int, float, bool), "a string, a number or a boolean")


def _check_fields(param: str, value: object, types: Any, allowed: str) -> object:
    if not isinstance(value, dict):
        raise field_error(f"{param} must be an object, not {json_name(value)}")
    if len(value) > _MAX_FIELDS:
        raise field_error(f"{param} has {len(value)} keys, the limit is {_MAX_FIELDS}")
    for name, field in value.items():
        if not 1 <= len(name) <= _MAX_KEY:
            raise field_error(f"{param}: the key {name[:80]!r} has {len(name)} characters, allowed are 1 to {_MAX_KEY}")
        if not isinstance(field, types):
            raise field_error(f"{param}: {name!r} must be {allowed}, not {json_name(field)}")
        if isinstance(field, str) and len(field) > _MAX_VALUE:
            raise field_error(f"{param}: {name!r} has {len(field)} characters, the limit is {_MAX_VALUE}")
        if isinstance(field, int | float) and not abs(field) < 2.0**63:
            raise field_error(f"{param}: {name!r} is {given(field)}, which is not a number of 64 bits")
    return value


Metadata = Annotated[dict[str, str], BeforeValidator(check_metadata)]
Attributes = Annotated[dict[str, Any], BeforeValidator(_validate_attributes)]


class StaticChunking(StrictModel, extra="forbid"):
    """Sizes in tokens of the stores' embedder."""

    max_chunk_size_tokens: int = Field(ge=100, le=4096)
    chunk_overlap_tokens: int = Field(ge=0, le=2048)


class ChunkingStrategy(StrictModel, extra="forbid"):
    """`auto` splits as `trinity index build` does."""

    type: Literal["auto", "static"]
    static: StaticChunking | None = None


def _validate_chunking(value: object) -> object:
    if isinstance(value, dict):
        if value.get("type") == "static" and "static" not in value:  # OpenAI's guide has the sizes beside the type
            value = {"type": "static", "static": {name: of for name, of in value.items() if name != "type"}}
        if (value.get("type") == "static") != ("static" in value):
            raise field_error("chunking_strategy: static has sizes in its field static, auto has none")
        sizes = value.get("static")
        if isinstance(sizes, dict):
            most, overlap = sizes.get("max_chunk_size_tokens"), sizes.get("chunk_overlap_tokens")
            if isinstance(most, int) and isinstance(overlap, int) and 2 * overlap > most:
                raise field_error(f"chunk_overlap_tokens is {overlap}, more than half of {most}")
    return value


Chunks = Annotated[ChunkingStrategy | None, BeforeValidator(_validate_chunking)]


def to_chunking(strategy: ChunkingStrategy | None) -> Chunking:
    """Convert a chunking strategy; None is auto."""
    if strategy is None or strategy.static is None:
        return Chunking()
    return Chunking(strategy.static.max_chunk_size_tokens, strategy.static.chunk_overlap_tokens)


class ExpiresAfter(StrictModel, extra="forbid"):
    """When a store that is not searched any more is emptied."""

    anchor: Literal["last_active_at"]
    days: int = Field(ge=1, le=365)


class UpdateStoreBody(StrictModel):
    """POST /v1/vector_stores/{id}."""

    name: str = Field("", max_length=256)
    metadata: Metadata = Field({})
    expires_after: ExpiresAfter | None = None


class CreateStoreBody(UpdateStoreBody):
    """POST /v1/vector_stores."""

    description: str = Field("", max_length=1024)
    file_ids: list[str] = Field([], max_length=MAX_BATCH_FILES)
    chunking_strategy: Chunks = None


class AddFileBody(StrictModel):
    """POST /v1/vector_stores/{id}/files, and an entry of `files` of a batch."""

    file_id: str
    attributes: Attributes = Field({})
    chunking_strategy: Chunks = None


class UpdateFileBody(StrictModel):
    """POST /v1/vector_stores/{id}/files/{file}. `attributes` must be there; null removes all."""

    attributes: Attributes = Field({})


class AddBatchBody(StrictModel):
    """POST /v1/vector_stores/{id}/file_batches: `file_ids`, or `files` with attributes of their own."""

    file_ids: list[str] = Field([], max_length=MAX_BATCH_FILES)
    files: list[AddFileBody] = Field([], max_length=MAX_BATCH_FILES)
    attributes: Attributes = Field({})
    chunking_strategy: Chunks = None


def counts_json(counts: Mapping[str, Usage]) -> dict[str, int]:
    """Return OpenAI's file_counts."""
    numbers = {status: counts.get(status, Usage()).number for status in _STATUSES}
    return numbers | {"total": sum(numbers.values())}


async def store_json(stores: Stores, store: Store) -> Json:
    """Return OpenAI's object of a store."""
    counts = await stores.counts(store.id)
    numbers = counts_json(counts)
    status = "in_progress" if numbers["in_progress"] else "completed"
    return {
        "id": store.id,
        "object": "vector_store",
        "name": store.name,
        "created_at": store.created_at,
        "last_active_at": store.last_active_at,
        "expires_after": {"anchor": "last_active_at", "days": store.expires_days} if store.expires_days else None,
        "expires_at": store.expires_at,
        "status": "expired" if stores.is_expired(store) else status,
        "usage_bytes": sum(usage.bytes for status, usage in counts.items() if status in _STATUSES),
        "file_counts": numbers,
        "metadata": store.metadata,
    }


def store_file_json(entry: StoreFile) -> Json:
    """Return OpenAI's object of a file in a store."""
    strategy: Json = {"type": "other"}
    if entry.chunking.max_tokens:
        sizes = {
            "max_chunk_size_tokens": entry.chunking.max_tokens,
            "chunk_overlap_tokens": entry.chunking.overlap_tokens,
        }
        strategy = {"type": "static", "static": sizes}
    return {
        "id": entry.id,
        "object": "vector_store.file",
        "created_at": entry.created_at,
        "vector_store_id": entry.store,
        "status": entry.status,
        "last_error": {"code": entry.error_code, "message": entry.error} if entry.status == "failed" else None,
        "usage_bytes": entry.usage_bytes,
        "attributes": entry.attributes,
        "chunking_strategy": strategy,
    }


def content_page(texts: Sequence[str]) -> Response:
    """Return OpenAI's page of a file's passages. Call it on a thread: it has the whole text of the file."""
    data = [{"type": "text", "text": text} for text in texts]
    return json_response(
        {"object": "vector_store.file_content.page", "data": data, "has_more": False, "next_page": None}
    )


def batch_json(batch: Batch, counts: Mapping[str, Usage]) -> Json:
    """Return OpenAI's object of a batch."""
    numbers = counts_json(counts)
    ended = "cancelled" if numbers["cancelled"] else "failed" if numbers["failed"] == numbers["total"] > 0 else ""
    return {
        "id": batch.id,
        "object": "vector_store.files_batch",
        "created_at": batch.created_at,
        "vector_store_id": batch.store,
        "status": "in_progress" if numbers["in_progress"] else ended or "completed",
        "file_counts": numbers,
    }
