"""Routes of collections: PUT and DELETE documents, flush, and state."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.retrieval.collections.validation import MAX_BATCH, UpsertDocument
from runtime.retrieval.writer_service import WriterService
from runtime.serving.http.access import access_of
from runtime.serving.http.api import Api
from runtime.serving.http.api_types import filter_at
from runtime.serving.http.parsing import StrictModel, field_error, parse
from runtime.serving.http.responses import Json, json_response


def _batch_of(name: str) -> Callable[[object], object]:
    """Return a validator of the length of an array in field `name`."""

    def validate(value: object) -> object:
        if not isinstance(value, list) or not value:
            raise field_error(f"{name} must be an array with at least one element")
        if len(value) > MAX_BATCH:
            raise field_error(f"{name} has {len(value)} elements, the limit is {MAX_BATCH} per request")
        return value

    return validate


class Document(StrictModel, extra="forbid"):
    """A document to store. Without a `vector` its title and text are embedded."""

    id: str
    text: str = ""
    title: str = ""
    attributes: dict[str, Any] = Field(default_factory=dict)
    vector: list[float] | None = None


class PutBody(StrictModel):
    """PUT /v1/collections/{name}/documents."""

    documents: Annotated[list[Document], BeforeValidator(_batch_of("documents"))]


class DeleteBody(StrictModel):
    """DELETE /v1/collections/{name}/documents: by `ids` or by `filter`."""

    ids: Annotated[list[str], BeforeValidator(_batch_of("ids"))] | None = None
    filter: Annotated[Any, BeforeValidator(filter_at("filter"))] = None


class DocumentRoutes:
    """The routes, by `writes`."""

    def __init__(self, api: Api, writes: WriterService) -> None:
        self._api, self._writes = api, writes

    async def put(self, http: Request) -> Response:
        name = self._name(http)
        body = parse(PutBody, await self._api.read(http))
        owner = access_of(http).restriction(name)
        owner_attributes = {} if owner is None else {owner.key: owner.value}
        documents = [
            UpsertDocument(d.id, d.text, d.title, owner_attributes | d.attributes, d.vector) for d in body.documents
        ]
        stored = await self._writes.upsert(name, documents, owner, access_of(http).flow)
        response: Json = {"object": "documents.stored", "collection": name}
        return json_response(response | {"count": stored.count, "visible": stored.visible})

    async def delete(self, http: Request) -> Response:
        name = self._name(http)
        body = parse(DeleteBody, await self._api.read(http))
        if (body.ids is None) == (body.filter is None):
            raise InvalidRequest("set either ids or filter", "ids")
        owner = access_of(http).restriction(name)
        if body.ids is not None:
            count = await self._writes.delete(name, body.ids, owner, access_of(http).flow)
        else:
            wanted = access_of(http).restrict(name, body.filter)
            assert wanted is not None, "there is a filter"
            count = await self._writes.delete_where(name, wanted, owner, access_of(http).flow)
        return json_response({"object": "documents.deleted", "collection": name, "count": count})

    async def flush(self, http: Request) -> Response:
        name = self._name(http)
        access_of(http).require_whole_collection(name)
        await self._writes.flush(name)
        return json_response({"object": "collection.flushed", "collection": name})

    async def state(self, http: Request) -> Response:
        name = self._name(http)
        access_of(http).require_whole_collection(name)
        writing = (await self._writes.states()).get(name)
        state: Json = {"object": "collection", "id": name, "writing": writing is not None}
        return json_response(state if writing is None else state | writing._asdict())

    def _name(self, http: Request) -> str:
        return access_of(http).resolve(str(http.path_params["name"]), self._api.settings.collections, "collection")
