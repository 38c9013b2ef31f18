"""/v1/chat/completions and /v1/completions.

An error before the first token is an HTTP error with its status; afterwards an error event ends the stream. If the
client disconnects, the request is cancelled, streaming or not.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.serving.frontend.answer_cache import CacheHit, CacheKey
from runtime.serving.http.api import Api
from runtime.serving.http.api_types import COMPLETION_TOKENS, ChatBody, CompletionBody, GenerateBody
from runtime.serving.http.middleware import client_id_of, request_id
from runtime.serving.http.parsing import check_bytes, parse
from runtime.serving.http.passthrough import (
    Passthrough,
    PassthroughChat,
    PassthroughCompletion,
    is_cacheable,
    parse_passthrough,
)
from runtime.serving.http.responses import (
    ChatResponse,
    CompletionResponse,
    EventStream,
    GenerationResponse,
    error_event,
    events,
    first_tokens,
    in_flight,
    json_response,
)
from runtime.serving.http.searched import retrieval_of
from runtime.serving.messages import Message, Sampling

Body = TypeVar("Body", bound=GenerateBody)


class CompletionRoutes:
    """The routes."""

    def __init__(self, api: Api) -> None:
        self._api, self._service, self._settings = api, api.service, api.settings

    async def chat(self, http: Request) -> Response:
        body, sent = await self._read(http, ChatBody, PassthroughChat)
        turns = body.to_messages()
        check_bytes(sum(len(turn.content.encode()) for turn in turns), self._settings.max_prompt_bytes, "messages")
        response = ChatResponse(**await self._response_options(http, body))
        return await self._generate(http, body, response, self._settings.default_max_tokens, messages=turns, sent=sent)

    async def complete(self, http: Request) -> Response:
        body, sent = await self._read(http, CompletionBody, PassthroughCompletion)
        prompt = body.prompt if isinstance(body.prompt, str) else tuple(body.prompt)
        if isinstance(prompt, str):
            check_bytes(len(prompt.encode()), self._settings.max_prompt_bytes, "prompt")
        response = CompletionResponse(**await self._response_options(http, body))
        return await self._generate(http, body, response, COMPLETION_TOKENS, prompt=prompt, sent=sent)

    async def _read(
        self, http: Request, strict: type[Body], forwarded: type[Passthrough]
    ) -> tuple[Body | Passthrough, dict[str, Any] | None]:
        """Return the body as `strict`, or, for a passthrough engine, as `forwarded` with the fields to forward."""
        content = await self._api.read(http)
        if self._service.engine.passthrough:
            return parse_passthrough(forwarded, content)
        return parse(strict, content), None

    async def _response_options(self, http: Request, body: GenerateBody) -> dict[str, Any]:
        self._api.check_model(body.model)
        wish = body.retrieval.rerank if body.retrieval else None
        rerank = self._settings.ranker.of_options(wish, "retrieval.rerank")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
        retrieval = store = None
        if body.retrieval is not None:
            stores = self._service.stores
            retrieval, store = await retrieval_of(body.retrieval, rerank, http, stores, self._settings)
        return {
            "id": request_id(http),
            "model": self._settings.model,
            "created": int(time.time()),
            "retrieval": retrieval,
            "store": store,
            "include_usage": body.stream_options is not None and bool(body.stream_options.include_usage),
            "continuous_usage": body.stream_options is not None and bool(body.stream_options.continuous_usage_stats),
            "return_token_ids": body.return_token_ids,
        }

    async def _generate(
        self,
        http: Request,
        body: GenerateBody,
        response: GenerationResponse,
        default_max_tokens: int,
        *,
        prompt: str | tuple[int, ...] = "",
        messages: tuple[Message, ...] = (),
        sent: dict[str, Any] | None = None,
    ) -> Response:
        engine, cache = self._service.engine, self._service.answers
        sampling = body.to_sampling(default_max_tokens, self._api.seeds.getrandbits(63))
        generation = self._api.generation(http, body, sampling, response.retrieval, messages, prompt)
        store: Callable[[], None] = lambda: None  # noqa: E731
        if (
            cache is not None
            and body.answer_cache
            and (sent is None or is_cacheable(sent))
            and (key := self._cache_key(http, body, response, sampling, messages or prompt))
        ):
            vector, hit = await cache.find(key)
            if hit is not None:
                return _cached_response(response, hit, body.stream)
            store = lambda: cache.store(key, vector, response.to_pieces())  # noqa: E731
        request = engine.submit(response.id, generation, client_id=client_id_of(http), sent=sent)
        with in_flight(http, engine, request) as running:
            first = await first_tokens(response, request)  # its errors are HTTP errors: no status has been sent
            if body.stream:
                return EventStream(request, events(response, request, first, store), error_event, running.pop_all())
            while response.last is None:
                response.add(await request.next())
        store()
        return json_response(response.body())

    def _cache_key(
        self,
        http: Request,
        body: GenerateBody,
        response: GenerationResponse,
        sampling: Sampling,
        prompt: str | tuple[int, ...] | tuple[Message, ...],
    ) -> CacheKey | None:
        """Return the cache key, None if the cache does not apply. Every API key has a cache of its own."""
        tenant = http.headers.get("authorization", "") if self._settings.api_keys else ""
        return CacheKey.of(tenant, response.model, prompt, sampling, response.retrieval, seeded=body.seed is not None)


def _cached_response(response: GenerationResponse, hit: CacheHit, stream: bool) -> Response:
    """Return an answer from the cache, marked as such."""
    response.cached = {"similarity": round(hit.similarity, 4), "age_s": round(hit.age_s, 3)}
    for piece in hit.pieces:
        response.add(piece)
    headers = {"x-trinity-cache": "hit"}
    if not stream:
        return json_response(response.body(), headers)
    assert response.last is not None, "only complete answers are stored"
    content = response.opening() + response.chunk(response.last) + response.closing()
    return Response(content, headers=headers, media_type="text/event-stream; charset=utf-8")
