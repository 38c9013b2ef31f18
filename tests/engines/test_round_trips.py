"""Server requests and connections per answer."""

import asyncio
from pathlib import Path

from runtime.engines.openai.http import AioHttp
from runtime.engines.openai.server import Server
from runtime.serving.messages import Retrieval
from tests.engines.engine_harness import read_answer, running_engine

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = b'data: {"choices": []}\n\ndata: [DONE]\n\n'


async def test_retrieval_costs_one_search_and_no_extra_server_request() -> None:
    async with running_engine() as harness:
        await read_answer(harness.chat(retrieval=Retrieval("docs", 4), max_tokens=4))
        assert len(harness.library.calls) == 1
        assert [path for path, _ in harness.fake.asked] == ["/v1/chat/completions"]


async def test_a_probe_costs_one_search_one_tokenize_and_one_request() -> None:
    async with running_engine() as harness:
        await read_answer(harness.chat(retrieval=Retrieval("docs", 2, every_tokens=8), max_tokens=12))
        assert len(harness.library.calls) == 2
        assert [path for path, _ in harness.fake.asked] == ["/v1/chat/completions", "/tokenize", "/v1/completions"]


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
        server = Server("http://fake/v1", http=AioHttp(str(tmp_path / "socket")))
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
