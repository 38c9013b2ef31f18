"""/v1/vector_stores/{id}/files and …/file_batches: the files in a client's vector store or a configured collection."""

from typing import cast, get_args

from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.retrieval.stores.records import FileStatus, NewEntry
from runtime.retrieval.stores.service import Stores
from runtime.serving.http.access import access_of, tenant_of
from runtime.serving.http.api import Api
from runtime.serving.http.parsing import parse, parse_object
from runtime.serving.http.responses import json_response
from runtime.serving.http.routes.collection_files import CollectionFiles, stored_content
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
    """The routes. A node without `[stores]` has only those that read and delete, for configured collections."""

    def __init__(self, api: Api) -> None:
        self._api, self._clients, self._files = api, api.service.stores, CollectionFiles(api.service)

    async def add(self, http: Request) -> Response:
        body = parse(AddFileBody, await self._api.read(http))
        entries, _ = await self._stores.add_files(self._store(http), [_entry(body)], tenant_of(http), batch=False)
        return json_response(store_file_json(entries[0]))

    async def list_files(self, http: Request) -> Response:
        status = http.query_params.get("filter")
        if status is not None and status not in _FILTERS:
            raise InvalidRequest(f"filter is {status[:64]!r}, allowed are {', '.join(_FILTERS)}", "filter")
        batch = http.path_params.get("batch")
        wanted = cast("FileStatus | None", status)
        if batch is None and (name := self._collection(http)) is not None:
            return await self._files.list_files(http, name, wanted)
        store, page = self._store(http), page_of(http.query_params)
        if batch is not None:
            await self._stores.batch(store, batch, tenant_of(http))
        entries, more = await self._stores.entries(store, page, tenant_of(http), wanted, batch)
        return json_response(list_json([store_file_json(entry) for entry in entries], more))

    async def get(self, http: Request) -> Response:
        if (name := self._collection(http)) is not None:
            return await self._files.get(http, name)
        entry = await self._stores.entry(self._store(http), http.path_params["file"], tenant_of(http))
        return json_response(store_file_json(entry))

    async def update(self, http: Request) -> Response:
        content = await self._api.read(http)
        body = parse(UpdateFileBody, content)
        if "attributes" not in parse_object(content):
            raise InvalidRequest("attributes is missing", "attributes")
        store, file = self._store(http), http.path_params["file"]
        entry = await self._stores.update_attributes(store, file, body.attributes, tenant_of(http))
        return json_response(store_file_json(entry))

    async def delete(self, http: Request) -> Response:
        if (name := self._collection(http)) is not None:
            return await self._files.delete(http, name)
        id = http.path_params["file"]
        await self._stores.remove_file(self._store(http), id, tenant_of(http))
        return json_response({"id": id, "object": "vector_store.file.deleted", "deleted": True})

    async def content(self, http: Request) -> Response:
        if (name := self._collection(http)) is not None:
            return await self._files.content(http, name)
        entry = await self._stores.entry(self._store(http), http.path_params["file"], tenant_of(http))
        return await stored_content(self._stores, entry, http)

    async def add_batch(self, http: Request) -> Response:
        body = parse(AddBatchBody, await self._api.read(http))
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

    @property
    def _stores(self) -> Stores:
        assert self._clients is not None, "with [stores]"
        return self._clients

    def _collection(self, http: Request) -> str | None:
        """Return the configured collection that a request is about; None for a client's store.

        Raises `Forbidden` unless the key may access all of it: others' files would be shown, and on a node without
        clients' stores `UnknownCollection`.
        """
        name, access = str(http.path_params["store"]), access_of(http)
        if self._clients is None:
            access.resolve(name, self._api.settings.collections, "vector_store_id", "vector store")
        elif name not in self._api.settings.collections:
            return None
        access.require_whole_collection(name)
        return name

    def _store(self, http: Request) -> str:
        """Return a store or configured collection. Raises `Forbidden` as `_collection`."""
        return self._collection(http) or str(http.path_params["store"])


def _entry(body: AddFileBody) -> NewEntry:
    return NewEntry(body.file_id, body.attributes, to_chunking(body.chunking_strategy))
