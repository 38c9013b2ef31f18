"""One server: its HTTP, its streams' events, and what it says went wrong as our errors."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from runtime.engines.openai.http import AioHttp, Disconnected, Http, Reply
from runtime.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineRefusedKey,
    EngineUnreachable,
    InvalidRequest,
    Overloaded,
    TrinityError,
)
from runtime.node.engine_config import Stage
from runtime.serving.frontend.observability import trace_context

Json = dict[str, Any]

MAX_EVENT_BYTES = 8 << 20
DONE = b"[DONE]"


async def payloads(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events' data, the end mark too. Raises EngineFailed for an event of more than `MAX_EVENT_BYTES`."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part if rest else part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(rest) > MAX_EVENT_BYTES:
            raise EngineFailed(f"the engine's stream has an event of over {MAX_EVENT_BYTES} bytes")
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


_MAX_ANSWER_BYTES = 16 << 20  # of an answer that is not a stream
_MAX_ERROR_BYTES = 64 << 10
_REQUESTS_FAULT = (400, 404, 405, 409, 413, 415, 422, 501)
_BUSY = (408, 425, 429, 503, 529)

to_json = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def from_json(content: bytes) -> Any:
    """Raises msgspec's DecodeError, also for what is nested too deeply or no UTF-8."""
    try:
        return _decode(content)
    except RecursionError as error:
        raise msgspec.DecodeError("JSON is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"no UTF-8 at byte {error.start}") from error


class StreamBroken(EngineFailed):
    """The stream ended before the answer did."""


class Server:
    """A server at `url` (with its /v1). `http` stands for the network in tests; `stage` is what it is for."""

    def __init__(
        self, url: str, key: str = "", connect_s: float = 5.0, http: Http | None = None, stage: Stage = ""
    ) -> None:
        self.url, self.stage = url, stage
        self._root = _without_version(url)
        self._http = http or AioHttp(connect_s)
        # Not compressed: a stream's chunks would wait for each other, and an answer's size be known too late.
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    async def get(self, path: str) -> Json:
        """An answer to GET. Raises TrinityError."""
        async with self._asked("GET", self.url + path) as answer:
            return await self._whole(answer)

    async def post(self, path: str, body: Mapping[str, Any], *, beside: bool = False, request_id: str = "") -> Json:
        """An answer to POST; `beside`: the path is not under /v1 but beside it. Raises TrinityError."""
        async with self._asked("POST", (self._root if beside else self.url) + path, body, request_id) as answer:
            return await self._whole(answer)

    async def metrics(self) -> str:
        """Its metrics in Prometheus's text format. Raises TrinityError."""
        async with self._asked("GET", f"{self._root}/metrics") as answer:
            try:
                return (await _some(answer, _MAX_ANSWER_BYTES)).decode(errors="replace")
            except Disconnected as error:
                raise EngineUnreachable(f"{self.url}: its metrics broke off: {error}") from error

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any], request_id: str = ""
    ) -> AsyncIterator[AsyncIterator[Json]]:
        """The chunks of a streamed answer; leaving the block closes the connection, by which the server knows that
        nobody waits any more. Entering raises TrinityError, and so does the iterator: StreamBroken if the stream ends
        without its end mark.
        """
        async with self._asked("POST", self.url + path, body, request_id) as answer:
            yield self._chunks(answer)

    @property
    def listens(self) -> bool:
        """False if it is known to take nothing new."""
        return self._http.listens

    async def close(self) -> None:
        """Close its connections."""
        await self._http.close()

    @contextlib.asynccontextmanager
    async def _asked(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, request_id: str = ""
    ) -> AsyncIterator[Reply]:
        headers = {**self._headers, **trace_context.get()}
        if request_id:
            headers["x-request-id"] = request_id
        try:
            answer = await self._http.ask(method, url, headers, None if body is None else to_json(body))
        except Disconnected as error:
            raise EngineUnreachable(f"{self.url} does not answer: {error}") from error
        try:
            if answer.status != 200:
                raise self._refusal(answer.status, await _some(answer, _MAX_ERROR_BYTES))
            yield answer
        finally:
            answer.close()

    async def _whole(self, answer: Reply) -> Json:
        try:
            value = from_json(await _some(answer, _MAX_ANSWER_BYTES))
        except (Disconnected, msgspec.DecodeError) as error:
            raise EngineFailed(f"{self.url}: its answer is no whole JSON: {error}") from error
        if not isinstance(value, dict):
            raise EngineFailed(f"{self.url}: its answer is no JSON object")
        return value

    async def _chunks(self, answer: Reply) -> AsyncIterator[Json]:
        try:
            async for data in payloads(answer.parts()):
                if data == DONE:
                    answer.over()
                    return
                chunk = from_json(data)
                if not isinstance(chunk, dict):
                    raise EngineFailed(f"{self.url}: a chunk of its stream is no JSON object")
                if chunk.get("error"):
                    raise self._refusal(_status_of(chunk["error"]), data)
                yield chunk
        except (Disconnected, msgspec.DecodeError) as error:
            raise StreamBroken(f"{self.url}: its stream broke off: {error}") from error
        raise StreamBroken(f"{self.url}: its stream ended without its end mark")

    def _refusal(self, status: int, body: bytes) -> TrinityError:
        """What an error answer means, in our errors."""
        message, param, code = _said(body)
        told = f"{self.url} answers {status}: {message}" if message else f"{self.url} answers {status}"
        if status in (401, 403):
            return EngineRefusedKey(f"{told}; set model.api_key_file to a file with a key that it takes")
        if status in _BUSY:
            return Overloaded(told)
        if status not in _REQUESTS_FAULT:
            return EngineFailed(told)
        if (
            code == "context_length_exceeded"
            or "context length" in message.lower()
            or "context size" in message.lower()
        ):
            return ContextLengthExceeded(message, param)
        if status == 404 and "model" in f"{code} {message}".lower():
            return EngineFailed(told)  # the name was checked when the server was first asked: it has changed since
        refused = InvalidRequest(message or told, param)
        refused.status = status
        return refused


async def _some(answer: Reply, limit: int) -> bytes:
    """The body, of at most `limit` bytes; of a longer one its beginning."""
    parts, size = [], 0
    async for part in answer.parts():
        parts.append(part)
        size += len(part)
        if size > limit:
            break
    return b"".join(parts)[:limit]


def _said(body: bytes) -> tuple[str, str | None, str]:
    """Message, parameter and code of an error object: OpenAI's, vLLM's older one, FastAPI's."""
    try:
        value = from_json(body)
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace").strip(), None, ""
    said = value.get("error", value) if isinstance(value, dict) else value
    if not isinstance(said, dict):
        return str(said)[:1000], None, ""
    message = said.get("message") or said.get("detail") or ""
    param, code = said.get("param"), said.get("code")
    return str(message)[:1000], param if isinstance(param, str) else None, str(code or "")


def _status_of(error: object) -> int:
    """Of an error within a stream, which has no status of its own."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _without_version(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.removesuffix("/v1")))
