"""POST /v1/rerank: texts of a request by their relevance to a query, in the format that vLLM, Jina and Cohere share."""

import time
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import UnknownModel
from runtime.retrieval.async_retriever import run_steps, wait_until
from runtime.retrieval.retrieval_steps import Until
from runtime.serving.frontend.requests import ClientDisconnected
from runtime.serving.http.access import access_of
from runtime.serving.http.api import RERANK_PATHS, Api
from runtime.serving.http.api_types import MAX_TOKENS
from runtime.serving.http.middleware import request_id
from runtime.serving.http.parsing import StrictModel, check_bytes, field_error, json_name, parse
from runtime.serving.http.response_memory import unsent_response
from runtime.serving.http.responses import Json, json_response

MAX_DOCUMENTS = 1024


def _validate_documents(value: object) -> object:
    if not isinstance(value, list):
        raise field_error(f"documents must be an array of strings or of objects with a text, not {json_name(value)}")
    if not 1 <= len(value) <= MAX_DOCUMENTS:
        raise field_error(f"documents has {len(value)} entries, allowed are 1 to {MAX_DOCUMENTS}")
    return [_text(document, number) for number, document in enumerate(value)]


def _text(document: object, number: int) -> str:
    if isinstance(document, dict):
        for name in document:
            if name != "text":
                raise field_error(f"documents[{number}]: {name[:64]!r} is not supported, only text")
        document = document.get("text")
    if not isinstance(document, str):
        raise field_error(f"documents[{number}] must be a string or an object with a text, not {json_name(document)}")
    return document


class RerankBody(StrictModel):
    """POST /v1/rerank. `top_n` 0: all documents, as in vLLM, whose `request_id` and `cache_salt` have no effect."""

    model: str | None = None
    query: str = Field(min_length=1)
    documents: Annotated[list[str], BeforeValidator(_validate_documents)]
    top_n: int = Field(0, ge=0, le=MAX_TOKENS)
    return_documents: bool = True
    request_id: Any = None
    cache_salt: Any = None


async def rerank(api: Api, http: Request) -> Response:
    """Order texts, for at most `request_timeout_s`: unlike a search, it has no other order to return then."""
    body = parse(RerankBody, await api.read(http))
    reranking = api.service.reranking
    if reranking is None:
        raise UnknownModel("this node has no reranker: set model in [rerank] of its configuration", "model")
    if body.model not in (None, reranking.name):
        raise UnknownModel(f"reranker {body.model[:128]!r} is not served; served: {reranking.name!r}", "model")
    check_bytes(len(body.query.encode(errors="replace")), api.settings.max_prompt_bytes, "query")
    returned = body.documents if body.return_documents else []
    unsent_response(http).reserve(len(body.documents) * 80 + sum(map(len, returned)))

    async def outcome(step: Until) -> Any:
        if await http.is_disconnected():
            step.future.cancel()
            raise ClientDisconnected("the client closed the connection while its documents were reranked")
        return await wait_until(step)

    flow = access_of(http).flow
    async with api.limits[RERANK_PATHS[0]].counted(flow):
        until_ns = time.monotonic_ns() + int(api.settings.http.request_timeout_s * 1e9)
        scored = await run_steps(reranking.score(body.query, body.documents, flow, until_ns), outcome)
    order = sorted(range(len(body.documents)), key=lambda index: -scored.scores[index])
    results: list[Json] = [
        {"index": index, "relevance_score": scored.scores[index]} for index in order[: body.top_n or None]
    ]
    if body.return_documents:
        results = [result | {"document": {"text": body.documents[result["index"]]}} for result in results]
    usage = {"prompt_tokens": scored.tokens, "total_tokens": scored.tokens}
    return json_response({"id": request_id(http), "model": reranking.name, "results": results, "usage": usage})
