"""The HTTP client of the OpenAI engine over real sockets: reads, broken connections, reuse."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from runtime.engines.openai.http import AioHttp, Disconnected

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def asked(serve: Serve) -> AsyncIterator[tuple[AioHttp, str]]:
    """Yield a client and the address of a server that reads a request's head and then calls `serve`."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    http = AioHttp()
    try:
        yield http, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        await http.close()
        server.close()
        await server.wait_closed()


async def test_an_answer_is_read_as_it_is_written() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"one ") + chunk(b"two") + b"0\r\n\r\n")
        await writer.drain()

    async with asked(serve) as (http, url):
        answer = await http.request("POST", url, {}, b"{}")
        assert answer.status == 200
        assert b"".join([part async for part in answer.iter_bytes()]) == b"one two"


async def test_a_broken_answer_raises_after_its_received_part() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"one"))
        await writer.drain()

    async with asked(serve) as (http, url):
        answer = await http.request("POST", url, {}, b"{}")
        parts = answer.iter_bytes()
        assert await anext(parts) == b"one"
        with pytest.raises(Disconnected):
            await anext(parts)
        answer.close()


async def test_closing_an_unfinished_answer_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"one"))
        await reader.read()  # returns when the client has closed
        gone.set()

    async with asked(serve) as (http, url):
        answer = await http.request("GET", url, {}, None)
        assert await anext(answer.iter_bytes()) == b"one"
        answer.close()
        await gone.wait()


async def test_an_unreachable_server_raises_an_error() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    http = AioHttp()
    with pytest.raises(Disconnected, match=r"^Connection refused$"):
        await http.request("GET", f"http://127.0.0.1:{port}/v1", {}, None)
    await http.close()


async def test_data_that_is_not_http_is_truncated_in_the_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(range(256)) * 64)
        await writer.drain()

    async with asked(serve) as (http, url):
        with pytest.raises(Disconnected) as raised:
            await http.request("POST", url, {}, b"{}")
        assert 1 <= len(str(raised.value)) <= 200
