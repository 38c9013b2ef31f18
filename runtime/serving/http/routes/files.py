"""/v1/files: files that clients upload, for vector stores."""

import asyncio
from typing import Literal, get_args

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from runtime.errors import Forbidden, InvalidRequest
from runtime.retrieval.stores.records import NewFile, StoredFile, UnknownObject
from runtime.retrieval.stores.service import Stores
from runtime.serving.http.access import tenant_of
from runtime.serving.http.multipart import Write, declared_bytes, receive_form
from runtime.serving.http.responses import Json, json_response
from runtime.serving.http.routes.paging import MAX_FILES_LISTED, list_json, page_of
from runtime.serving.http.service import Settings

Purpose = Literal["assistants", "user_data"]
PURPOSES: tuple[str, ...] = get_args(Purpose)
_EXPIRES_S = range(3600, 2_592_001)
_MAX_DIGITS = 9


class FileRoutes:
    """The routes, of `stores`."""

    def __init__(self, settings: Settings, stores: Stores) -> None:
        self._stores, self._settings = stores, settings

    async def upload(self, http: Request) -> Response:
        self._check_origin(http)
        size = declared_bytes(http, self._stores.max_file_bytes)

        async def receive(write: Write) -> NewFile:
            form = await receive_form(http, size, self._settings.body_timeout_s, write)
            if form.file_name is None:
                raise InvalidRequest("the form has no file", "file")
            purpose = form.fields.pop("purpose", "")
            if purpose not in PURPOSES:
                allowed = " and ".join(PURPOSES)
                raise InvalidRequest(f"purpose is {purpose[:64]!r}, supported are {allowed}", "purpose")
            return NewFile(form.file_name, purpose, _lifetime_s(form.fields))

        return json_response(file_json(await self._stores.upload(size, tenant_of(http), receive)))

    async def list_files(self, http: Request) -> Response:
        page = page_of(http.query_params, MAX_FILES_LISTED, MAX_FILES_LISTED)
        files, more = await self._stores.files(page, http.query_params.get("purpose"), tenant_of(http))
        return json_response(list_json([file_json(file) for file in files], more))

    async def get(self, http: Request) -> Response:
        return json_response(file_json(await self._stores.file(http.path_params["file"], tenant_of(http))))

    async def delete(self, http: Request) -> Response:
        id = http.path_params["file"]
        await self._stores.delete_file(id, tenant_of(http))
        return json_response({"id": id, "object": "file", "deleted": True})

    async def content(self, http: Request) -> Response:
        file = await self._stores.file(http.path_params["file"], tenant_of(http))
        headers = {"x-content-type-options": "nosniff"}
        path = self._stores.content_path(file)
        try:
            status = await asyncio.to_thread(path.stat)
        except FileNotFoundError:  # deleted meanwhile
            raise UnknownObject(f"no file has the id {file.id!r}", "id") from None
        kind = "application/octet-stream"
        return FileResponse(path, headers=headers, media_type=kind, filename=file.name, stat_result=status)

    def _check_origin(self, http: Request) -> None:
        """Refuse pages of other origins, which have no key: browsers send their forms unasked, unlike JSON."""
        origin, allowed = http.headers.get("origin"), self._settings.http.cors_origins
        if origin and not self._settings.api_keys and "*" not in allowed and origin not in allowed:
            raise Forbidden(f"pages of {origin[:128]!r} may not upload files: add it to http.cors_origins")


def _lifetime_s(fields: dict[str, str]) -> int:
    anchor, seconds = fields.pop("expires_after[anchor]", None), fields.pop("expires_after[seconds]", None)
    if fields:
        raise InvalidRequest(f"unknown field {next(iter(fields))[:64]!r}")
    if anchor is None and seconds is None:
        return 0
    value = int(seconds) if seconds and len(seconds) <= _MAX_DIGITS and seconds.isdecimal() else 0
    if anchor != "created_at" or value not in _EXPIRES_S:
        raise InvalidRequest(
            f"expires_after needs the anchor created_at and {_EXPIRES_S[0]} to {_EXPIRES_S[-1]} seconds",
            "expires_after",
        )
    return value


def file_json(file: StoredFile) -> Json:
    """Return OpenAI's object of a file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
