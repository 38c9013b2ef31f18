"""Fuzz tests of the HTTP port: any bytes get a well-formed response or a closed connection, never a 500."""

import json
import re
import select
import socket
from collections.abc import Iterator
from typing import Any

import h11
import httpx
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from pydantic import BaseModel

from runtime.serving.http.api_types import ChatBody, CompletionBody
from runtime.serving.http.retrieval_body import RetrievalBody
from runtime.serving.http.routes.embeddings import EmbeddingsBody
from runtime.serving.http.routes.vector_stores import StoreSearchBody
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster, FakeSearch
from tests.frontend.fake_workers import WAIT
from tests.frontend.test_vector_stores import Stand
from tests.fuzz.budget import fuzzed

SETTINGS = Settings(
    model="tiny", collections={"docs": 4}, max_body_bytes=10_000, max_prompt_bytes=2_000, max_k=8, body_timeout_s=WAIT
)
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
SEARCH: dict[str, Any] = {"collection": "docs", "query": "with"}
SOON = 0.1  # seconds without a response after which the client shuts down its side
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/retrieval": SEARCH,
    "/v1/vector_stores/docs/search": {"query": "with"},
    "/v1/embeddings": {"model": "hashing-64", "input": "with"},
}
MODELS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/retrieval": RetrievalBody,
    "/v1/vector_stores/docs/search": StoreSearchBody,
    "/v1/embeddings": EmbeddingsBody,
}


class Docs(Stand):
    """Any text finds the same passages."""

    passages = FakeSearch.passages


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(settings=SETTINGS, search=Docs()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with cluster.http() as http:
        yield http


# ---- bodies

TEXT = st.text(max_size=8) | st.sampled_from(
    ["tiny", "docs", "user", "assistant", "text", "wait", "prefetch", "{x}", "{0}", "%s", "\0", "x" * 2100]
)
NUMBERS = st.integers() | st.sampled_from([0, 1, -1, 8, 9, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**25])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)
EXTRAS = [
    *("n", "best_of", "logprobs", "tools", "tool_choice", "response_format", "store", "prediction", "metadata", "user"),
    *("functions", "function_call", "parallel_tool_calls", "service_tier", "logit_bias", "suffix", "echo", "top_k"),
]


