"""Clients that send ahead, stop within a request or read nothing: none holds memory or a connection for long."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from runtime.serving.http.connections import Timeouts
from runtime.serving.http.exchange import head_of
from tests.frontend.fake_workers import WAIT
from tests.frontend.socketless import Client

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
MANY = (64 << 10) // len(GET) + 1  # so many fill the room for what is not parsed yet
EXPECT = b"Expect: 100-continue\r\n\r\n"


async def respond(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, without reading a body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("ahead", [GET, b"no HTTP\r\n\r\n"])
async def test_reading_stops_while_requests_wait_even_if_the_application_waits_for_a_disconnect(ahead: bytes) -> None:
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        assert not (await receive())["more_body"]
        watch: asyncio.Future[Message] = asyncio.ensure_future(receive())
        await go_on.wait()
        await respond(scope, receive, send)
        await watch

    client = Client(slow)
    await client.sends(GET + ahead + GET * MANY)
    for _ in range(3):
        await client.sends(GET)
        assert not client.reads
    go_on.set()
    if ahead == GET:
        while client.received.count(b"200 OK") < MANY + 5:
            await client.idle()
        assert client.reads
    else:
        await client.idle()
        assert client.received.count(b"200 OK") == 1
        assert client.received.count(b"400 Bad Request") == 1
    client.abort()


@pytest.mark.parametrize("ahead", [b"\r\n", b"G", GET, GET * 100, b"no HTTP\r\n\r\n", b"\r\n" * MANY * len(GET)])
async def test_a_client_that_sent_more_and_leaves_is_noticed_while_its_answer_is_computed(ahead: bytes) -> None:
    noticed: list[str] = []

    async def generate(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            assert not message["more_body"]
        noticed.append(scope["path"])

    client = Client(generate)
    await client.sends(GET)
    await client.sends(ahead)
    assert client.reads
    client.connection.eof_received()
    assert client.closing
    client.connection.connection_lost(None)
    await client.idle()
    assert noticed == ["/"]


async def test_a_head_that_began_during_an_answer_has_its_timeout() -> None:
    client = Client(respond, Timeouts(head_s=0.01))
    await client.sends(GET + b"GET /")
    await client.closed.wait()
    assert b" 408 " in client.received
    client.abort()


@pytest.mark.parametrize("sent", [(GET + b"\r\n",), (GET, b"\r\n")])
async def test_a_line_break_after_a_request_begins_no_other_one(sent: tuple[bytes, ...]) -> None:
    client = Client(respond, Timeouts(head_s=2 * WAIT, idle_s=0.01))
    for part in sent:
        await client.sends(part)
    await client.closed.wait()
    assert client.received.count(b"HTTP/1.1 ") == 1
    client.abort()


@pytest.mark.parametrize("end", ["close", "invalid", "idle", "eof", "shutdown"])
async def test_a_client_that_does_not_read_the_end_of_its_answers_is_cut_off(end: str) -> None:
    client = Client(respond, Timeouts(idle_s=0.01 if end == "idle" else 75.0, send_s=0.01))
    await client.sends(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") if end == "close" else GET)
    if end == "invalid":
        await client.sends(b"no HTTP\r\n\r\n")
    elif end == "eof":
        client.connection.eof_received()
    elif end == "shutdown":
        client.connection.shutdown()
    await client.aborted.wait()


@pytest.mark.parametrize(("body", "kept"), [(b"", False), (b"hello", True)])
async def test_a_connection_closes_if_nobody_knows_whether_a_body_or_a_request_follows(body: bytes, kept: bool) -> None:
    client = Client(respond)
    await client.sends(POST + EXPECT + body)
    assert client.received.startswith(b"HTTP/1.1 200 ")
    assert (b"connection: close" in client.received, client.closing) == (not kept, not kept)
    client.abort()


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("body", [b"", b"ok"])
async def test_an_answer_that_cannot_have_a_body_is_complete_without_one(status: int, body: bytes) -> None:
    async def empty(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": body})

    client = Client(empty)
    await client.sends(GET)
    if body:  # the next response would begin with it
        assert (client.received, client.closing) == (b"", True)
    else:
        assert client.received.startswith(b"HTTP/1.1 %d " % status)
        assert client.received.endswith(b"\r\n\r\n")
        assert not client.closing
    client.abort()


@pytest.mark.parametrize("parts", [[b"", b"short"], [b"as long as it says, ", b"and longer"]])
async def test_an_answer_of_another_length_than_it_declares_ends_its_connection(parts: list[bytes]) -> None:
    async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"20")]})
        await send({"type": "http.response.body", "body": parts[0], "more_body": True})
        await send({"type": "http.response.body", "body": parts[1]})

    client = Client(wrong)
    await client.sends(GET + GET)
    assert client.received.count(b"HTTP/1.1 ") == 1
    assert parts[1] not in client.received
    assert client.closing
    client.abort()


@pytest.mark.parametrize("value", [b"a\rb", b"a\nb", b"a\r\nb: c", b"a\0"])
def test_a_response_header_has_one_line(value: bytes) -> None:
    with pytest.raises(RuntimeError, match="line break"):
        head_of(200, [(b"x", value)])
