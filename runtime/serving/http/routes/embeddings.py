"""POST /v1/embeddings: vectors of texts, by the embedders of the node's collections."""

import asyncio
from collections.abc import Awaitable
from typing import Annotated, Literal

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import DeadlineExceeded, InvalidRequest, UnknownModel
from runtime.retrieval.embedding.embedder import Vectors
from runtime.serving.frontend.requests import ClientDisconnected
from runtime.serving.http.access import access_of
from runtime.serving.http.api import Api
from runtime.serving.http.api_types import MAX_TOKENS
from runtime.serving.http.parsing import StrictModel, field_error, parse
from runtime.serving.http.response_memory import unsent_response
from runtime.serving.http.responses import Json, json_response

MAX_INPUTS = 2048
_LOOK_S = 0.25  # interval at which the connection is looked at while texts are embedded


def _validate_input(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise field_error("input must be a string or an array of strings; token ids are not supported")
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise field_error(f"input has {len(texts)} texts, allowed are 1 to {MAX_INPUTS}")
    if not all(texts):
        raise field_error("input has an empty text")
    return texts


class EmbeddingsBody(StrictModel):
    """POST /v1/embeddings. `input_type` selects the prefix of the texts, if the model has prefixes."""

    model: str
    input: Annotated[list[str], BeforeValidator(_validate_input)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS)
    input_type: Literal["query", "passage"] = "query"


async def embed(api: Api, http: Request) -> Response:
    """Embed texts, for at most `request_timeout_s`."""
    body, timeout_s, flow = (
        parse(EmbeddingsBody, await api.read(http)),
        api.settings.http.request_timeout_s,
        access_of(http).flow,
    )
    known = api.service.collections.embedders()
    if body.model not in known:
        names = ", ".join(known) or "none"
        raise UnknownModel(f"no collection uses the embedder {body.model[:128]!r}; available: {names}", "model")
    embedder = known[body.model]
    if body.dimensions not in (None, embedder.dim):
        raise InvalidRequest(
            f"dimensions is {body.dimensions}, vectors of {body.model} have {embedder.dim}", "dimensions"
        )
    per_number = 6 if body.encoding_format == "base64" else 22
    unsent_response(http).reserve(len(body.input) * embedder.dim * per_number)
    try:
        async with api.limits["/v1/embeddings"].counted(flow), asyncio.timeout(timeout_s):
            embedding = api.service.collections.embed(embedder, body.input, body.input_type, flow)
            vectors, tokens = await _unless_disconnected(http, embedding)
    except TimeoutError:
        raise DeadlineExceeded(f"embedding took longer than its limit of {timeout_s:g} s") from None
    content: Json = {
        "object": "list",
        "model": body.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(_encodable(vectors, body.encoding_format))
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return json_response(content)


async def _unless_disconnected(http: Request, work: Awaitable[tuple[Vectors, int]]) -> tuple[Vectors, int]:
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({working}, timeout=_LOOK_S))[0]:
            if await http.is_disconnected():
                raise ClientDisconnected("the client closed the connection while its texts were embedded")
        return await working
    finally:
        working.cancel()


def _encodable(vectors: Vectors, encoding: str) -> list[list[float]] | list[memoryview]:
    """Return the vectors as JSON's encoder takes them: numbers, or bytes, which it writes as base64."""
    if encoding == "base64":
        return [memoryview(vector).cast("B") for vector in np.ascontiguousarray(vectors, "<f4")]
    numbers: list[list[float]] = vectors.tolist()
    return numbers
