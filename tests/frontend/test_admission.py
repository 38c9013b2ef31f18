"""Requests that are refused when their heads have arrived, as too many are in progress."""

import asyncio
import contextlib
import json
import socket
import time

import pytest
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from runtime.node.config import HttpSection
from runtime.retrieval.fair_gate import FairLimit
from runtime.serving.http.admission import Admission
from runtime.serving.http.connections import HttpConfig, Timeouts
from runtime.serving.http.server import Server
from tests.frontend.fake_workers import WAIT
from tests.frontend.socketless import Client

SEARCH = b"POST /v1/retrieval HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Node:
    """An application whose searches end when a test lets them, two at a time, and connections to it."""

    def __init__(self, *, flow: int = 0) -> None:
        self.limit, self.begun, self.release, self.draining = FairLimit(2, "searches", 1e6), 0, asyncio.Event(), False
        self.admission = Admission({"/v1/retrieval": self.limit}, lambda: self.draining)
        self._flow = flow

    def client(self) -> Client:
        return Client(self.answer, admission=self.admission)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            while (await receive()).get("more_body"):
                pass
            async with self.limit.counted(self._flow):
                self.begun += 1
                await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


async def searching(node: Node, count: int = 2) -> list[Client]:
    """Return connections whose searches are in progress."""
    clients = [node.client() for _ in range(count)]
    for client in clients:
        await client.sends(SEARCH + b"\r\n{}")
    return clients


async def test_a_search_beyond_the_limit_is_refused_before_its_body_and_its_connection_goes_on() -> None:
    node = Node()
    await searching(node)
    client = node.client()
    client.send(SEARCH + b"X-Request-Id: mine\r\n\r\n")
    head, _, body = client.received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1" in head
    assert b"\r\nx-request-id: mine" in head
    assert json.loads(body)["error"]["code"] == "overloaded"
    client.received = b""
    await client.sends(b"{}" + GET)
    assert client.received.endswith(b"\r\n\r\nok")
    assert client.reads
    assert not client.closing


async def test_a_refused_client_that_does_not_end_its_body_is_given_up_like_one_that_does_not_end_its_head() -> None:
    node = Node()
    await searching(node)
    client = Client(node.answer, Timeouts(head_s=0.0), node.admission)
    await client.sends(GET)
    client.received = b""
    client.send(SEARCH.replace(b"Length: 2", b"Length: 99999999") + b"\r\n{")
    assert client.received.startswith(b"HTTP/1.1 503 ")
    client.send(b"more")
    await asyncio.wait_for(client.closed.wait(), WAIT)


async def test_of_searches_that_are_received_at_once_only_as_many_begin_as_there_is_room_for() -> None:
    node = Node()
    clients = [node.client() for _ in range(5)]
    for client in clients:
        client.send(SEARCH + b"\r\n{}")
    assert [client.received[9:12] for client in clients] == [b"", b"", b"503", b"503", b"503"]
    await clients[0].idle()
    assert node.begun == 2
    node.release.set()
    await clients[0].idle()
    assert [client.received[9:12] for client in clients[:2]] == [b"200", b"200"]
    assert not node.limit.full


async def test_requests_for_anything_else_are_not_refused() -> None:
    node = Node()
    await searching(node)
    client = node.client()
    await client.sends(GET)
    assert client.received.startswith(b"HTTP/1.1 200 ")


async def test_clients_that_send_their_bodies_slowly_take_nobodys_place() -> None:
    node = Node()
    slow = [node.client() for _ in range(4)]
    for client in slow:
        await client.sends(SEARCH + b"\r\n{")
    await searching(node)
    assert node.begun == 2
    assert not any(client.received for client in slow)


async def test_a_client_that_does_not_read_its_answer_takes_nobodys_place() -> None:
    node = Node()
    clients = await searching(node)
    for client in clients:
        client.connection.pause_writing()  # as the transport does
    node.release.set()
    await clients[0].idle()
    assert not node.limit.full


async def test_a_client_that_leaves_gives_its_place_back_when_its_search_ends() -> None:
    node = Node()
    clients = await searching(node)
    for client in clients:
        client.abort()
    assert node.limit.full
    node.release.set()
    await clients[0].idle()
    assert not node.limit.full


async def test_searches_that_wait_for_the_share_of_their_key_leave_room_for_others() -> None:
    node = Node(flow=1)
    waiting = await searching(node, 3)
    assert node.begun == 1
    assert not any(client.received for client in waiting)
    assert not node.limit.full
    node.release.set()
    await waiting[0].idle()
    assert [client.received[9:12] for client in waiting] == [b"200"] * 3


@pytest.mark.parametrize("header", [b"Connection: close", b"Expect: 100-continue", b"Origin: http://a.example", b""])
async def test_the_application_refuses_where_it_has_to_add_something(header: bytes) -> None:
    node = Node()
    await searching(node)
    node.draining = not header
    client = node.client()
    await client.sends(SEARCH + (header + b"\r\n" if header else b"") + b"\r\n{}")
    assert not client.received.startswith(b"HTTP/1.1 503 ")


async def test_a_client_that_does_not_read_refusals_is_no_longer_read_from() -> None:
    node = Node()
    await searching(node)
    client = node.client()
    client.connection.pause_writing()
    await client.sends((SEARCH + b"\r\n{}") * (HIGH_WATER_LIMIT // len(SEARCH) + 1))
    assert not client.received
    assert not client.reads


def test_connections_that_wait_while_the_loop_is_busy_are_not_accepted_one_by_one() -> None:
    async def turns_until_accepted(listener: socket.socket, count: int) -> int:
        node, turns = Node(), 0
        server = Server(HttpConfig(node.answer, HttpSection(), lambda path: "req-1", drain_s=1), listener)
        accepting = asyncio.create_task(server.accept())
        while len(server.server_state.connections) < count:
            await asyncio.sleep(0)
            turns += 1
        server.should_exit = True
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await accepting
        return turns

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, contextlib.ExitStack() as opened:
        for _ in range(64):
            opened.enter_context(socket.create_connection(listener.getsockname()))
        assert uvloop.run(turns_until_accepted(listener, 64)) < 32


async def test_a_request_has_arrived_when_all_of_its_body_has() -> None:
    seen: list[int] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        arrived_ns = scope["state"]["arrived_ns"]
        seen.append(arrived_ns())
        while (await receive()).get("more_body"):
            pass
        seen.append(arrived_ns())

    client = Client(application)
    await client.sends(SEARCH + b"\r\n{")
    before = time.monotonic_ns()
    client.send(b"}")
    after = time.monotonic_ns()
    await client.idle()
    assert seen[0] == 0
    assert before <= seen[1] <= after
