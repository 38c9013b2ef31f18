"""Bodies that are too large, too slow or endless, and data that is not HTTP."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message, Scope

from runtime.serving.http.middleware import (
    BodyMemory,
    BodyTooLarge,
    RequestTooSlow,
    bounded_body,
    error_response,
)
from tests.frontend.cluster import Cluster
from tests.frontend.request_errors import COMPLETION, SETTINGS, assert_error


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(settings=SETTINGS) as cluster:
        yield cluster


# ---- bodies that are too large, too slow, or never end


def test_a_body_over_the_limit_is_refused_with_size_and_limit(http: httpx.Client) -> None:
    body = json.dumps(COMPLETION | {"user": "x" * 20_000}).encode()
    answer = http.post("/v1/completions", content=body)
    assert_error(answer, 413, "request_too_large", message=f"{len(body)} bytes or more, the limit is 10000")

    def chunks() -> Iterator[bytes]:
        yield from (body[at : at + 1000] for at in range(0, len(body), 1000))

    answer = http.post("/v1/completions", content=chunks())
    assert_error(answer, 413, "request_too_large", message="the limit is 10000")


@pytest.mark.parametrize(("messages", "awaited"), [([(b"x" * 50, False)], 1), ([(b"x" * 50, True), (b"x", False)], 2)])
async def test_after_a_body_over_the_limit_only_its_rest_is_awaited(
    messages: list[tuple[bytes, bool]], awaited: int
) -> None:
    """Whoever goes on using the connection would wait too."""
    received: list[bytes] = []
    sent: list[Message] = []

    async def receive() -> Message:
        body, more = messages[len(received)]
        received.append(body)
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    with pytest.raises(BodyTooLarge) as refusal:
        await bounded_body(Request(scope, receive), BodyMemory(), 40)
    await error_response(refusal.value)(scope, receive, send)
    assert len(received) == awaited
    assert sent[0]["status"] == 413
    assert not sent[-1].get("more_body", False)


def raw(cluster: Cluster, data: bytes) -> bytes:
    """Return the server's answer to the bytes, until it closes or the answer is complete."""
    with cluster.connect() as connection:
        connection.sendall(data)
        answer = b""
        while b"\r\n\r\n" not in answer or b"}" not in answer:
            part = connection.recv(65536)
            if not part:
                break
            answer += part
        return answer


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_body_that_never_ends_is_cut_off(cluster: Cluster) -> None:
    answer = raw(cluster, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"2710\r\n" + b"x" * 10_000 + b"\r\n") * 9)
    assert b" 413 " in answer


def test_a_body_that_does_not_arrive_times_out() -> None:
    with Cluster(settings=replace(SETTINGS, body_timeout_s=0.3)) as cluster:
        answer = raw(cluster, HEAD + b"Content-Length: 100\r\n\r\n{")
    assert b" 408 " in answer
    assert b"the body did not arrive within 0.3 s; 1 bytes received" in answer
    assert b"connection: close" in answer.lower()


async def test_bodies_that_arrive_slowly_are_given_up_when_others_need_the_memory() -> None:
    memory = BodyMemory(100)
    queues = [asyncio.Queue[Message]() for _ in range(4)]
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    bodies = [asyncio.create_task(bounded_body(Request(scope, queue.get), memory, 60)) for queue in queues]

    async def arrive(number: int, size: int, more: bool = True) -> None:
        await queues[number].put({"type": "http.request", "body": b"x" * size, "more_body": more})
        for _ in range(10):
            await asyncio.sleep(0)

    await arrive(0, 40)
    await arrive(1, 40)
    await arrive(2, 30)  # 110 bytes: the first body is the oldest
    with pytest.raises(RequestTooSlow, match="others need the memory; 40 bytes received"):
        await bodies[0]
    await arrive(3, 30)
    await arrive(1, 10, more=False)
    assert await bodies[1] == b"x" * 50
    await arrive(3, 30, more=False)
    assert await bodies[3] == b"x" * 60
    assert not bodies[2].done()
    bodies[2].cancel()


def test_a_client_that_disconnects_within_its_body_leaks_nothing(cluster: Cluster, http: httpx.Client) -> None:
    with cluster.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200
    cluster.wait(lambda: not cluster.held())