ODD: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 9),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63),
    "stop": TEXT | st.lists(TEXT, max_size=5),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans() | st.none()}),
    "return_token_ids": st.booleans(),
    "ignore_eos": st.booleans(),
    "prompt": TEXT | st.lists(st.integers(0, 2**31), max_size=4),
    "query": TEXT,
    "input": TEXT | st.lists(TEXT, max_size=4),
    "encoding_format": st.sampled_from(["float", "base64", "int8"]),
    "ranking_options": st.fixed_dictionaries(
        {}, optional={
            "score_threshold": NUMBERS, "ranker": TEXT,
            "hybrid_search": JSON | st.fixed_dictionaries({"embedding_weight": NUMBERS, "text_weight": NUMBERS}),
        },
    ),
    "hybrid": st.booleans() | st.floats() | NUMBERS | TEXT,
    "vector": st.lists(st.floats(-1e3, 1e3) | st.floats(), min_size=3, max_size=5),
    "k": st.integers(0, 9),
    "retrieval": st.just(False) | st.fixed_dictionaries(
        {"collection": st.sampled_from(["docs", "dogs"])},
        optional={"k": st.integers(0, 9), "every_tokens": st.integers(-1, 9), "probe_mode": TEXT, "k2": JSON},
    ),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "developer", "assistant", "tool"]), "content": TEXT | JSON},
            optional={"name": TEXT, "tool_calls": JSON},
        ), max_size=3,
    ),
}  # fmt: skip
"""What nearly fits a field, or fits it and is odd."""


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a path and a valid body with some parts changed, or any JSON."""
    path = draw(st.sampled_from(sorted(PATHS)))
    body: Any = json.loads(json.dumps(PATHS[path]))
    fields = sorted(MODELS[path].model_fields)
    for name in draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)):
        body[name] = draw(ODD.get(name, JSON))
    match draw(st.integers(0, 5)):
        case 0:
            body[draw(st.sampled_from([*fields, *EXTRAS]) | TEXT)] = draw(JSON)
        case 1:
            body = draw(JSON)
    return path, json.dumps(body).encode()


def expect_well_formed(status: int, content: bytes, kind: str) -> None:
    """Check for OpenAI's success or error object, with a status other than an internal error's."""
    assert status != 500, content
    if kind.startswith("text/event-stream"):
        events = [line for line in content.split(b"\n\n") if line]
        assert events[-1] == b"data: [DONE]", content
        assert all(b'"error"' not in line for line in events)
        return
    found = json.loads(content)
    if status == 200:
        assert isinstance(found, dict)
        return
    error = found["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] != "internal_error"
    assert "Traceback" not in error["message"]


def expect_served(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "w0 w1 w2 w3 "


@fuzzed()
@given(request=bodies())
def test_any_json_body_gets_an_answer_or_an_error(http: httpx.Client, request: tuple[str, bytes]) -> None:
    path, body = request
    answer = http.post(path, content=body)
    event(f"{path} {answer.status_code}")
    expect_well_formed(answer.status_code, answer.content, answer.headers["content-type"])
    if answer.status_code != 200:
        expect_served(http)


@fuzzed()
@given(path=st.sampled_from(sorted(PATHS)), body=st.binary(max_size=200), change=st.integers(0, 200))
def test_any_bytes_as_a_body_get_an_answer_or_an_error(http: httpx.Client, path: str, body: bytes, change: int) -> None:
    good = json.dumps(PATHS[path]).encode()
    for content in (body, good[: change % len(good)] + body + good[change % len(good) :]):
        answer = http.post(path, content=content)
        expect_well_formed(answer.status_code, answer.content, answer.headers["content-type"])
    expect_served(http)


@fuzzed()
@given(traced=st.text(max_size=60), model=st.text(max_size=60))
def test_any_trace_or_model_id_gets_an_answer_or_an_error(http: httpx.Client, traced: str, model: str) -> None:
    for path, name in (("/v1/traces", traced), ("/v1/models", model)):
        name = name.encode("utf-8", "replace").decode()
        answer = http.get(httpx.URL(http.base_url.join(path), raw_path=_quoted(f"{path}/{name}")))
        assert answer.status_code in (200, 400, 404), answer.text
        expect_well_formed(answer.status_code, answer.content, answer.headers["content-type"])


def _quoted(path: str) -> bytes:
    return "".join(f"%{byte:02X}" for byte in path.encode()).replace("%2F", "/").encode()


# ---- bytes on the port

TOKEN = st.sampled_from(
    [b"Content-Length", b"Transfer-Encoding", b"Host", b"Connection", b"Expect", b"Upgrade", b"Content-Type",
     b"Authorization", b"X-Request-Id", b"Content-Encoding", b"Accept-Encoding", b"Origin", b"Range", b"Cookie",
     b"Sec-WebSocket-Key", b"HTTP2-Settings", b"Trailer", b"TE"]
)  # fmt: skip
VALUE = st.binary(max_size=30) | st.sampled_from(
    [b"chunked", b"gzip, chunked", b"close", b"keep-alive", b"100-continue", b"h2c", b"websocket", b"5", b"-1", b"1e3",
     b"+5", b"5, 5", b"9" * 30, b"application/json", b"\xff\xfe", b"Bearer x", b"bytes=0-1", b"x" * 70_000, b"a\r\n b",
     b"\xe2\x80\xae", b"application/json; charset=utf-16", b"", b"*"]
)  # fmt: skip
METHODS = st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"PRI", b"TRACE", b"get", b""])
TARGETS = st.binary(max_size=30) | st.sampled_from(
    [*(path.encode() for path in PATHS), b"*", b"http://x/v1/models", b"//v1/models", b"/v1/models?%zz", b"/%00",
     b"/v1/../health", b"/" + b"a" * 70_000, b"/health", b"/metrics", b"/v1/models/%ff%fe", b"/v1/traces/%0d%0aX: y"]
)  # fmt: skip
VERSIONS = st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 ", b"", b"HTTQ/1.1"])


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Draw a request as bytes: valid except for a part or two, perhaps followed by another, or truncated."""
    wrong = draw(st.sets(st.sampled_from(["method", "target", "version", "headers", "length", "end"]), max_size=2))
    path = draw(st.sampled_from(sorted(PATHS)))
    body = draw(
        st.just(json.dumps(PATHS[path]).encode()) | st.binary(max_size=60) | st.just(b"5\r\nhello\r\n0\r\n\r\n")
    )
    method = draw(METHODS | st.binary(max_size=8)) if "method" in wrong else b"POST"
    target = draw(TARGETS) if "target" in wrong else path.encode()
    version = draw(VERSIONS) if "version" in wrong else b"HTTP/1.1"
    headers = [(b"Host", b"x"), (b"Content-Type", b"application/json")]
    if "length" not in wrong:
        headers.append((b"Content-Length", str(len(body)).encode()))
    if "headers" in wrong:
        headers += draw(st.lists(st.tuples(TOKEN | st.binary(max_size=12), VALUE), max_size=4))
        del headers[: draw(st.integers(0, 2))]
    end = draw(st.sampled_from([b"\n", b"\r", b"\r\n\r\n"])) if "end" in wrong else b"\r\n"
    lines = [method + b" " + target + b" " + version, *(name + b": " + value for name, value in headers), b"", b""]
    whole = end.join(lines) + body
    match draw(st.integers(0, 12)):
        case 0:
            whole = draw(st.binary(max_size=300))
        case 1:
            at = draw(st.integers(0, len(whole)))
            whole = whole[:at] + draw(st.binary(max_size=20)) + whole[at + draw(st.integers(0, 20)) :]
        case 2:
            whole = whole[: draw(st.integers(0, len(whole)))]
        case 3:
            whole += b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return whole


