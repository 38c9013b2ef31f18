"""Connections that are idle, slow, do not read, or are too many: all end and the node keeps serving."""

import contextlib
import json
import re
import resource
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.node.config import HttpSection
from runtime.serving.http.connections import HttpConfig, Timeouts, peer_of
from runtime.serving.http.server import connections_with_files
from runtime.testing.waiting import eventually
from tests.frontend.cluster import Cluster
from tests.frontend.fake_workers import WAIT


class Few(HttpSection, frozen=True):
    """Limits with so many connections, of which one address may have `share`."""

    connections: int = 600
    share: float = 0.5

    @property
    def max_connections(self) -> int:
        return self.connections

    @property
    def max_connections_per_peer(self) -> int:
        return int(self.connections * self.share)


TIMEOUTS = Timeouts(head_s=1.0, idle_s=2.0, send_s=0.5)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(limits=Few(), timeouts=TIMEOUTS, send_buffer=4096) as cluster:
        yield cluster


def get_health(connection: socket.socket) -> None:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):  # head and body may arrive apart
        if not (part := connection.recv(65536)):
            raise ConnectionAbortedError
        answer += part
    assert answer.startswith(b"HTTP/1.1 200 ")


def rest(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes."""
    parts = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts += part
    return parts


def refusal(answer: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and error of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)
    return int(status.split()[1]), headers, json.loads(body)["error"]


@pytest.mark.parametrize("said", [b"", HEAD])
def test_two_hundred_unfinished_request_heads_are_closed_while_others_are_served(cluster: Cluster, said: bytes) -> None:
    with contextlib.ExitStack() as opened, cluster.http() as http:
        silent = []
        for _ in range(200):
            silent.append(opened.enter_context(cluster.connect()))
            silent[-1].sendall(said)
        assert http.get("/health").status_code == 200
        answers = [answer for connection in silent if (answer := rest(connection))]
        assert bool(answers) == bool(said)  # silence is not answered
        for answer in answers:
            status, headers, error = refusal(answer)
            assert (status, error["code"]) == (408, "request_timeout")
            assert "the request's head did not arrive within 1 s" in error["message"]
            assert headers["connection"] == "close"


def after_requests(cluster: Cluster, count: int, more: bytes) -> bytes:
    """Return how a connection ends that was kept for so many requests, and has then sent `more`."""
    while True:
        with cluster.connect() as connection, contextlib.suppress(ConnectionError):  # this test was too slow
            for _ in range(count):
                get_health(connection)
            connection.sendall(more)
            answer = rest(connection)
            if answer or not more:
                return answer


def test_a_connection_without_a_request_is_closed_after_its_idle_time(cluster: Cluster) -> None:
    assert after_requests(cluster, 3, b"") == b""


def test_a_client_that_does_not_read_its_answer_is_cut_off(cluster: Cluster) -> None:
    body = json.dumps({"model": "tiny", "prompt": "go on", "stream": True, "max_tokens": 2000}).encode()
    with cluster.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        before = len(cluster.ended)
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        cluster.wait(lambda: len(cluster.ended) > before and cluster.connections == 0)
        assert b"[DONE]" not in rest(connection)
    cluster.wait(lambda: not cluster.held())


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Few(connections=8, share=1.0), "8 connections are open, the limit"),
        (Few(connections=8), "4 connections from 127.0.0.1 are open, the limit for one"),
    ],
)
def test_connections_beyond_the_limit_are_refused_at_once_until_one_has_ended(limits: HttpSection, says: str) -> None:
    with Cluster(limits=limits) as cluster, contextlib.ExitStack() as opened:
        kept = [opened.enter_context(cluster.http()) for _ in range(limits.max_connections_per_peer)]
        assert {http.get("/health").status_code for http in kept} == {200}
        for _ in range(200):
            with cluster.connect() as connection:
                status, headers, error = refusal(rest(connection))
                assert (status, error["code"], headers["retry-after"]) == (503, "overloaded", "1")
                assert error["message"].startswith(says)
        assert {http.get("/health").status_code for http in kept} == {200}
        kept[0].close()

        def served() -> bool:
            with contextlib.suppress(httpx.TransportError), cluster.http() as http:
                return http.get("/health").status_code == 200
            return False

        eventually(served, WAIT, "the place of the one that has ended")


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("2001:db8::ffff", "2001:db8::/64"),
        ("::1", "::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_peer_is_an_ipv4_address_or_an_ipv6_network(host: str, peer: str) -> None:
    assert peer_of(host) == peer


@pytest.mark.parametrize(
    ("data", "status", "code", "says"),
    [
        (b"\x00\x01\x02\r\n\r\n", 400, "invalid_request", "this is not valid HTTP: "),
        (b"x" * 9_000 + b"\r\n\r\n", 400, "invalid_request", "Invalid method"),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_request", "this is not valid HTTP: "),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_request", "Missing mandatory Host: header"),
        (HEAD + b"Content-Length: -5\r\n\r\n", 400, "invalid_request", "Invalid character in Content-Length"),
        (
            HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n",
            400,
            "invalid_request",
            "Transfer-Encoding can't be present with Content-Length",
        ),
        (
            HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "invalid_request",
            "Transfer-Encoding in HTTP/1.0",
        ),
        (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", 505, "http_version_not_supported", "its version is 2.0"),
        (b"GET /health HTTP/0.9\r\n\r\n", 505, "http_version_not_supported", "its version is 0.9"),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501, "not_implemented", "Transfer-Encoding"),
        (HEAD + b"X: " + b"x" * 70_000, 431, "header_too_large", "exceed 16384 bytes"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n", 400, "invalid_request", "chunk"),
    ],
)
def test_data_that_is_not_http_gets_a_regular_error(
    cluster: Cluster, data: bytes, status: int, code: str, says: str
) -> None:
    with cluster.connect() as connection:
        connection.sendall(data)
        got, headers, error = refusal(rest(connection))
    assert (got, error["code"]) == (status, code)
    assert says in error["message"]
    assert len(error["message"]) < 200
    assert "bytearray" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert headers["x-request-id"].startswith("req-4d-")
    with cluster.http() as http:
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost/health", 200),
        (b"HTTP://user@localhost:8080/v1/models?x=1", 200),
        (b"http://localhost?x=/health", 404),
        (b"http://evil.example/health", 403),  # its host is what counts, whatever the header says
        (b"http:///health", 404),
    ],
)
def test_an_absolute_target_is_resolved_to_path_and_host(cluster: Cluster, target: bytes, status: int) -> None:
    with cluster.connect() as connection:
        connection.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % target)
        assert rest(connection).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
def test_a_body_declared_too_large_is_refused_before_it_is_received(cluster: Cluster, more: bytes) -> None:
    size = (1 << 20) + 1
    with cluster.connect() as connection:
        connection.sendall(HEAD + more + b"Content-Length: %d\r\n\r\n" % size)
        answer = b""
        while b"}}" not in answer:
            part = connection.recv(65536)
            assert part, answer
            answer += part
        status, _, error = refusal(answer)
        assert (status, error["code"]) == (413, "request_too_large")
        assert error["message"] == f"the body has {size} bytes or more, the limit is {size - 1}"
        connection.sendall(b"x" * size)  # it is taken, and thrown away
        if more:
            assert rest(connection) == b""
        else:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2}).encode()


def statuses(answer: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d+) ", answer)


@pytest.mark.parametrize(
    ("wrong", "status"), [(b"no HTTP\r\n\r\n", b"400"), (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", b"400")]
)
def test_what_is_no_request_is_refused_after_the_answers_to_those_before(
    cluster: Cluster, wrong: bytes, status: bytes
) -> None:
    with cluster.connect() as connection:
        connection.sendall(GET * 3 + wrong)
        assert statuses(rest(connection)) == [b"200", b"200", b"200", status]


@pytest.mark.parametrize("end", [b"0\r\n" + b"X: y\r\n" * 6000, b"1;" + b"x" * 30_000, b"0\r\nX: " + b"y" * 30_000])
def test_what_follows_a_chunk_is_as_limited_as_a_head(cluster: Cluster, end: bytes) -> None:
    with cluster.connect() as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n" + end)
        assert statuses(rest(connection)) == [b"431"]


@pytest.mark.parametrize("size", [0, 90])
def test_an_upgrade_that_is_not_supported_is_answered_as_http(cluster: Cluster, size: int) -> None:
    head = HEAD + b"Upgrade: h2c\r\nConnection: upgrade\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    data = head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + chunked + GET
    with cluster.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(data), size or len(data)):
            connection.sendall(data[begin : begin + (size or len(data))])
        connection.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + GET)
        assert statuses(rest(connection)) == [b"200", b"200", b"200", b"400"]


def test_http_1_0_is_answered_without_chunks_and_closed(cluster: Cluster) -> None:
    stream = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2, "stream": True}).encode()
    with cluster.connect() as connection:
        connection.sendall(HEAD.replace(b"1.1", b"1.0") + b"Content-Length: %d\r\n\r\n" % len(stream) + stream)
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_process_has_room_for_eight_connections_a_request_and_at_least_for_those_of_a_proxy() -> None:
    few, many = HttpSection(max_in_flight=1), HttpSection(max_in_flight=1000)
    assert (few.max_connections, few.max_connections_per_peer) == (1024, 512)
    assert (many.max_connections, many.max_connections_per_peer) == (8000, 4000)


@pytest.mark.parametrize(("files", "processes", "connections"), [(100_000, 2, 1024), (1024, 2, 384), (128, 2, 16)])
def test_a_process_accepts_no_more_connections_than_there_are_files_for(
    files: int, processes: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, files))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: raised.append(limits))
    http = HttpSection(max_in_flight=1, workers=processes)
    assert connections_with_files(http) == connections
    assert raised == [(min(files, 2 * 1024 + 256), files)]
    config = HttpConfig(lambda *call: None, http, str, drain_s=1, connections=connections)  # type: ignore[arg-type]
    assert (config.max_connections, config.max_per_peer) == (connections, connections // 2)
