"""The files of configured collections as those of a vector store: list, show, content, delete.

Which files are completed is what the collection says; of those that were uploaded into it there are records, and the
others of these, in progress, failed or cancelled, are listed behind all.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import CollectionError, Unavailable
from runtime.retrieval.attributes.filters import Comparison
from runtime.retrieval.collections.documents import Document
from runtime.retrieval.collections.files import SOURCE, CollectionFile, file_of
from runtime.retrieval.collections.served_documents import CollectionDocuments
from runtime.retrieval.fair_gate import FairLimit
from runtime.retrieval.passages import check_size
from runtime.retrieval.stores.records import FileStatus, StoreFile, UnknownObject
from runtime.retrieval.stores.service import Stores
from runtime.serving.http.access import access_of, tenant_of
from runtime.serving.http.response_memory import unsent_response
from runtime.serving.http.responses import Json, json_response
from runtime.serving.http.routes.paging import list_json, page_of
from runtime.serving.http.routes.store_objects import content_page, store_file_json
from runtime.serving.http.service import Service

_CONCURRENT = 4  # requests: each looks at all rows
_READ_AT_ONCE = 64  # documents: searches read theirs in between
T = TypeVar("T")


class CollectionFiles:
    """Handlers for the file routes, of the configured collection `name`. For keys that may access all of it: a list
    would show what others have."""

    def __init__(self, service: Service) -> None:
        self._collections, self._stores, self._writes = service.collections, service.stores, service.writes
        self._limit = FairLimit(_CONCURRENT, "requests for the files of collections")

    async def list_files(self, http: Request, name: str, status: FileStatus | None) -> Response:
        page = page_of(http.query_params)
        if status not in (None, "completed"):
            none: tuple[list[StoreFile], bool] = [], False
            entries, more = none if self._stores is None else await self._stores.entries(name, page, "", status)
            return json_response(list_json([store_file_json(entry) for entry in entries], more))
        unfinished = {} if self._stores is None else await self._stores.unfinished(name)

        def read(documents: CollectionDocuments) -> tuple[list[CollectionFile], bool]:
            pending = [id for id, state in unfinished.items() if state != "deleted" and status is None]
            files = documents.files(unfinished, pending)
            return files.page(page.limit, page.after, page.before, descending=page.descending)

        files, more = await self._run(http, name, read)
        uploads = await self._uploads(name, [file.id for file in files])
        return json_response(list_json([self._file_json(name, file, uploads.get(file.id)) for file in files], more))

    async def get(self, http: Request, name: str) -> Response:
        id = http.path_params["file"]
        upload = (await self._uploads(name, [id])).get(id)
        if upload is not None and upload.status != "completed":
            return json_response(store_file_json(upload))
        return json_response(self._file_json(name, await self._find(http, name), upload))

    async def content(self, http: Request, name: str) -> Response:
        id, unsent = http.path_params["file"], unsent_response(http)
        upload = (await self._uploads(name, [id])).get(id)
        if self._stores is not None and upload is not None and upload.status != "completed":
            return await stored_content(self._stores, upload, http)

        def read(documents: CollectionDocuments) -> Response:
            rows, size, texts = _rows_of(documents, id), 0, []

            def count(one: Document) -> None:
                nonlocal size
                size += len(one.text)
                check_size(size, len(rows))
                unsent.reserve(2 * size)

            for begin in range(0, len(rows), _READ_AT_ONCE):
                texts += [one.text for one in documents.get(rows[begin : begin + _READ_AT_ONCE], count) if one]
            return content_page(texts)

        return await self._run(http, name, read)

    async def delete(self, http: Request, name: str) -> Response:
        assert self._writes is not None, "there is a collection"
        id, flow = http.path_params["file"], access_of(http).flow
        if self._stores is not None and id in await self._uploads(name, [id]):
            self._check_available(name)
            await self._stores.remove_file(name, id, tenant_of(http))
        elif (await self._find(http, name)).is_document:
            await self._writes.delete(name, [id], None, flow)
        else:
            await self._writes.delete_where(name, Comparison(SOURCE, "eq", (id,)), None, flow)
        return json_response({"id": id, "object": "vector_store.file.deleted", "deleted": True})

    async def _uploads(self, name: str, files: Sequence[str]) -> dict[str, StoreFile]:
        """Return the records of those of the files that were uploaded."""
        if self._stores is None:
            return {}
        return {id: entry for (_, id), (entry, _) in (await self._stores.names([(name, id) for id in files])).items()}

    async def _find(self, http: Request, name: str) -> CollectionFile:
        id = http.path_params["file"]

        def find(documents: CollectionDocuments) -> CollectionFile:
            (first,) = documents.get(_rows_of(documents, id)[:1])
            return file_of(_check(first, id))

        return await self._run(http, name, find)

    def _file_json(self, name: str, file: CollectionFile, upload: StoreFile | None = None) -> Json:
        if upload is not None:
            return store_file_json(upload)
        return {
            "id": file.id,
            "object": "vector_store.file",
            "created_at": self._collections.summary(name).created_at,
            "vector_store_id": name,
            "status": "completed",
            "last_error": None,
            "usage_bytes": 0,
            "attributes": file.attributes,
            "chunking_strategy": {"type": "other"},
        }

    async def _run(self, http: Request, name: str, read: Callable[[CollectionDocuments], T]) -> T:
        """Read a collection's documents on a thread. Raises `Overloaded`, `Unavailable`."""
        self._check_available(name)
        documents = self._collections.documents(name)
        async with self._limit.counted(access_of(http).flow):
            try:
                return await asyncio.to_thread(read, documents)
            except CollectionError as error:
                raise Unavailable(f"collection {name!r} is unavailable: {error.message}") from error

    def _check_available(self, name: str) -> None:
        if reason := self._collections.unavailable().get(name):  # as for searches: what was found damaged is not shown
            raise Unavailable(f"collection {name!r} is unavailable: {reason}")


async def stored_content(stores: Stores, entry: StoreFile, http: Request) -> Response:
    """Return the passages of an uploaded file in a store."""
    passages = await stores.passages(entry)
    unsent_response(http).reserve(2 * sum(len(one.text) for one in passages))
    return await asyncio.to_thread(content_page, [one.text for one in passages])


def _rows_of(documents: CollectionDocuments, file: str) -> list[int]:
    return _check(documents.files().rows_of(file), file)


def _check(content: T | None, file: str) -> T:
    """Return what was found of a file. Raises `UnknownObject` for nothing."""
    if not content:
        raise UnknownObject(f"no file of the vector store has the id {file[:128]!r}", "id")
    return content
