"""The HTTP application: completions, models, retrieval, traces, health and metrics.

An error before the first token is an HTTP error with its status; afterwards an error event ends the stream. If the
client disconnects, the request is cancelled, streaming or not.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import replace
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from runtime.errors import InvalidRequest, TrinityError, Unavailable, UnknownModel
from runtime.retrieval.passages import FoundPassages
from runtime.retrieval.stores.catalogue import Catalogue
from runtime.retrieval.stores.responses import ResponseStore
from runtime.serving.frontend.answer_cache import CacheHit, CacheKey
from runtime.serving.frontend.requests import ClientDisconnected
from runtime.serving.http.access import access_of
from runtime.serving.http.api_types import COMPLETION_TOKENS, ChatBody, CompletionBody, GenerateBody
from runtime.serving.http.authentication import AuthMiddleware
from runtime.serving.http.middleware import (
    REQUEST_ID_HEADER,
    RETRY_AFTER_S,
    Application,
    BodyMemory,
    CompressedBody,
    arrived_ns,
    client_id_of,
    error_response,
    id_source,
    read_body,
    request_id,
)
from runtime.serving.http.parsing import check_bytes, parse
from runtime.serving.http.passthrough import (
    Passthrough,
    PassthroughChat,
    PassthroughCompletion,
    is_cacheable,
    parse_passthrough,
)
from runtime.serving.http.ranking import ranking_json
from runtime.serving.http.request_context import RequestContextMiddleware
from runtime.serving.http.response_memory import ResponseMemory, unsent_response
from runtime.serving.http.responses import (
    ChatResponse,
    CompletionResponse,
    EventStream,
    FoundJson,
    GenerationResponse,
    Json,
    cancel_on_disconnect,
    error_json,
    events,
    first_tokens,
    json_response,
    passages_response,
)
from runtime.serving.http.retrieval_body import parse_retrieval
from runtime.serving.http.routes.collection_files import CollectionFiles
from runtime.serving.http.routes.documents import DocumentRoutes
from runtime.serving.http.routes.drain import DrainRoute
from runtime.serving.http.routes.embeddings import EmbeddingsRoute
from runtime.serving.http.routes.files import FileRoutes
from runtime.serving.http.routes.rerank import RerankRoute
from runtime.serving.http.routes.responses import ResponsesRoutes
from runtime.serving.http.routes.tokenize import TokenizeRoute
from runtime.serving.http.routes.vector_store_files import StoreFileRoutes
from runtime.serving.http.routes.vector_stores import StoreRoutes
from runtime.serving.http.searched import authorized, query_of
from runtime.serving.http.service import Searches, Service, Settings, missing_roles
from runtime.serving.messages import Generation, Message, Retrieval, Sampling

log = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)
TRACES = "/v1/traces/"


def create_app(
    service: Service,
    settings: Settings,
    new_id: Callable[[str], str] | None = None,
) -> Application:
    """Return the application. `new_id` generates request ids (the server around it shares it)."""
    app = Application()
    app.router.redirect_slashes = False
    routes = _Routes(service, settings)
    app.add_middleware(
        AuthMiddleware,
        keys=settings.api_keys,
        open_paths=settings.open_paths,
        host=settings.host,
        access=settings.access,
        direct={"/v1/retrieval": routes.retrieve},
        on_error=_trinity_error,
    )
    if settings.cors_origins:  # outside AuthMiddleware: a browser's preflight has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "PUT", "DELETE"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, "retry-after", "x-trinity-cache"),
        )
    new_id = new_id or id_source(service.engine.epoch)
    app.add_middleware(
        RequestContextMiddleware,
        new_id=new_id,
        draining=lambda: service.readiness.draining,
        on_response=service.on_response,
        memory=ResponseMemory(settings.max_unsent_bytes),
    )
    app.add_exception_handler(TrinityError, _trinity_error)
    app.add_exception_handler(HTTPException, _http_error)
    for path, route in (
        ("/v1/chat/completions", routes.chat),
        ("/v1/completions", routes.complete),
        ("/v1/retrieval", routes.retrieve),  # for its other methods: see `AuthMiddleware`
    ):
        app.add_route(path, route, methods=["POST"])
    for path, route in (
        ("/v1/models", routes.models),
        ("/v1/models/{model:path}", routes.one_model),
        (f"{TRACES}{{traced:path}}", routes.trace),
        ("/health", routes.health),
        ("/ready", routes.health),
        ("/metrics", routes.metrics),
    ):
        app.add_route(path, route, methods=["GET"])  # and HEAD
    routes.add_collection_routes(app)
    stored, read = service.responses or ResponseStore(Catalogue(None)), routes.read_bytes
    ResponsesRoutes(service, settings, read, stored, routes.check_model, time.time, routes.seeds).add_to(app)
    TokenizeRoute(
        service.tokens, read, context_tokens=settings.context_tokens, max_bytes=settings.max_prompt_bytes
    ).add_to(app)
    if service.drain is not None:
        DrainRoute(service.readiness, service.drain, lambda: len(service.engine.requests)).add_to(app)
    return app


class _Routes:
    def __init__(self, service: Service, settings: Settings) -> None:
        self._service = service
        self._settings = settings
        self._bodies = BodyMemory()
        self._created = int(time.time())
        self.seeds = random.Random()  # of requests without a seed
        self._searches = Searches(
            service.collections,
            service.engine.traces,
            settings.max_searches,
            settings.search_timeout_s,
            service.on_searched,
        )

    # ---- completions

    async def chat(self, http: Request) -> Response:
        body, sent = await self._read_for_engine(http, ChatBody, PassthroughChat)
        turns = body.to_messages()
        check_bytes(sum(len(turn.content.encode()) for turn in turns), self._settings.max_prompt_bytes, "messages")
        response = ChatResponse(**await self._response_options(http, body))
        return await self._generate(http, body, response, self._settings.default_max_tokens, messages=turns, sent=sent)

    async def complete(self, http: Request) -> Response:
        body, sent = await self._read_for_engine(http, CompletionBody, PassthroughCompletion)
        prompt = body.prompt if isinstance(body.prompt, str) else tuple(body.prompt)
        if isinstance(prompt, str):
            check_bytes(len(prompt.encode()), self._settings.max_prompt_bytes, "prompt")
        response = CompletionResponse(**await self._response_options(http, body))
        return await self._generate(http, body, response, COMPLETION_TOKENS, prompt=prompt, sent=sent)

    async def _response_options(self, http: Request, body: GenerateBody) -> dict[str, Any]:
        self.check_model(body.model)
        wish = body.retrieval.rerank if body.retrieval else None
        rerank = self._settings.ranker.of_options(wish, "retrieval.rerank")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
        retrieval = body.to_retrieval(self._settings.probes)
        retrieval, store = (
            (None, None)
            if retrieval is None
            else await authorized(retrieval, http, self._service.stores, self._settings)
        )
        return {
            "id": request_id(http),
            "model": self._settings.model,
            "created": int(time.time()),
            "retrieval": retrieval and replace(retrieval, rerank=rerank),
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
        received_ns = engine.now_ns()
        deadline_ns = received_ns + int(self._settings.request_timeout_s * 1e9)
        sampling = body.to_sampling(default_max_tokens, self.seeds.getrandbits(63))
        store: Callable[[], None] = lambda: None  # noqa: E731
        if (
            cache is not None
            and body.answer_cache
            and (sent is None or is_cacheable(sent))
            and (key := self._cache_key(http, body, response.retrieval, sampling, messages or prompt))
        ):
            vector, hit = await cache.find(key)
            if hit is not None:
                return self._cached_response(response, hit, body.stream)
            store = lambda: cache.store(key, vector, response.to_pieces())  # noqa: E731
        access = access_of(http)
        generation = Generation(
            sampling, received_ns, deadline_ns, messages, prompt, response.retrieval, access.salt,
            access.head_start_s(body.head_start_s()), body.nvext.agent_hints.osl,
        )  # fmt: skip
        request = engine.submit(response.id, generation, client_id=client_id_of(http), sent=sent)
        watch = asyncio.create_task(cancel_on_disconnect(http, engine, request))

        def release() -> None:
            watch.cancel()
            engine.cancel(request)

        try:
            first = await first_tokens(response, request)  # its errors are HTTP errors: no status has been sent
            if body.stream:
                return EventStream(events(response, request, first, store), release)
            while response.last is None:
                response.add(await request.next())
        except BaseException:
            release()
            raise
        release()
        store()
        return json_response(response.body())

    def _cache_key(
        self,
        http: Request,
        body: GenerateBody,
        retrieval: Retrieval | None,
        sampling: Sampling,
        prompt: str | tuple[int, ...] | tuple[Message, ...],
    ) -> CacheKey | None:
        """Return the cache key, None if the cache does not apply. Every API key has a cache of its own."""
        tenant = http.headers.get("authorization", "") if self._settings.api_keys else ""
        return CacheKey.of(tenant, self._settings.model, prompt, sampling, retrieval, seeded=body.seed is not None)

    def _cached_response(self, response: GenerationResponse, hit: CacheHit, stream: bool) -> Response:
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

    # ---- retrieval

    async def retrieve(self, http: Request) -> Response:
        query = query_of(parse_retrieval(await self.read_bytes(http)), access_of(http), self._settings)
        collection = query.spec.collection

        def respond(passages: FoundPassages) -> Response:
            found = [
                FoundJson(one.id, one.title, one.distance, one.text, one.score, one.attributes) for one in passages
            ]
            result: Json = {"id": request_id(http), "object": "retrieval", "collection": collection, "passages": found}
            return passages_response(result | ranking_json(passages.ranking))

        return await self._searches.run(
            query, request_id(http), client_id_of(http), respond=respond, reserve=unsent_response(http).reserve,
            received_ns=arrived_ns(http),
        )  # fmt: skip

    def add_collection_routes(self, app: Application) -> None:
        """Add the routes of collections, documents and embedders."""
        app.limits["/v1/retrieval"] = self._searches.limit
        settings = self._settings
        StoreRoutes(self._service, settings, self.read_bytes, self._searches).add_to(app)
        EmbeddingsRoute(self._service, settings, self.read_bytes).add_to(app)
        RerankRoute(self._service, settings, self.read_bytes).add_to(app)
        if (stores := self._service.stores) is not None:
            origins = None if settings.api_keys else settings.cors_origins
            FileRoutes(stores, settings.body_timeout_s, origins).add_to(app)
        files = CollectionFiles(self._service)
        StoreFileRoutes(stores, self.read_bytes, settings.collections, files).add_to(app)
        if self._service.writes is not None:
            DocumentRoutes(self._service.writes, self.read_bytes, settings.collections).add_to(app)

    # ---- the node

    async def models(self, http: Request) -> Response:
        names = (self._settings.model, *self._settings.model_aliases) if self._settings.model else ()
        return json_response({"object": "list", "data": [self._model_json(name) for name in dict.fromkeys(names)]})

    async def one_model(self, http: Request) -> Response:
        self.check_model(model := http.path_params["model"])
        return json_response(self._model_json(model))

    async def trace(self, http: Request) -> Response:
        found = self._service.engine.traces.trace(http.path_params["traced"])
        return json_response(found)

    async def health(self, http: Request) -> Response:
        missing, readiness = missing_roles(self._service, self._settings), self._service.readiness
        if not missing and not readiness.draining:
            readiness.record_ready()
            return json_response(
                {"status": "ready", "missing": [], "unavailable": self._service.collections.unavailable()}
            )
        reason = (
            f"not ready, missing: {', '.join(missing)}"
            if missing
            else "the node is draining: send new requests to another node"
        )
        status = {"status": "draining" if readiness.draining else "unavailable", "missing": missing}
        return json_response(error_json(Unavailable(reason)) | status, {"Retry-After": str(RETRY_AFTER_S)}, status=503)

    async def metrics(self, http: Request) -> Response:
        return PlainTextResponse(await self._service.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---- checks

    async def _read(self, http: Request, model: type[Body]) -> Body:
        return parse(model, await self.read_bytes(http))

    async def _read_for_engine(
        self, http: Request, strict: type[Body], forwarded: type[Passthrough]
    ) -> tuple[Body | Passthrough, dict[str, Any] | None]:
        """Return the body as `strict`, or, for a passthrough engine, as `forwarded` with the fields to forward."""
        if self._service.engine.passthrough:
            return parse_passthrough(forwarded, await self.read_bytes(http))
        return await self._read(http, strict), None

    async def read_bytes(self, http: Request) -> bytes:
        """Return a request's body, within the limits. Raises `ClientDisconnected`."""
        try:
            return await read_body(http, self._bodies, self._settings.max_body_bytes, self._settings.body_timeout_s)
        except ClientDisconnect:
            raise ClientDisconnected("the client closed the connection before its body was complete") from None

    def check_model(self, model: str) -> None:
        """Raise `UnknownModel` for a name that the node's model does not have."""
        served = self._settings.model
        if not served or model not in (served, *self._settings.model_aliases):
            served = repr(served) if served else "none"
            raise UnknownModel(f"model {model[:128]!r} is not served; served: {served}", "model")

    def _model_json(self, name: str) -> Json:
        model = {"id": name, "object": "model", "created": self._created, "owned_by": "trinity"}
        context = self._settings.context_tokens
        return model | {"max_model_len": context} if context else model


async def _trinity_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, TrinityError), "registered for this family"
    if error.status == 500:
        log.error("%s: %s", error.code, error.message, extra={"request": request_id(http)})
    if isinstance(error, CompressedBody):
        return error_response(error, {"Accept-Encoding": "identity"})
    return error_response(error)


async def _http_error(http: Request, error: Exception) -> Response:
    """Convert the framework's own errors: unknown paths and methods."""
    assert isinstance(error, HTTPException), "registered for this class"
    wrapped = InvalidRequest(f"{error.detail}: {http.method} {http.url.path[:128]}")
    wrapped.status = error.status_code
    wrapped.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, wrapped.code)
    return error_response(wrapped, error.headers)
