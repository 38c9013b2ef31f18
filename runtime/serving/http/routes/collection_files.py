"""The files of configured collections as those of a vector store: list, show, content, delete."""

import asyncio
from collections.abc import Callable, Mapping
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
from runtime.retrieval.stores.records import UnknownObject
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.access import access_of
from runtime.serving.http.response_memory import unsent_response
from runtime.serving.http.responses import Json, json_response
from runtime.serving.http.routes.paging import list_json, page_of
from runtime.serving.http.routes.store_objects import content_page
from runtime.serving.http.service import CollectionCatalogue

_CONCURRENT = 4  # requests: each looks at all rows
_READ_AT_ONCE = 64  # documents: searches read theirs in between
T = TypeVar("T")


class CollectionFiles:
    """Handlers for the file routes, of the configured collection `name`. For keys that may access all of it: a list
    would show what others have. `unavailable`: the collections that no pool can serve → reason."""

    def __init__(
        self,
        catalogue: CollectionCatalogue,
        writes: WriterService | None,
        unavailable: Callable[[], Mapping[str, str]],
    ) -> None:
        self._catalogue, self._writes, self._unavailable = catalogue, writes, unavailable
        self._limit = FairLimit(_CONCURRENT, "requests for the files of collections")

    async def list_files(self, http: Request, name: str) -> Response:
        page = page_of(http.query_params)

        files, more = await self._run(
            http,
            name,
            lambda documents: documents.files().page(page.limit, page.after, page.before, descending=page.descending),
        )
        if http.query_params.get("filter") not in (None, "completed"):
            files, more = [], False
        return json_response(list_json([self._file_json(name, file) for file in files], more))

    async def get(self, http: Request, name: str) -> Response:
        return json_response(self._file_json(name, await self._find(http, name)))

    async def content(self, http: Request, name: str) -> Response:
        id, unsent = http.path_params["file"], unsent_response(http)

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
        file, flow = await self._find(http, name), access_of(http).flow
        if file.is_document:
            await self._writes.delete(name, [file.id], None, flow)
        else:
            await self._writes.delete_where(name, Comparison(SOURCE, "eq", (file.id,)), None, flow)
        return json_response({"id": file.id, "object": "vector_store.file.deleted", "deleted": True})

    async def _find(self, http: Request, name: str) -> CollectionFile:
        id = http.path_params["file"]

        def find(documents: CollectionDocuments) -> CollectionFile:
            (first,) = documents.get(_rows_of(documents, id)[:1])
            return file_of(_check(first, id))

        return await self._run(http, name, find)

    def _file_json(self, name: str, file: CollectionFile) -> Json:
        return {
            "id": file.id,
            "object": "vector_store.file",
            "created_at": self._catalogue.summary(name).created_at,
            "vector_store_id": name,
            "status": "completed",
            "last_error": None,
            "usage_bytes": 0,
            "attributes": file.attributes,
            "chunking_strategy": {"type": "other"},
        }

    async def _run(self, http: Request, name: str, read: Callable[[CollectionDocuments], T]) -> T:
        """Read a collection's documents on a thread. Raises `Forbidden`, `Overloaded`, `Unavailable`."""
        access = access_of(http)
        access.require_whole_collection(name)
        if reason := self._unavailable().get(name):  # as for searches: what was found damaged is not shown
            raise Unavailable(f"collection {name!r} is unavailable: {reason}")
        documents = self._catalogue.documents(name)
        async with self._limit.counted(access.flow):
            try:
                return await asyncio.to_thread(read, documents)
            except CollectionError as error:
                raise Unavailable(f"collection {name!r} is unavailable: {error.message}") from error


def _rows_of(documents: CollectionDocuments, file: str) -> list[int]:
    return _check(documents.files().rows_of(file), file)


def _check(content: T | None, file: str) -> T:
    """Return what was found of a file. Raises `UnknownObject` for nothing."""
    if not content:
        raise UnknownObject(f"no file of the vector store has the id {file[:128]!r}", "id")
    return content
