"""The HTTP client of the OpenAI engine over real sockets: reads, broken connections, reuse."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runtime.engines.openai.http import Disconnected, Http
from runtime.engines.openai.server import Server

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = b'data: {"choices": []}\n\ndata: [DONE]\n\n'
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def asked(serve: Serve) -> AsyncIterator[tuple[Http, str]]:
    """Yield a client and the address of a server that reads a request's head and then calls `serve`."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    http = Http()
    try:
        yield http, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        await http.close()
        server.close()
        await server.wait_closed()


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


async def test_an_unreachable_server_raises_an_error() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    http = Http()
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


async def test_a_connection_is_reused_if_the_body_ends_after_the_done_event(tmp_path: Path) -> None:
    """Like uvicorn: the stream's last event and the end of the body arrive in separate reads."""
    connections, asked = 0, 0
    read = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections, asked
        connections += 1
        while await reader.read(1 << 16):
            asked += 1
            writer.write(HEAD + b"%x\r\n%s\r\n" % (len(EVENTS), EVENTS))
            await read.wait()
            read.clear()
            writer.write(b"0\r\n\r\n")
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "socket"):
        server = Server("http://fake/v1", http=Http(str(tmp_path / "socket")))
        for _ in range(3):
            async with server.stream("/chat/completions", {}) as chunks:
                assert [chunk async for chunk in chunks] == [{"choices": []}]
            read.set()
            while read.is_set():  # until the server has written the end
                await asyncio.sleep(0)
            for _ in range(10):  # and the client has read it
                await asyncio.sleep(0)
        await server.close()
    assert (asked, connections) == (3, 1)
