"""Client of one OpenAI server: requests, server-sent events, and its errors mapped to ours."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from runtime.engines.event_endpoints import EventEndpoints
from runtime.engines.openai.http import Disconnected, Http, Response
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


async def event_data(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate over the data of server-sent events, `DONE` included. Raises EngineFailed above `MAX_EVENT_BYTES`."""
    rest = b""
    async for chunk in body:
        *lines, rest = (rest + chunk if rest else chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(rest) > MAX_EVENT_BYTES:
            raise EngineFailed(f"the engine's stream has an event larger than {MAX_EVENT_BYTES} bytes")
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


_MAX_BODY_BYTES = 16 << 20  # of a response that is not a stream
_MAX_ERROR_BYTES = 64 << 10
_CLIENT_ERRORS = (400, 404, 405, 409, 413, 415, 422, 501)
_BUSY = (408, 425, 429, 503, 529)

to_json = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def from_json(content: bytes) -> Any:
    """Parse JSON. Raises msgspec's DecodeError, for too deep nesting and invalid UTF-8 too."""
    try:
        return _decode(content)
    except RecursionError as error:
        raise msgspec.DecodeError("JSON is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"invalid UTF-8 at byte {error.start}") from error


class StreamBroken(EngineFailed):
    """The stream ended before the answer did."""


class PrefillFailed(EngineFailed):
    """The prefill server of a request failed; the decode server is not at fault."""


class Server:
    """A server at `url` (with its /v1). `stage`: "prefill", "decode" or "" for both; `ranks`: GPUs that transfer its KV
    at the same time; `unpaired_fields`: of requests to this server alone; `events`:
    where it publishes what it has cached, if it does. Tests replace `http`."""

    def __init__(
        self,
        url: str,
        key: str = "",
        http: Http | None = None,
        stage: Stage = "",
        ranks: int = 1,
        unpaired_fields: Mapping[str, Any] | None = None,
        events: EventEndpoints | None = None,
    ) -> None:
        self.events = events
        self.url, self.stage, self.ranks, self.unpaired_fields = url, stage, ranks, dict(unpaired_fields or {})
        self._root = _without_version(url)
        self._http = http or Http()
        # No compression: it would delay a stream's chunks, and hide a body's size until it is decompressed.
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    async def get(self, path: str) -> Json:
        """GET a JSON object. Raises TrinityError."""
        async with self._request("GET", self.url + path) as answer:
            return await self._read_json(answer)

    async def post(self, path: str, body: Mapping[str, Any], *, versioned: bool = True, request_id: str = "") -> Json:
        """POST for a JSON object; `versioned` False: the path is outside /v1. Raises TrinityError."""
        async with self._request("POST", (self.url if versioned else self._root) + path, body, request_id) as answer:
            return await self._read_json(answer)

    async def metrics(self) -> str:
        """Return the server's metrics in Prometheus's text format. Raises TrinityError."""
        async with self._request("GET", f"{self._root}/metrics") as answer:
            try:
                return (await _read_up_to(answer, _MAX_BODY_BYTES)).decode(errors="replace")
            except Disconnected as error:
                raise EngineUnreachable(f"{self.url}: the connection broke while reading /metrics: {error}") from error

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any], request_id: str = ""
    ) -> AsyncIterator[AsyncIterator[Json]]:
        """Open a streamed answer and iterate over its chunks; leaving the block early cancels it at the server.

        Entering raises TrinityError, and so does the iterator: StreamBroken if the stream ends without `[DONE]`.
        """
        async with self._request("POST", self.url + path, body, request_id) as answer:
            yield self._chunks(answer)

    @property
    def accepting(self) -> bool:
        """False if the server is known to accept no new requests."""
        return self._http.accepting

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, request_id: str = ""
    ) -> AsyncIterator[Response]:
        headers = {**self._headers, **trace_context.get()}
        if request_id:
            headers["x-request-id"] = request_id
        try:
            answer = await self._http.request(method, url, headers, None if body is None else to_json(body))
        except Disconnected as error:
            raise EngineUnreachable(f"{self.url} does not answer: {error}") from error
        try:
            if answer.status != 200:
                raise self._error_of(answer.status, await _read_up_to(answer, _MAX_ERROR_BYTES))
            yield answer
        finally:
            answer.close()

    async def _read_json(self, answer: Response) -> Json:
        try:
            value = from_json(await _read_up_to(answer, _MAX_BODY_BYTES))
        except (Disconnected, msgspec.DecodeError) as error:
            raise EngineFailed(f"{self.url}: its response is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise EngineFailed(f"{self.url}: its response is not a JSON object")
        return value

    async def _chunks(self, answer: Response) -> AsyncIterator[Json]:
        try:
            async for data in event_data(answer.iter_bytes()):
                if data == DONE:
                    answer.complete()
                    return
                chunk = from_json(data)
                if not isinstance(chunk, dict):
                    raise EngineFailed(f"{self.url}: a chunk of its stream is not a JSON object")
                if chunk.get("error"):
                    raise self._error_of(_status_in(chunk["error"]), data)
                yield chunk
        except (Disconnected, msgspec.DecodeError) as error:
            raise StreamBroken(f"{self.url}: its stream broke: {error}") from error
        raise StreamBroken(f"{self.url}: its stream ended without [DONE]")

    def _error_of(self, status: int, body: bytes) -> TrinityError:
        """Map an error response to one of our errors."""
        message, param, code = _parse_error(body)
        summary = f"{self.url} answers {status}: {message}" if message else f"{self.url} answers {status}"
        if status in (401, 403):
            return EngineRefusedKey(f"{summary}; set model.api_key_file to a file with a valid key")
        if status in _BUSY:
            return Overloaded(summary)
        if status not in _CLIENT_ERRORS:
            return EngineFailed(summary)
        if (
            code == "context_length_exceeded"
            or "context length" in message.lower()
            or "context size" in message.lower()
        ):
            return ContextLengthExceeded(message, param)
        if status == 404 and "model" in f"{code} {message}".lower():
            # the name was valid when capabilities were detected: the server has changed since
            return EngineFailed(summary)
        refused = InvalidRequest(message or summary, param)
        refused.status = status
        return refused


async def _read_up_to(answer: Response, limit: int) -> bytes:
    """Read the body, truncated to `limit` bytes."""
    chunks, size = [], 0
    async for chunk in answer.iter_bytes():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            break
    return b"".join(chunks)[:limit]


def _parse_error(body: bytes) -> tuple[str, str | None, str]:
    """Return message, parameter and code of an error body: OpenAI's format, vLLM's older one, or FastAPI's."""
    try:
        value = from_json(body)
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace").strip(), None, ""
    error = value.get("error", value) if isinstance(value, dict) else value
    if not isinstance(error, dict):
        return str(error)[:1000], None, ""
    message = error.get("message") or error.get("detail") or ""
    param, code = error.get("param"), error.get("code")
    return str(message)[:1000], param if isinstance(param, str) else None, str(code or "")


def _status_in(error: object) -> int:
    """Return the status of an error inside a stream, which has no HTTP status of its own."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _without_version(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.removesuffix("/v1")))
