"""The HTTP application: its routes in one table, and what the node says of itself: models, traces, health, metrics."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TypeAlias

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from runtime.errors import InvalidRequest, TrinityError, Unavailable
from runtime.serving.http.api import RERANK_PATHS, Api
from runtime.serving.http.authentication import AuthMiddleware
from runtime.serving.http.middleware import (
    REQUEST_ID_HEADER,
    RETRY_AFTER_S,
    Application,
    CompressedBody,
    error_response,
    id_source,
    request_id,
)
from runtime.serving.http.request_context import RequestContextMiddleware
from runtime.serving.http.response_memory import ResponseMemory
from runtime.serving.http.responses import Json, error_json, json_response
from runtime.serving.http.routes.completions import CompletionRoutes
from runtime.serving.http.routes.documents import DocumentRoutes
from runtime.serving.http.routes.drain import drain
from runtime.serving.http.routes.embeddings import embed
from runtime.serving.http.routes.files import FileRoutes
from runtime.serving.http.routes.rerank import rerank
from runtime.serving.http.routes.responses import ResponsesRoutes
from runtime.serving.http.routes.retrieval import retrieve
from runtime.serving.http.routes.tokenize import tokenize
from runtime.serving.http.routes.vector_store_files import StoreFileRoutes
from runtime.serving.http.routes.vector_stores import StoreRoutes
from runtime.serving.http.service import Service, Settings, missing_roles

log = logging.getLogger(__name__)
TRACES = "/v1/traces/"
Route: TypeAlias = Callable[[Request], Awaitable[Response]]


def create_app(
    service: Service,
    settings: Settings,
    new_id: Callable[[str], str] | None = None,
) -> Application:
    """Return the application. `new_id` generates request ids (the server around it shares it)."""
    api = Api(service, settings)
    app = Application(api.limits)
    app.router.redirect_slashes = False
    app.add_middleware(
        AuthMiddleware,
        settings=settings,
        direct={"/v1/retrieval": partial(retrieve, api)},
        on_error=_trinity_error,
    )
    if settings.http.cors_origins:  # outside AuthMiddleware: a browser's preflight has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.http.cors_origins,
            allow_methods=("GET", "POST", "PUT", "DELETE"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, "retry-after", "x-trinity-cache"),
        )
    app.add_middleware(
        RequestContextMiddleware,
        new_id=new_id or id_source(service.engine.epoch),
        draining=lambda: service.readiness.draining,
        on_response=service.on_response,
        memory=ResponseMemory(settings.max_unsent_bytes),
    )
    app.add_exception_handler(TrinityError, _trinity_error)
    app.add_exception_handler(HTTPException, _http_error)
    for methods, path, route in _routes(api):
        app.add_route(path, route, methods=methods.split())
    return app


def _routes(api: Api) -> Iterator[tuple[str, str, Route]]:
    """Yield methods (GET is HEAD, too), path and handler. The first that fits answers: `{file:path}` takes slashes."""
    completions, node = CompletionRoutes(api), _NodeRoutes(api)
    yield "POST", "/v1/chat/completions", completions.chat
    yield "POST", "/v1/completions", completions.complete
    yield "POST", "/v1/retrieval", partial(retrieve, api)  # for its other methods: see `AuthMiddleware`
    yield "POST", "/v1/embeddings", partial(embed, api)
    for path in RERANK_PATHS:
        yield "POST", path, partial(rerank, api)
    yield "POST", "/tokenize", partial(tokenize, api)
    responses = ResponsesRoutes(api, time.time)
    yield "POST", "/v1/responses", responses.create
    yield "GET", "/v1/responses/{response}", responses.get
    yield "DELETE", "/v1/responses/{response}", responses.delete

    stores, files = StoreRoutes(api), StoreFileRoutes(api)
    yield "GET", "/v1/vector_stores", stores.list_stores
    yield "GET", "/v1/vector_stores/{name}", stores.get_store
    yield "POST", "/v1/vector_stores/{name}/search", stores.search
    yield "GET", "/v1/vector_stores/{store}/files", files.list_files
    yield "GET", "/v1/vector_stores/{store}/files/{file:path}/content", files.content
    yield "GET", "/v1/vector_stores/{store}/files/{file:path}", files.get
    yield "DELETE", "/v1/vector_stores/{store}/files/{file:path}", files.delete
    if api.service.stores is not None:
        yield "POST", "/v1/vector_stores", stores.create
        yield "POST", "/v1/vector_stores/{name}", stores.update
        yield "DELETE", "/v1/vector_stores/{name}", stores.delete
        yield "POST", "/v1/vector_stores/{store}/files", files.add
        yield "POST", "/v1/vector_stores/{store}/files/{file:path}", files.update
        yield "POST", "/v1/vector_stores/{store}/file_batches", files.add_batch
        yield "GET", "/v1/vector_stores/{store}/file_batches/{batch}", files.get_batch
        yield "POST", "/v1/vector_stores/{store}/file_batches/{batch}/cancel", files.cancel_batch
        yield "GET", "/v1/vector_stores/{store}/file_batches/{batch}/files", files.list_files
        uploads = FileRoutes(api.settings, api.service.stores)
        yield "POST", "/v1/files", uploads.upload
        yield "GET", "/v1/files", uploads.list_files
        yield "GET", "/v1/files/{file}", uploads.get
        yield "DELETE", "/v1/files/{file}", uploads.delete
        yield "GET", "/v1/files/{file}/content", uploads.content
    if api.service.writes is not None:
        documents = DocumentRoutes(api, api.service.writes)
        yield "PUT", "/v1/collections/{name}/documents", documents.put
        yield "DELETE", "/v1/collections/{name}/documents", documents.delete
        yield "POST", "/v1/collections/{name}/flush", documents.flush
        yield "GET", "/v1/collections/{name}", documents.state

    yield "GET", "/v1/models", node.models
    yield "GET", "/v1/models/{model:path}", node.one_model
    yield "GET", f"{TRACES}{{traced:path}}", node.trace
    yield "GET", "/health", node.health
    yield "GET", "/ready", node.health
    yield "GET", "/metrics", node.metrics
    if api.service.drain is not None:
        yield "GET POST DELETE", "/drain", partial(drain, api)


class _NodeRoutes:
    """What the node says of itself."""

    def __init__(self, api: Api) -> None:
        self._api, self._service, self._settings = api, api.service, api.settings
        self._created = int(time.time())

    async def models(self, http: Request) -> Response:
        names = (self._settings.model, *self._settings.http.model_aliases) if self._settings.model else ()
        return json_response({"object": "list", "data": [self._model_json(name) for name in dict.fromkeys(names)]})

    async def one_model(self, http: Request) -> Response:
        self._api.check_model(model := http.path_params["model"])
        return json_response(self._model_json(model))

    async def trace(self, http: Request) -> Response:
        return json_response(self._service.engine.traces.trace(http.path_params["traced"]))

    async def health(self, http: Request) -> Response:
        missing, readiness = missing_roles(self._service, self._settings), self._service.readiness
        if not missing and not readiness.draining:
            readiness.record_ready()
            unavailable = self._service.collections.unavailable()
            return json_response({"status": "ready", "missing": [], "unavailable": unavailable})
        reason = (
            f"not ready, missing: {', '.join(missing)}"
            if missing
            else "the node is draining: send new requests to another node"
        )
        status = {"status": "draining" if readiness.draining else "unavailable", "missing": missing}
        return json_response(error_json(Unavailable(reason)) | status, {"Retry-After": str(RETRY_AFTER_S)}, status=503)

    async def metrics(self, http: Request) -> Response:
        return PlainTextResponse(await self._service.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

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
