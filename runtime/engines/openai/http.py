"""HTTP client of the OpenAI engine, over aiohttp: one request, and the response's body as it arrives."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping

import aiohttp

_MAX_ERROR_CHARS = 200  # aiohttp's error for a malformed response contains all of it
_BODY_END_TIMEOUT_S = 1.0  # for the end of a body after its last event: servers send it as a separate chunk
_CONNECT_S = 5.0
_KEEPALIVE_S = 4.0  # shorter than servers' own (uvicorn 5 s), so that no connection closes under a request


class Disconnected(Exception):
    """The server did not respond, or the connection broke."""


class Http:
    """A client over TCP, or a Unix socket at the path `socket`. Connecting has a time limit, the response none."""

    def __init__(self, socket: str = "") -> None:
        self._socket = socket
        self._client: aiohttp.ClientSession | None = None
        self._tails: set[asyncio.Task[None]] = set()

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> "Response":
        """Send a request; return the response once its head has arrived. Raises Disconnected."""
        try:
            response = await self._session().request(method, url, headers=headers, data=body, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: an invalid URL
            raise Disconnected(_describe(error)) from error
        return Response(response, self._tails)

    @property
    def accepting(self) -> bool:
        """False if the server is known to accept no new requests: a draining one renames its socket, which open
        connections would not notice."""
        return not self._socket or os.path.exists(self._socket)

    async def close(self) -> None:
        """Close all connections."""
        for tail in self._tails:
            tail.cancel()
        await asyncio.gather(*self._tails, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def _session(self) -> aiohttp.ClientSession:
        """Create the session in the event loop that uses it."""
        if self._client is None:
            connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            if self._socket:
                connector = aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._client = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._client


class Response:
    """A response whose head has arrived."""

    def __init__(self, response: aiohttp.ClientResponse, tails: set[asyncio.Task[None]]) -> None:
        self._response, self._tails = response, tails
        self._complete = False
        self.status = response.status

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        """Iterate over the body in chunks as they arrive. Raises Disconnected if the connection breaks."""
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Disconnected(_describe(error)) from error

    def complete(self) -> None:
        """Declare the content complete. The end of the body may still follow; the connection is then reused."""
        self._complete = True

    def close(self) -> None:
        """Stop reading. Unless `complete`, the connection is closed, which cancels the request at the server."""
        if not self._complete or self._response.content.at_eof():
            self._response.close()
            return
        tail = asyncio.create_task(self._read_tail())
        self._tails.add(tail)
        tail.add_done_callback(self._finish)

    async def _read_tail(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(_BODY_END_TIMEOUT_S):
                while await self._response.content.readany():
                    pass

    def _finish(self, tail: asyncio.Task[None]) -> None:
        """Runs however the task ended, even if it was cancelled before it began."""
        self._tails.discard(tail)
        self._response.close()  # no effect once the body has ended


def _describe(error: Exception) -> str:
    if isinstance(error, asyncio.TimeoutError) and not str(error):
        return "no connection in time"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno is not None:
        return os.strerror(error.os_error.errno) if error.os_error.errno > 0 else str(error.os_error.strerror)
    return str(error).partition("\n")[0][:_MAX_ERROR_CHARS] or type(error).__name__
