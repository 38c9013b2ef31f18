"""The contract between a node and its balancer, the table in docs/fleet.md."""

import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from runtime.serving.http.readiness import Readiness
from runtime.serving.http.service import Settings
from tests.clock import Clock
from tests.engines.fake_openai import MODEL
from tests.engines.test_routes import CHAT, client
from tests.frontend.cluster import Cluster

COMPLETION = {"model": "tiny", "prompt": "say=3", "max_tokens": 3}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


# ---- health


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_draining_node_fails_health_checks_and_continues_to_answer(cluster: Cluster, path: str) -> None:
    with cluster.http() as http:
        assert http.get(path).json()["status"] == "ready"
        assert http.post("/drain").json() == {"draining": True, "in_flight": 0}
        answer = http.get(path)
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert answer.json()["error"]["code"] == "unavailable"
        assert int(answer.headers["retry-after"]) >= 1
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        assert http.request("DELETE", "/drain").json() == {"draining": False, "in_flight": 0}
        assert http.get(path).status_code == 200
    assert cluster.drain_requests == [True, False]  # the supervisor keeps it: it outlives this frontend


def test_a_draining_nodes_answers_close_their_connections(cluster: Cluster) -> None:
    connection = http.client.HTTPConnection(urlsplit(cluster.url).netloc)
    connection.request("GET", "/v1/models")
    kept = connection.getresponse()
    kept.read()
    assert kept.getheader("connection") is None
    cluster.readiness.drain(True)
    connection.request("GET", "/v1/models")  # over the same connection
    last = connection.getresponse()
    last.read()
    assert last.getheader("connection") == "close"
    assert connection.sock is None  # the server has closed it
    connection.close()


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via"])
def test_a_drain_request_through_a_proxy_is_refused(cluster: Cluster, header: str) -> None:
    with cluster.http() as http:
        answer = http.post("/drain", headers={header: "127.0.0.1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_direct")
        assert http.get("/health").status_code == 200
    assert cluster.drain_requests == []


# ---- who may drain


def test_with_keys_a_drain_needs_one_and_health_does_not() -> None:
    with Cluster(settings=Settings(model="tiny", api_keys=("secret",))) as cluster, cluster.http() as http:
        assert http.post("/drain").status_code == 401
        assert cluster.drain_requests == []
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        assert http.post("/drain", headers={"Authorization": "Bearer secret"}).json()["draining"] is True


# ---- the notice before the port closes


def at(clock: Clock) -> Readiness:
    return Readiness(5.0, lambda: clock() / 1e9)


def test_a_health_checked_node_accepts_requests_until_its_checkers_have_seen_the_drain() -> None:
    clock = Clock()
    readiness = at(clock)
    readiness.record_ready()
    clock.advance(29)
    readiness.record_ready()
    readiness.drain(True)
    assert (readiness.draining, readiness.notice_elapsed) == (True, False)
    clock.advance(4.5)
    readiness.drain(True)  # asked again: the notice does not begin anew
    assert not readiness.notice_elapsed
    clock.advance(0.5)
    assert readiness.notice_elapsed


@pytest.mark.parametrize("pauses", [(), (0,), (0, 31)])
def test_a_node_without_health_checks_or_with_old_ones_closes_its_port_at_once(pauses: tuple[float, ...]) -> None:
    clock = Clock()
    readiness = at(clock)
    for pause in pauses:
        clock.advance(pause)
        readiness.record_ready()
    readiness.drain(True)
    assert readiness.notice_elapsed


def test_a_drain_after_a_cancelled_one_gives_notice_again() -> None:
    clock = Clock()
    readiness = at(clock)
    readiness.record_ready()
    readiness.record_ready()
    readiness.drain(True)
    clock.advance(6)
    readiness.drain(False)
    assert not readiness.draining
    readiness.record_ready()
    readiness.record_ready()
    readiness.drain(True)
    assert not readiness.notice_elapsed


# ---- what passes through


@pytest.mark.parametrize(
    ("sent", "passed"),
    [
        ({"traceparent": TRACE, "tracestate": "vendor=1"}, {"traceparent": TRACE, "tracestate": "vendor=1"}),
        ({"traceparent": "not one", "tracestate": "vendor=1"}, {}),
        ({"tracestate": "vendor=1"}, {}),
        ({}, {}),
    ],
)
async def test_the_trace_context_is_forwarded_to_the_engines_server(
    sent: dict[str, str], passed: dict[str, str]
) -> None:
    async with client() as (http, stand):
        answer = await http.post("/v1/chat/completions", json=CHAT, headers=sent)
        assert answer.status_code == 200
        asked = stand.fakes[0].headers[-1]
        assert {name: asked[name] for name in ("traceparent", "tracestate") if name in asked} == passed
        assert asked["x-request-id"] == answer.json()["id"]  # the node's own span
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == MODEL


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt": "say=3", "echo": False}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "say=3"}],
                "logprobs": False,
                "continue_final_message": False,
                "separate_reasoning": True,
                "stream_reasoning": True,
                "include_reasoning": True,
            },
        ),
    ],
)
def test_a_body_with_vllm_routers_fields_is_accepted(cluster: Cluster, path: str, more: Any) -> None:
    """The fields that vllm-router 0.1.17 sends to its workers beside those of the client."""
    added = {"stream": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True}
    with cluster.http() as http:
        answer = http.post(path, json={"model": "tiny", "return_hidden_states": False} | added | more)
        assert answer.status_code == 200, answer.text
