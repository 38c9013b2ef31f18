"""/v1/vector_stores/{id}/files and …/file_batches: the files in a client's vector store."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import cast, get_args

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.retrieval.ingestion.passages import FilePassage
from runtime.retrieval.stores.records import FileStatus
from runtime.retrieval.stores.service import NewEntry, Stores
from runtime.serving.http.access import access_of
from runtime.serving.http.middleware import ReadBody
from runtime.serving.http.parsing import parse
from runtime.serving.http.response_memory import unsent_response
from runtime.serving.http.responses import json_response
from runtime.serving.http.routes.files import tenant_of
from runtime.serving.http.routes.paging import list_json, page_of
from runtime.serving.http.routes.store_objects import (
    MAX_BATCH_FILES,
    AddBatchBody,
    AddFileBody,
    UpdateFileBody,
    batch_json,
    store_file_json,
    to_chunking,
)

_FILTERS = tuple(status for status in get_args(FileStatus) if status != "deleted")


class StoreFileRoutes:
    """The routes. `collections` contains the names of configured ones, whose files are not listed here."""

    def __init__(self, stores: Stores, read: ReadBody, collections: Iterable[str]) -> None:
        self._stores, self._read, self._collections = stores, read, collections

    def add_to(self, app: Starlette) -> None:
        """Register the routes."""
        files, batches = "/v1/vector_stores/{store}/files", "/v1/vector_stores/{store}/file_batches"
        app.add_route(files, self.add, methods=["POST"])
        app.add_route(files, self.list_files, methods=["GET"])
        app.add_route(f"{files}/{{file}}", self.get, methods=["GET"])
        app.add_route(f"{files}/{{file}}", self.update, methods=["POST"])
        app.add_route(f"{files}/{{file}}", self.delete, methods=["DELETE"])
        app.add_route(f"{files}/{{file}}/content", self.content, methods=["GET"])
        app.add_route(batches, self.add_batch, methods=["POST"])
        app.add_route(f"{batches}/{{batch}}", self.get_batch, methods=["GET"])
        app.add_route(f"{batches}/{{batch}}/cancel", self.cancel_batch, methods=["POST"])
        app.add_route(f"{batches}/{{batch}}/files", self.list_files, methods=["GET"])

    async def add(self, http: Request) -> Response:
        body = parse(AddFileBody, await self._read(http))
        entries, _ = await self._stores.add_files(self._store(http), [_entry(body)], tenant_of(http), batch=False)
        return json_response(store_file_json(entries[0]))

    async def list_files(self, http: Request) -> Response:
        status = http.query_params.get("filter")
        if status is not None and status not in _FILTERS:
            raise InvalidRequest(f"filter is {status[:64]!r}, allowed are {', '.join(_FILTERS)}", "filter")
        store, page, batch = self._store(http), page_of(http.query_params), http.path_params.get("batch")
        if batch is not None:
            await self._stores.batch(store, batch, tenant_of(http))
        wanted = cast("FileStatus | None", status)
        found, more = await self._stores.entries(store, page, tenant_of(http), wanted, batch)
        return json_response(list_json([store_file_json(entry) for entry in found], more))

    async def get(self, http: Request) -> Response:
        entry = await self._stores.entry(self._store(http), http.path_params["file"], tenant_of(http))
        return json_response(store_file_json(entry))

    async def update(self, http: Request) -> Response:
        body = parse(UpdateFileBody, await self._read(http))
        store, file = self._store(http), http.path_params["file"]
        entry = await self._stores.update_attributes(store, file, body.attributes, tenant_of(http))
        return json_response(store_file_json(entry))

    async def delete(self, http: Request) -> Response:
        id = http.path_params["file"]
        await self._stores.remove_file(self._store(http), id, tenant_of(http))
        return json_response({"id": id, "object": "vector_store.file.deleted", "deleted": True})

    async def content(self, http: Request) -> Response:
        entry = await self._stores.entry(self._store(http), http.path_params["file"], tenant_of(http))
        passages = await self._stores.passages(entry)
        unsent_response(http).reserve(2 * sum(len(one.text) for one in passages))
        return await asyncio.to_thread(_content_page, passages)  # it has the whole text of the file

    async def add_batch(self, http: Request) -> Response:
        body = parse(AddBatchBody, await self._read(http))
        if bool(body.file_ids) == bool(body.files):
            raise InvalidRequest(f"set either file_ids or files, with 1 to {MAX_BATCH_FILES} of them", "file_ids")
        own = AddFileBody(file_id="", attributes=body.attributes, chunking_strategy=body.chunking_strategy)
        alike = [own.model_copy(update={"file_id": id}) for id in dict.fromkeys(body.file_ids)]
        new = {one.file_id: _entry(one) for one in (*alike, *body.files)}
        store, tenant = self._store(http), tenant_of(http)
        _, batch = await self._stores.add_files(store, list(new.values()), tenant, batch=True)
        assert batch is not None, "asked for"
        return json_response(batch_json(batch, await self._stores.counts(store, batch.id)))

    async def get_batch(self, http: Request) -> Response:
        store = self._store(http)
        batch = await self._stores.batch(store, http.path_params["batch"], tenant_of(http))
        return json_response(batch_json(batch, await self._stores.counts(store, batch.id)))

    async def cancel_batch(self, http: Request) -> Response:
        store = self._store(http)
        batch = await self._stores.cancel_batch(store, http.path_params["batch"], tenant_of(http))
        return json_response(batch_json(batch, await self._stores.counts(store, batch.id)))

    def _store(self, http: Request) -> str:
        name = str(http.path_params["store"])
        if name in access_of(http).visible(self._collections):
            raise InvalidRequest(
                f"{name!r} is a collection of the node's configuration, whose files are not listed here",
                "vector_store_id",
            )
        return name


def _entry(body: AddFileBody) -> NewEntry:
    return NewEntry(body.file_id, body.attributes, to_chunking(body.chunking_strategy))


def _content_page(passages: Sequence[FilePassage]) -> Response:
    data = [{"type": "text", "text": one.text} for one in passages]
    return json_response(
        {"object": "vector_store.file_content.page", "data": data, "has_more": False, "next_page": None}
    )
