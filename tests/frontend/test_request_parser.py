"""Requests are parsed alike however their bytes arrive, and what others could read differently is refused."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.serving.http.request_parser import Head, Requests


@dataclass
class Received:
    """A request and its body."""

    head: Head
    body: bytes = b""
    complete: bool = False
    ended: bool = False

    def add_body(self, part: bytes) -> None:
        self.body += part

    def end_body(self) -> None:
        self.complete = True


def parse(data: bytes, cuts: list[int]) -> list[Received]:
    """Return the requests of data that arrives in parts."""
    received: list[Received] = []

    def on_head(head: Head) -> Received:
        received.append(Received(head))
        return received[-1]

    requests = Requests(on_head)
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        part = data[begin:end]
        while part:
            part = requests.feed(part)
    return received


HOST = b"Host: localhost\r\n"
GET = b"\r\nGET http://user@localhost/get?q HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /sized HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nwo\r\nd"
CHUNKED = b"POST /chunked HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n"
CHUNKS = b'\r\n5;a="b"\r\nhel\no\r\n0000a;xyz\r\n0123\r\n6789\r\n0\r\nX: y\r\n\r\n'
UPGRADE = b"Upgrade: h2c\r\nConnection: upgrade\r\n"
UPGRADED = POST.replace(HOST, HOST + UPGRADE)
STREAM = b"".join(
    (POST, CHUNKED + CHUNKS, GET, UPGRADED, CHUNKED + UPGRADE + CHUNKS, UPGRADED, POST, GET, CHUNKED + CHUNKS)
)
WHOLE = parse(STREAM, list(range(1, len(STREAM))))


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_requests_are_the_same_however_often_their_bytes_are_cut(cuts: list[int]) -> None:
    assert parse(STREAM, sorted(cuts)) == WHOLE


@pytest.mark.parametrize("before", [b"", POST])
def test_a_huge_chunk_is_refused_when_it_is_announced_also_beside_another_request(before: bytes) -> None:
    with pytest.raises(InvalidRequest, match="a chunk of its body has 268435455 bytes"):
        parse(before + CHUNKED + b"\r\nfffffff\r\n", [len(before) and len(before) - 1])


@pytest.mark.parametrize("first", [b"gzip", b"identity", b"chunked"])
def test_a_transfer_encoding_on_two_lines_is_refused_as_on_one(first: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Transfer-Encoding"):
        parse(CHUNKED.replace(HOST, HOST + b"Transfer-Encoding: %b\r\n" % first) + CHUNKS, [])


def test_a_trailer_cannot_end_the_connection_for_requests_that_follow() -> None:
    with pytest.raises(InvalidRequest, match="Connection in a trailer"):
        parse(CHUNKED + CHUNKS.replace(b"X: y", b"Connection: close") + GET, [])


def test_what_follows_the_host_of_an_absolute_target_is_no_path() -> None:
    (received,) = parse(GET.replace(b"user@localhost/get", b"user@localhost@evil/get"), [])
    assert received.head.target == b"http://user@localhost@evil/get?q"
    assert (b"host", b"localhost") in received.head.headers
