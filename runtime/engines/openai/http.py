"""HTTP to servers: one request, and its answer's bytes as they come. `aiohttp` has the connections."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import aiohttp

_MAX_WHY = 200  # characters: what a server sent that is no HTTP is shown in its error, whole
_END_S = 1.0  # for the end of a body behind its last event: servers write it in a piece of its own
_KEEP_S = 4.0  # an idle connection: shorter than servers keep it (uvicorn 5 s), so that none closes under a request


class Disconnected(Exception):
    """The server did not answer, or its answer broke off."""


class Reply(Protocol):
    """An answer whose head is there."""

    @property
    def status(self) -> int: ...

    def parts(self) -> AsyncIterator[bytes]:
        """The body: what has arrived since the last part, in one. Raises Disconnected if it breaks off."""

    def over(self) -> None:
        """All that counts has been read. What ends the body may still come, and then the connection serves again."""

    def close(self) -> None:
        """Nobody reads on: an answer that is not `over` is cut off, by which the server knows."""


class Http(Protocol):
    """Asks servers."""

    async def ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Reply:
        """The answer to a request, once its head is there. Raises Disconnected."""

    @property
    def listens(self) -> bool:
        """False if it is known that nothing new is taken there."""

    async def close(self) -> None:
        """Close all connections."""


class AioHttp:
    """`Http` over the network, or over the Unix socket at the path `socket`. A connection is given up after
    `connect_s`; an answer may take for ever."""

    def __init__(self, connect_s: float, socket: str = "") -> None:
        self._connect_s, self._socket = connect_s, socket
        self._made: aiohttp.ClientSession | None = None
        self._ends: set[asyncio.Task[None]] = set()

    async def ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Reply:
        try:
            answer = await self._session().request(method, url, headers=headers, data=body, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: a URL that is none
            raise Disconnected(_why(error)) from error
        return _Reply(answer, self._ends)

    @property
    def listens(self) -> bool:
        """A server at a socket that leaves gives it another name, which connections that are open would not notice."""
        return not self._socket or os.path.exists(self._socket)

    async def close(self) -> None:
        for end in self._ends:
            end.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)
        if self._made is not None:
            await self._made.close()

    def _session(self) -> aiohttp.ClientSession:
        """Made in the loop that uses it."""
        if self._made is None:
            connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S)
            if self._socket:
                connector = aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=_KEEP_S)
            self._made = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._made


class _Reply:
    def __init__(self, answer: aiohttp.ClientResponse, ends: set[asyncio.Task[None]]) -> None:
        self._answer, self._ends = answer, ends
        self._over = False
        self.status = answer.status

    async def parts(self) -> AsyncIterator[bytes]:
        content = self._answer.content
        try:
            while part := await content.readany():
                yield part
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Disconnected(_why(error)) from error

    def over(self) -> None:
        self._over = True

    def close(self) -> None:
        if not self._over or self._answer.content.at_eof():
            self._answer.close()
            return
        end = asyncio.create_task(self._read_end())
        self._ends.add(end)
        end.add_done_callback(self._ended)

    async def _read_end(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(_END_S):
                while await self._answer.content.readany():
                    pass

    def _ended(self, end: asyncio.Task[None]) -> None:
        """However it did, by being cancelled before it began too."""
        self._ends.discard(end)
        self._answer.close()  # which is nothing once the body has ended


def _why(error: Exception) -> str:
    if isinstance(error, asyncio.TimeoutError) and not str(error):
        return "no connection in time"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno is not None:
        return os.strerror(error.os_error.errno) if error.os_error.errno > 0 else str(error.os_error.strerror)
    return str(error).partition("\n")[0][:_MAX_WHY] or type(error).__name__
