"""Receiving of `multipart/form-data` with one file, which is passed on in parts as it arrives."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

from starlette.requests import ClientDisconnect, Request

from runtime.errors import InvalidRequest
from runtime.serving.frontend.requests import ClientDisconnected
from runtime.serving.http.middleware import BodyTooLarge, CompressedBody, NotJson, RequestTooSlow

FORM_BYTES = 64 << 10
"""Of a form without its file."""
MIN_BYTES_S = 64 << 10
MAX_NAME = 512  # characters of a file's name
_HEAD_BYTES = 4 << 10
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^;\s"]{1,70}))')
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"')
_EXTENDED = re.compile(r";\s*filename\*=utf-8''([^;\s]+)", re.IGNORECASE)
Write = Callable[[bytes], Awaitable[None]]


@dataclass
class Form:
    """The fields of a form, and the name of its file, None without one."""

    fields: dict[str, str] = field(default_factory=dict)
    file_name: str | None = None


def declared_bytes(http: Request, limit: int) -> int:
    """Return how large the form's file may be. Raises `BodyTooLarge`, and refuses other bodies than forms."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise CompressedBody(f"the body has Content-Encoding {encoding[:64]!r}: send it uncompressed")
    if not http.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise NotJson("send the file as multipart/form-data")
    declared = http.headers.get("content-length", "")
    if not declared.isdecimal():
        return limit
    if (size := int(declared[:20])) > limit + FORM_BYTES:
        raise BodyTooLarge(f"the body has {size} bytes, the limit of a file is {limit}")
    return min(size, limit)


async def receive_form(http: Request, limit: int, timeout_s: float, write: Write) -> Form:
    """Return the form; the content of its field `file`, of at most `limit` bytes, is passed to `write`.

    timeout_s: for the first and any following part, and until the form's end, which is put off by `MIN_BYTES_S`.
    Raises `InvalidRequest`, `BodyTooLarge`, `RequestTooSlow`, `ClientDisconnected`, and the errors of `write`.
    """
    boundary = _BOUNDARY.search(http.headers.get("content-type", ""))
    if boundary is None:
        raise InvalidRequest("the body's Content-Type has no boundary")
    try:
        return await _Parser(_chunks(http, timeout_s), boundary[1] or boundary[2], limit, write).form()
    except TimeoutError:
        raise RequestTooSlow("the file did not arrive in time") from None
    except ClientDisconnect:
        raise ClientDisconnected("the client closed the connection before its file was complete") from None


async def _chunks(http: Request, timeout_s: float) -> AsyncIterator[bytes]:
    more, received, clock = True, 0, asyncio.get_running_loop().time
    begin = clock()
    while more:
        until = begin + timeout_s + received / MIN_BYTES_S
        async with asyncio.timeout_at(min(until, clock() + timeout_s)):
            message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        received += len(part)
        yield part
        more = message.get("more_body", False)


class _Parser:
    def __init__(self, chunks: AsyncIterator[bytes], boundary: str, limit: int, write: Write) -> None:
        self._chunks, self._limit, self._write = chunks, limit, write
        self._delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._buffer = b"\r\n"
        self._form_bytes = 0  # without the file

    async def form(self) -> Form:
        form = Form()
        await self._before(self._delimiter)
        while not (await self._take(2)).startswith(b"--"):
            name, file_name = _disposition((await self._before(b"\r\n\r\n", _HEAD_BYTES)).decode("utf-8", "replace"))
            if name != "file" or file_name is None:
                form.fields[name] = (await self._before(self._delimiter)).decode("utf-8", "replace")
            elif form.file_name is not None:
                raise InvalidRequest("the form has more than one file", "file")
            else:
                form.file_name = file_name
                await self._write_file()
        async for rest in self._chunks:  # what follows the end
            self._count(len(rest))
        return form

    async def _write_file(self) -> None:
        size = 0
        async for part in self._until(self._delimiter):
            size += len(part)
            if size > self._limit:
                raise BodyTooLarge(f"the file has more than {self._limit} bytes, the limit")
            await self._write(part)

    async def _before(self, end: bytes, limit: int = FORM_BYTES) -> bytes:
        """Return what comes before `end`, and drop `end`."""
        content = bytearray()
        async for part in self._until(end):
            content += part
            self._count(len(part))
            if len(content) > limit:
                raise InvalidRequest(f"the head of a part has more than {limit} bytes")
        return bytes(content)

    def _count(self, size: int) -> None:
        self._form_bytes += size
        if self._form_bytes > FORM_BYTES:
            raise BodyTooLarge(f"the form has more than {FORM_BYTES} bytes without its file")

    async def _until(self, end: bytes) -> AsyncIterator[bytes]:
        """Yield what comes before `end`, and drop `end`."""
        while (at := self._buffer.find(end)) < 0:
            if (done := len(self._buffer) - len(end) + 1) > 0:
                part, self._buffer = self._buffer[:done], self._buffer[done:]
                yield part
            await self._more()
        part, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        if part:
            yield part

    async def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        self._count(size)
        return taken

    async def _more(self) -> None:
        try:
            self._buffer += await anext(self._chunks)
        except StopAsyncIteration:
            raise InvalidRequest("the form ends before its last boundary") from None


def _disposition(head: str) -> tuple[str, str | None]:
    """Return the name of a part, and its file's name, without folders; None for a field."""
    lines = re.split(r"\r?\n", head)  # no other line ends: a name may have U+2028
    line = next((one for one in lines if one.lower().startswith("content-disposition:")), "")
    parameters = {key: re.sub(r"\\(.)", r"\1", value) for key, value in _PARAMETER.findall(line)}
    if extended := _EXTENDED.search(line):
        parameters["filename"] = unquote(extended[1])
    if "filename" not in parameters:
        return parameters.get("name", "")[:64], None
    name = re.split(r"[/\\]", parameters["filename"].replace("%22", '"'))[-1]
    return parameters.get("name", "")[:64], "".join(c for c in name if c.isprintable())[:MAX_NAME] or "file"
