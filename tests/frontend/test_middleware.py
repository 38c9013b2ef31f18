"""HTTP middleware: encodings, API keys and open paths, HEAD, CORS and the Host header."""

from collections.abc import Iterator

import httpx
import pytest

from runtime.errors import ConfigError
from runtime.node.config import HttpSection, parse_config
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster

PAGE = "https://app.example"
COMPLETION = {"model": "tiny", "prompt": "say=1"}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with Cluster() as cluster, cluster.http() as http:
        yield http


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    settings = Settings(
        "tiny", {"docs": 4}, api_keys=("secret",), http=HttpSection(open_paths=("/health",), cors_origins=(PAGE,))
    )
    with Cluster(settings=settings) as cluster:
        yield cluster


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "identity, gzip", "GZIP"])
def test_a_compressed_body_is_refused_with_the_accepted_encoding(http: httpx.Client, encoding: str) -> None:
    answer = http.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": encoding})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert answer.json()["error"]["message"] == f"the body has Content-Encoding {encoding!r}: send it uncompressed"
    assert answer.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/tiny"])
def test_head_returns_the_headers_of_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content, get.status_code) == (200, b"", 200)
    assert head.headers["content-length"] == get.headers["content-length"]
    assert head.headers["x-request-id"]
    assert http.get(path).status_code == 200  # over the same connection


def test_with_keys_every_path_but_the_open_ones_needs_a_key(guarded: Cluster) -> None:
    with guarded.http() as http:
        assert http.get("/health").status_code == 200
        for path in ("/metrics", "/v1/models", "/v1/traces/req-1", "/v1", "/nothing", "//health", "/health/"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert http.get("/metrics", headers=KEY).status_code == 200
        assert http.get("/nothing", headers=KEY).status_code == 404


def test_cors_allows_the_configured_origins(guarded: Cluster) -> None:
    with guarded.http() as http:
        asked = http.options("/v1/chat/completions", headers=PREFLIGHT)  # without the key: that is what it asks for
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
        assert asked.headers["x-request-id"]
        answer = http.post("/v1/completions", json=COMPLETION, headers=KEY | {"Origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = http.post("/v1/completions", json=COMPLETION, headers={"Origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_cors_allows_no_other_origin(guarded: Cluster, http: httpx.Client) -> None:
    with guarded.http() as asking:
        answer = asking.options("/v1/chat/completions", headers=PREFLIGHT | {"Origin": "https://evil.example"})
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers
    answer = http.options("/v1/chat/completions", headers=PREFLIGHT)  # no origin is configured: the default
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://", "ftp://x", "https://a b", ""])
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"^http\.cors_origins"):
        parse_config({"http": {"cors_origins": [origin]}})


def test_only_certain_paths_can_be_open() -> None:
    assert parse_config({"http": {"open_paths": []}}).http.open_paths == ()
    with pytest.raises(ConfigError, match=r"^http\.open_paths"):
        parse_config({"http": {"open_paths": ["/v1"]}})


# ---- pages whose name was made to resolve to loopback

SEARCH = {"query": "with", "collection": "docs"}


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:18080",
        "evil.example",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example:1",
        "192.0.2.1",
        "[::2]:80",
        "0.0.0.0",
        "localhost@evil.example",
        "",
    ],
)
def test_without_keys_a_foreign_host_name_is_refused(http: httpx.Client, host: str) -> None:
    headers = {"Host": host, "Origin": f"http://{host}"}
    for answer in (
        http.post("/v1/retrieval", json=SEARCH, headers=headers),
        *(http.get(path, headers=headers) for path in ("/health", "/metrics", "/v1/models", "/nothing")),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (403, "host_not_allowed")
        assert f"the request's Host is {host!r}" in error["message"]
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8080",
        "localhost.",
        "app.localhost:1",
        "127.0.0.1",
        "127.9.8.7:80",
        "[::1]",
        "[::1]:8080",
    ],
)
def test_without_keys_every_name_of_loopback_is_accepted(http: httpx.Client, host: str) -> None:
    assert http.post("/v1/retrieval", json=SEARCH, headers={"Host": host}).status_code == 200


def test_without_keys_the_configured_host_is_accepted() -> None:
    with Cluster(settings=Settings("tiny", http=HttpSection(host="Node.Example"))) as cluster, cluster.http() as http:
        assert http.get("/health", headers={"Host": "node.example:8080"}).status_code == 200
        assert http.get("/health", headers={"Host": "other.example:8080"}).status_code == 403
