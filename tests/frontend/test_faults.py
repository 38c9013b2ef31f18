"""Disconnects, dying workers, overload and deadlines: everything is freed and the node keeps serving."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from runtime.errors import ConfigError, TrinityError
from runtime.node.config import HttpSection
from runtime.serving.http.responses import ChatResponse
from runtime.serving.http.service import Settings
from tests.frontend.cluster import Cluster
from tests.frontend.fake_workers import WAIT, run

SETTINGS = Settings("tiny", {"docs": 4}, http=HttpSection(request_timeout_s=5), search_timeout_s=WAIT, max_searches=2)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(settings=SETTINGS, decodes=2, max_in_flight=8) as cluster:
        yield cluster


def body(text: str, stream: bool = True) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": stream}


class Events:
    """Iterator over a stream's events. Keep a reference to it: httpx closes streams that are unreferenced."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = (line for line in answer.iter_lines() if line)

    def first(self, count: int) -> list[str]:
        return [next(self._lines) for _ in range(count)]

    def rest(self) -> list[str]:
        return list(self._lines)


def serves(cluster: Cluster, http: httpx.Client) -> None:
    """Assert that nothing is held and that the next request is answered."""
    cluster.wait(lambda: not cluster.held())
    answer = http.post("/v1/chat/completions", json=body("say=2", stream=False))
    assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 "
    assert cluster.link.requests.all() == []


@pytest.mark.parametrize("text", ["hang=3", "go on"])
def test_a_client_that_disconnects_within_its_stream_frees_everything(
    cluster: Cluster, http: httpx.Client, text: str
) -> None:
    request = body(text) | {"max_tokens": 2000}
    with cluster.http() as leaving, leaving.stream("POST", "/v1/chat/completions", json=request) as answer:
        Events(answer).first(3)
    cluster.wait(lambda: [ended.code for ended in cluster.ended] == ["client_closed_request"])
    serves(cluster, http)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", ["hang=prefill", "hang=0"])
def test_a_client_that_disconnects_before_the_first_token_frees_everything(
    cluster: Cluster, http: httpx.Client, text: str, stream: bool
) -> None:
    async def leave() -> None:
        async with cluster.async_client() as client:
            asking = asyncio.create_task(client.chat.completions.create(**body(text, stream)))
            await asyncio.to_thread(
                cluster.wait, lambda: any("code" in held or "fill" in held for held in cluster.held())
            )
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking

    run(leave())
    cluster.wait(lambda: [ended.code for ended in cluster.ended] == ["client_closed_request"])
    serves(cluster, http)


