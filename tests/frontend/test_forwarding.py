"""Requests that an HTTP worker answers itself, and those that it passes to the frontend over its private socket."""

import asyncio
import contextlib
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.node.supervisor.listen import listen_private
from runtime.serving.http.forwarding import Forwarder, asking_others
from tests.frontend.forwarding_node import answer, front

SEARCH = b"POST /v1/retrieval HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /upload HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


def route(handler: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await handler(Request(scope, receive)))(scope, receive, send)

    return app


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that sends every part of the body back when it arrives."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message["more_body"]
        await send({"type": "http.response.body", "body": message["body"], "more_body": more})


async def body_and_headers(request: Request) -> Response:
    names = {name: value for name, value in request.headers.items() if name != "host"}
    seen = [request.method, request.url.path, request.url.query, request.headers["host"], names]
    return PlainTextResponse(json.dumps([*seen, (await request.body()).decode()]))


async def test_the_parts_of_a_body_and_of_a_response_pass_as_they_come(tmp_path: Path) -> None:
    async with front(tmp_path, echo) as node:
        reader, writer = await node.connect()
        writer.write(CHUNKED)
        for part in (b"first", b"second", b"third"):  # each is answered before the next is sent
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await reader.readuntil(b"%x\r\n%b\r\n" % (len(part), part))
        writer.write(b"0\r\n\r\n")
        assert await reader.readuntil(b"0\r\n\r\n")
        writer.write(GET)  # the connection goes on
        assert b" 200 " in await reader.readuntil(b"0\r\n\r\n")
        writer.close()


async def test_a_request_arrives_as_the_client_sent_it_but_for_the_connections_own_headers(tmp_path: Path) -> None:
    async with front(tmp_path, route(body_and_headers)) as node:
        sent = b"PUT /a%2Fb?c=d%20e HTTP/1.1\r\nHost: me:1\r\nX-Request-Id: mine\r\nConnection: keep-alive\r\n"
        _, body = await node.ask(sent + b"TE: trailers\r\nAuthorization: Bearer k\r\nContent-Length: 3\r\n\r\nabc")
        headers = {"x-request-id": "mine", "authorization": "Bearer k", "content-length": "3"}
        assert json.loads(body) == ["PUT", "/a/b", "c=d%20e", "me:1", headers, "abc"]
        _, body = await node.ask(b"GET / HTTP/1.0\r\n\r\n")
        assert json.loads(body) == ["GET", "/", "", "localhost", {}, ""]


async def test_searches_are_answered_here_and_everything_else_by_the_frontend(tmp_path: Path) -> None:
    def named(name: str) -> ASGIApp:
        async def respond(request: Request) -> Response:
            return PlainTextResponse(f"{name} {(await request.body()).decode()}")

        return route(respond)

    async with front(tmp_path, named("frontend"), named("own")) as node:
        assert (await node.ask(SEARCH))[1] == b"own hello"
        assert node.forwarded == 0
        assert (await node.ask(SEARCH.replace(b"POST", b"PUT")))[1] == b"frontend hello"
        assert (await node.ask(GET))[1] == b"frontend "
        assert node.forwarded == 2


async def test_a_clients_end_reaches_the_frontend(tmp_path: Path) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async with front(tmp_path, app) as node:
        for request in (GET, CHUNKED + b"1\r\na\r\n"):
            begun.clear()
            ended.clear()
            _, writer = await node.connect()
            writer.write(request)
            await begun.wait()
            writer.close()
            await ended.wait()
        assert node.failures == 0


async def test_a_request_whose_frontend_ends_before_it_answers_gets_a_typed_error(tmp_path: Path) -> None:
    async with front(tmp_path, abandoning) as node:
        head, body = await node.ask(GET)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"x-request-id: req-2-1" in head
        assert b"retry-after: 1" in head.lower()
        assert json.loads(body)["error"]["code"] == "worker_lost"
        assert node.failures == 1


async def abandoning(scope: Scope, receive: Receive, send: Send) -> None:
    """An application whose process is gone: its connection closes."""
    scope["state"]["disconnect"]()
    await receive()