def answer_to(cluster: Cluster, data: bytes) -> bytes:
    """Return everything that the server sends until it closes. Without a timely response, the client closes."""
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), WAIT) as connection:
        connection.setblocking(False)
        received, rest, said_all = bytearray(), memoryview(data), False
        while True:
            waited = WAIT if rest or said_all else SOON
            readable, writable, _ = select.select([connection], [connection] if rest else [], [], waited)
            assert readable or writable or not said_all, f"neither an end nor a response after {bytes(received)!r}"
            try:
                if not readable and not writable:
                    connection.shutdown(socket.SHUT_WR)
                    said_all = True
                if writable:
                    rest = rest[connection.send(rest) :]
                if readable:
                    part = connection.recv(65536)
                    if not part:
                        return bytes(received)
                    received += part
            except (ConnectionResetError, BrokenPipeError):
                return bytes(received)


def expect_http(data: bytes, received: bytes) -> None:
    """Check that responses are well-formed HTTP, in sequence, and none is a 500."""
    method = re.match(rb"\s*(\S*)", data)
    head = method is not None and method.group(1) == b"HEAD"
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    parser.send(h11.Request(method="HEAD" if head else "GET", target="/", headers=[("Host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(received)
    parser.receive_data(b"")
    content, kind = bytearray(), ""
    status = 0
    while True:
        found = parser.next_event()
        if isinstance(found, h11.Response):
            status = found.status_code
            kind = dict(found.headers).get(b"content-type", b"").decode()
        elif isinstance(found, h11.Data):
            content += found.data
        elif isinstance(found, h11.EndOfMessage):
            break
        elif found in (h11.NEED_DATA, h11.PAUSED) or isinstance(found, h11.ConnectionClosed):
            raise AssertionError(f"the answer is not whole: {received!r}")
    event(str(status))
    assert status != 500, received
    if status >= 400:
        assert kind.startswith("application/json"), received
    if kind.startswith("application/json") and not head:
        expect_well_formed(status, bytes(content), kind)


@fuzzed(0.5)
@given(data=messages())
def test_any_bytes_on_the_port_get_complete_http_or_a_closed_connection(
    cluster: Cluster, http: httpx.Client, data: bytes
) -> None:
    received = answer_to(cluster, data)
    if received:
        expect_http(data, received)
    expect_served(http)