def test_a_missed_deadline_is_an_http_error_before_the_first_token_and_an_event_after_it(
    cluster: Cluster, http: httpx.Client
) -> None:
    def late(held: str) -> None:
        cluster.wait(lambda: any(held in name for name in cluster.held()))
        cluster.clock.advance(5)

    with http.stream("POST", "/v1/chat/completions", json=body("hang=2")) as answer:
        events = Events(answer)
        events.first(3)
        late("decode")
        assert "the request's deadline passed in decode, after 2 tokens" in events.rest()[0]
    forwarding = threading.Thread(target=late, args=("prefill",))
    forwarding.start()
    answer = http.post("/v1/chat/completions", json=body("hang=prefill"))
    forwarding.join(WAIT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_searches_are_bounded_in_number(cluster: Cluster, http: httpx.Client) -> None:
    def search() -> int:
        return http.post("/v1/retrieval", json={"collection": "docs", "query": "x"}).status_code

    before = len(cluster.search.calls)
    cluster.search.hangs = True
    with ThreadPoolExecutor(2) as threads:
        held = [threads.submit(search) for _ in range(2)]
        cluster.wait(lambda: len(cluster.search.calls) == before + 2)
        refused = [search() for _ in range(3)]
        unread = http.post("/v1/retrieval", content=b"no JSON" * 100_000)
        others = [http.get(path).status_code for path in ("/health", "/metrics", "/v1/models")]
        generated = http.post("/v1/chat/completions", json=body("say=1", stream=False)).status_code
        cluster.search.hangs = False
        assert refused == [503, 503, 503]
        assert (unread.status_code, unread.headers["retry-after"]) == (503, "1")  # not 400: it was not parsed
        assert unread.headers["x-request-id"].startswith("ret-")
        assert [*others, generated] == [200] * 4
        assert [answer.result(WAIT) for answer in held] == [200, 200]
    assert search() == 200
    assert http.post("/v1/retrieval", content=b"no JSON").status_code == 400


def test_concurrent_requests_of_every_kind_all_end_and_leak_nothing(cluster: Cluster, http: httpx.Client) -> None:
    kinds = ["say=3", "fail=1", "refuse=internal_error", "say=5 probe=2", "go on"]
    docs = {"retrieval": {"collection": "docs"}}

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        asked = body(kinds[number % 5], stream=number % 2 == 0) | {
            "max_tokens": 7,
            "extra_body": docs if number % 3 else {},
        }
        try:
            answer = await client.chat.completions.create(**asked)
            if number % 2:
                return str(answer.choices[0].finish_reason)
            return str([chunk.choices[0].finish_reason async for chunk in answer][-1])
        except openai.APIError as error:
            return str(error.code)

    async def all_of_them() -> list[str]:
        gate = asyncio.Semaphore(8)
        async with cluster.async_client() as client:

            async def gated(number: int) -> str:
                async with gate:
                    return await one(client, number)

            return await asyncio.gather(*(gated(number) for number in range(60)))

    wanted = ["stop", "internal_error", "internal_error", "stop", "length"]
    assert run(all_of_them()) == [wanted[number % 5] for number in range(60)]
    serves(cluster, http)
    assert len({ended.request_id for ended in cluster.ended}) == len(cluster.ended) == 61


def test_an_internal_error_within_a_stream_is_an_event_without_traceback(
    cluster: Cluster, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ChatResponse) -> bytes:
        raise ZeroDivisionError("a secret of the house")

    monkeypatch.setattr(ChatResponse, "closing", broken)
    answer = http.post("/v1/chat/completions", json=body("say=1"))
    assert "internal_error" in answer.text
    assert "secret" not in answer.text
    cluster.wait(lambda: not cluster.held())


# ---- readiness and keys


@pytest.mark.parametrize(
    ("prefills", "decodes", "missing"), [(0, 1, ["prefill"]), (1, 0, ["decode"]), (0, 0, ["prefill", "decode"])]
)
def test_health_lists_missing_workers_and_requests_are_refused(prefills: int, decodes: int, missing: list[str]) -> None:
    with Cluster(prefills=prefills, decodes=decodes) as cluster, cluster.http() as http:
        for path in ("/health", "/ready"):
            health = http.get(path)
            assert (health.status_code, health.json()["status"]) == (503, "unavailable")
            assert health.json()["missing"] == missing
            assert health.json()["error"]["message"] == f"not ready, missing: {', '.join(missing)}"
        answer = http.post("/v1/chat/completions", json=body("say=1"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


def test_a_node_without_a_model_is_ready_without_workers_and_only_searches() -> None:
    with Cluster(prefills=0, decodes=0, settings=Settings(collections={"docs": 4})) as cluster, cluster.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").json()["data"] == []
        assert http.post("/v1/retrieval", json={"collection": "docs", "query": "x"}).status_code == 200
        answer = http.post("/v1/chat/completions", json=body("say=1") | {"model": ""})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.fixture(scope="module")
def locked() -> Iterator[Cluster]:
    with Cluster(settings=Settings(model="tiny", api_keys=("first key", "second-key"))) as cluster:
        yield cluster


@pytest.mark.parametrize("key", ["first key", "second-key"])
def test_each_configured_key_is_accepted(locked: Cluster, key: str) -> None:
    with locked.client(key) as client:
        assert client.completions.create(model="tiny", prompt="say=1").choices[0].text == "w0 "


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "Bearer", "Bearer wrong", "Bearer second-ke", "Bearer second-keyy", "Basic second-key"),
        *("second-key", "Bearer \xe9", "Bearer first key second-key"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/nothing"])
def test_without_a_valid_key_every_v1_route_is_unauthorized(locked: Cluster, header: str | None, path: str) -> None:
    headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
    with locked.http() as http:
        answer = http.request("POST", path, headers=headers, content=b"not even JSON")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_two_authorization_headers_are_refused(locked: Cluster) -> None:
    with locked.http() as http:
        both = [("Authorization", "Bearer second-key"), ("Authorization", "Bearer wrong")]
        assert http.get("/v1/models", headers=both).status_code == 401
        assert http.get("/v1/models", headers=both[::-1]).status_code == 401


@pytest.mark.parametrize("key", ["", " ", " key", "key\n", "schl\xfcssel", "a\x00b"])
def test_a_key_invalid_in_a_header_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(
        ConfigError, match=r"API key 1 is empty, or has surrounding whitespace or non-ASCII characters$"
    ):
        Settings(api_keys=("good", key))


def test_every_error_class_has_a_status_and_a_code_of_its_own() -> None:
    def family(root: type[TrinityError]) -> list[type[TrinityError]]:
        return [root, *(kind for child in root.__subclasses__() for kind in family(child))]

    kinds = family(TrinityError)
    assert all(400 <= kind.status < 600 for kind in kinds)
    codes = [kind.code for kind in kinds if "code" in vars(kind)]
    assert len(codes) == len(set(codes))