async def test_a_response_whose_frontend_ends_is_visibly_incomplete(tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        await asked.wait()
        await abandoning(scope, receive, send)

    asked = asyncio.Event()
    async with front(tmp_path, app) as node:
        reader, writer = await node.connect()
        writer.write(GET)
        await reader.readuntil(b"4\r\npart\r\n")
        asked.set()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""  # no last chunk
        writer.close()


async def test_a_frontend_that_accepts_nothing_is_named(tmp_path: Path) -> None:
    async with front(tmp_path, echo) as node:
        Path(node.path).unlink()
        head, body = await node.ask(GET)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["message"].startswith("the frontend accepts no connection: No such file")


async def test_connections_to_the_frontend_are_kept_and_replaced_when_they_have_ended(tmp_path: Path) -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"]["disconnect"].__self__)
        await PlainTextResponse("yes")(scope, receive, send)

    async with front(tmp_path, app) as node:
        for _ in range(3):
            assert (await node.ask(GET))[1] == b"yes"
        assert seen[0] is seen[1] is seen[2]
        for connection in list(node.frontend.server_state.connections):
            connection.shutdown()  # as a frontend that restarts
        assert (await node.ask(GET))[1] == b"yes"
        assert seen[3] is not seen[0]


@pytest.mark.parametrize(("request_", "status"), [(GET, 200), (GET.replace(b"GET", b"DELETE"), 503)])
async def test_a_request_that_changes_nothing_is_sent_again_if_its_connection_ends(
    tmp_path: Path, request_: bytes, status: int
) -> None:
    calls = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # a frontend that restarts may close while a request is on its way
            scope["state"]["disconnect"]()
            return
        await PlainTextResponse("yes")(scope, receive, send)

    async with front(tmp_path, app) as node:
        assert (await node.ask(GET))[1] == b"yes"
        assert (await node.ask(request_))[0].startswith(b"HTTP/1.1 %d " % status)


async def test_a_response_that_closes_the_connection_closes_the_clients(tmp_path: Path) -> None:
    async def drains(request: Request) -> Response:
        return PlainTextResponse("late", headers={"Connection": "close"})

    async with front(tmp_path, route(drains)) as node:
        reader, writer = await node.connect()
        writer.write(GET)
        assert (await answer(reader))[1] == b"late"
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_client_that_waits_to_send_its_body_is_told_when_the_frontend_wants_it(
    tmp_path: Path, refused: bool
) -> None:
    async def app(request: Request) -> Response:
        return Response("no", 401) if refused else PlainTextResponse(await request.body())

    async with front(tmp_path, route(app)) as node:
        reader, writer = await node.connect()
        writer.write(b"POST /upload HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        first = await reader.readuntil(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 401 " if refused else b"HTTP/1.1 100 ")
        if not refused:
            writer.write(b"hi")
            assert (await answer(reader))[1] == b"hi"
        writer.close()


async def test_a_client_that_expects_what_nobody_fulfils_sends_its_body_unasked(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def app(request: Request) -> Response:
        begun.set()
        return PlainTextResponse(await request.body())

    async with front(tmp_path, route(app)) as node:
        reader, writer = await node.connect()
        writer.write(CHUNKED.replace(b"Host", b"Expect: more\r\nHost"))
        await begun.wait()
        writer.write(b"2\r\nhi\r\n0\r\n\r\n")
        async with asyncio.timeout(30):
            assert (await answer(reader))[1] == b"hi"
        writer.close()


async def test_responses_without_a_body_end_with_their_head(tmp_path: Path) -> None:
    async def app(request: Request) -> Response:
        return Response(status_code=204) if request.method == "DELETE" else PlainTextResponse("body")

    async with front(tmp_path, route(app)) as node:
        reader, writer = await node.connect()
        for method in (b"HEAD", b"DELETE", b"HEAD"):
            writer.write(GET.replace(b"GET", method))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 20")
        writer.write(GET)
        assert (await answer(reader))[1] == b"body"
        writer.close()


async def test_what_one_process_does_not_find_the_others_are_asked_for(tmp_path: Path) -> None:
    def having(name: str) -> ASGIApp:
        async def find(request: Request) -> Response:
            found = request.url.path == f"/traces/{name}"
            return PlainTextResponse(name) if found else Response(f"not in {name}", 404)

        return route(find)

    others: list[ASGIApp] = [having("b"), Forwarder(str(tmp_path / "dead.sock"), "dead"), having("c")]
    app = asking_others(having("a"), others, "/traces/")
    async with front(tmp_path, app) as node:
        for name in (b"a", b"b", b"c"):
            assert (await node.ask(GET.replace(b"/health", b"/traces/" + name)))[1] == name
        head, body = await node.ask(GET.replace(b"/health", b"/traces/d"))
        assert (head[:13], body) == (b"HTTP/1.1 404 ", b"not in a")
        assert (await node.ask(GET))[1] == b"not in a"


def test_the_private_socket_is_its_users_alone_and_replaces_a_dead_ones(tmp_path: Path) -> None:
    path = tmp_path / "private.sock"
    for _ in range(2):
        with listen_private(str(path)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
