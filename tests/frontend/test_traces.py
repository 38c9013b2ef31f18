"""Traces of requests in flight and of the latest finished ones: bounded and without prompt texts."""

import json

import pytest

from runtime.errors import InvalidRequest, Unavailable, UnknownRequest
from runtime.retrieval.passages import SearchTimes
from runtime.serving import stages
from runtime.serving.frontend.observability import MAX_PROBES, Traces
from runtime.serving.frontend.requests import Request, RequestOutcome
from runtime.serving.frontend.router import Placement
from runtime.serving.messages import Generation, Probe, Retrieved, Sampling, Tokens
from tests.clock import Clock
from tests.frontend.cluster import Cluster

MS = 1_000_000


SEARCH = {"query": "with a secret", "k": 2, "collection": "docs"}


def request(request_id: str = "r-1", received_ns: int = 0) -> Request:
    asked = Generation(Sampling(8), received_ns, 1 << 60, prompt="a secret")
    return Request(request_id, asked, Placement("prefill-0", "decode-1", "ipc://@x"))


def ended(request_id: str = "r-1", code: str = "stop", stamps: dict[str, int] | None = None) -> RequestOutcome:
    return RequestOutcome(request_id, code, 3, 2, stamps or {})


def test_a_request_in_flight_is_traced_up_to_its_current_stage() -> None:
    clock = Clock()
    traces = Traces(4, clock)
    running = request(received_ns=clock.now)
    traces.start(running)
    stamps = {stages.DEQUEUED: clock.now + MS, stages.EMBEDDED: clock.now + 3 * MS}
    traces.record(running, Retrieved("r-1", (), stages=stamps))
    clock.advance(0.5)
    found = traces.trace("r-1")
    assert (found.state, found.elapsed_s, found.first_token_s) == ("running", 0.5, None)
    assert [(s.name, s.begin_s, s.end_s) for s in found.stages] == [("queue", 0.0, 0.001), ("embed", 0.001, 0.003)]
    assert (found.prefill_worker, found.decode_worker) == ("prefill-0", "decode-1")


def test_probes_are_listed_up_to_the_limit_and_counted_beyond() -> None:
    clock = Clock()
    traces = Traces(4, clock)
    running = request(received_ns=0)
    traces.start(running)
    for number in range(MAX_PROBES + 5):
        probe = Probe(number, 2 * MS, 5 * MS, MS, 2, "answered")
        traces.record(running, Tokens("r-1", "x", (1,), probes=(probe,)))
    found = traces.trace("r-1")
    assert (len(found.probes), found.probes_left_out) == (MAX_PROBES, 5)
    first = found.probes[0]
    assert (first.begin_s, first.end_s, first.stalled_s, first.passages) == (0.002, 0.005, 0.001, 2)


def test_only_the_latest_finished_traces_are_kept() -> None:
    traces = Traces(2, Clock())
    for number in range(5):
        traces.start(request(f"r-{number}"))
        traces.end(ended(f"r-{number}"))
    for number in range(3):
        with pytest.raises(UnknownRequest, match=f"no trace of request 'r-{number}'.* 2 others"):
            traces.trace(f"r-{number}")
    assert traces.trace("r-4").state == "stop"


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", "ü", "a\n", "\x7f"])
def test_an_invalid_id_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="a request id has 1 to 128"):
        Traces(4, Clock()).trace(name)


def test_http_returns_the_trace_of_an_answer_by_its_id() -> None:
    with Cluster() as cluster, cluster.http() as http:
        body = {"model": "tiny", "prompt": "say=3", "max_tokens": 8, "retrieval": {"collection": "docs"}}
        answer = http.post("/v1/completions", json=body).json()
        found = http.get(f"/v1/traces/{answer['id']}")
        assert found.status_code == 200
        trace = found.json()
        assert (trace["id"], trace["state"], trace["completion_tokens"]) == (answer["id"], "stop", 3)
        assert trace["prompt_tokens"] == 3
        assert "say=3" not in json.dumps(trace)
        missing = http.get("/v1/traces/nobody")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
        assert http.get(f"/v1/traces/{'x' * 500}").status_code == 400
        assert http.get("/v1/traces/a%20b").status_code == 400


def test_a_search_is_traced_from_its_arrival_to_its_response() -> None:
    clock = Clock()
    traces = Traces(4, clock)
    received = clock()
    clock.advance(0.002)
    zero = clock()
    traces.start_search("ret-1", received_ns=received)
    clock.advance(0.001)
    traces.stamp("ret-1", stages.EMBEDDED)
    assert (traces.trace("ret-1").state, traces.trace("ret-1").kind) == ("running", "search")
    clock.advance(0.002)
    traces.stamp_search_end("ret-1", SearchTimes(batched_ns=zero + MS // 2, found_ns=zero + 2 * MS))
    clock.advance(0.001)
    traces.stamp("ret-1", stages.RESPONDED)
    stamps = traces.end_search("ret-1", "found", 3)
    assert stamps[stages.END] - stamps[stages.RECEIVED] == 6 * MS
    found = traces.trace("ret-1")
    assert (found.state, found.passages, found.elapsed_s) == ("found", 3, 0.006)
    assert [(s.name, s.begin_s, s.end_s) for s in found.stages] == [
        ("queue", 0.0, 0.002), ("batch", 0.002, 0.0025), ("embed", 0.0025, 0.003), ("retrieval", 0.003, 0.004),
        ("passages", 0.004, 0.005), ("respond", 0.005, 0.006),
    ]  # fmt: skip


def test_a_trace_is_found_by_the_clients_id_while_it_is_kept() -> None:
    traces = Traces(2, Clock())
    traces.start(request("r-1"), "mine")
    assert (traces.trace("mine").id, traces.trace("mine").client_id) == ("r-1", "mine")
    traces.end(ended("r-1"))
    traces.start_search("ret-2", "mine")
    assert traces.trace("mine").id == "ret-2", "of two traces with one id, the later"
    traces.end_search("ret-2", "found", 1)
    for number in (3, 4):
        assert traces.trace("mine").id == "ret-2"
        traces.start_search(f"ret-{number}", "r-1")  # the name of an older one of ours
        traces.end_search(f"ret-{number}", "found", 1)
    with pytest.raises(UnknownRequest):
        traces.trace("mine")
    assert traces.trace("r-1").id == "ret-4"
    assert len(traces.client_names) == 1, "an id outlives its trace"


def test_a_search_is_logged_if_it_failed_and_else_only_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[tuple[str, str]]:
        return [(one.levelname, one.getMessage().rpartition(",")[0]) for one in caplog.records]

    with caplog.at_level("DEBUG", "runtime.serving.http.service"), Cluster() as cluster, cluster.http() as http:
        assert http.post("/v1/retrieval", json=SEARCH).status_code == 200
        assert said() == [("DEBUG", "search ended: 2 passages")]
        cluster.search.error = Unavailable("no pool answers")
        assert http.post("/v1/retrieval", json=SEARCH).status_code == 503
        assert said()[1:] == [("INFO", "search ended: unavailable")]
