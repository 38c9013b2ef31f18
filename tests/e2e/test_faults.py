"""Process deaths in a node: no request is lost silently and nothing is leaked."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchers.http_client import stream
from runtime.errors import TrinityError
from runtime.testing.node import Node, leftovers, token_of
from runtime.testing.waiting import eventually
from tests.e2e.conftest import StartNode
from tests.e2e.load import WAIT_S, prompts, repeated, slowed

BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
    "retrieval": {"collection": "docs", "k": 2},
}
# A probe that takes two seconds is left out, and what follows differs: none where workers are killed.
PROBES = {"collection": "docs", "k": 2, "every_tokens": 16}

JUMPING_CLOCK = """
import random, time
wall, dice = time.time, random.Random(1)
time.time = lambda: wall() + dice.choice((86_400.0, -86_400.0, 0.0))
time.time_ns = lambda: int(time.time() * 1e9)
"""


@pytest.fixture(scope="module")
def mortals() -> Iterator[list[Node]]:
    """Nodes started for `mortal`, the latest last."""
    started: list[Node] = []
    yield started
    for node in started:
        node.stop()


@pytest.fixture(scope="module")
def coupled(start_node: StartNode) -> Node:
    """A node with a standby for each worker, in which prefill and decode each have a pool worker of their own."""
    return start_node(spares=1, more='\n[pool]\nplacement = "coupled"\n')


@pytest.fixture
def mortal(new_node: StartNode, mortals: list[Node]) -> Node:
    """A node that a test may end; the next test gets another one."""
    if not mortals or mortals[-1].process.poll() is not None:
        mortals.append(new_node())
    return mortals[-1]


def answer_of(node: Node, body: dict[str, Any]) -> tuple[str, list[int]]:
    """The end of a streamed request: its finish reason or error code, and its tokens."""
    reason = ""
    tokens: list[int] = []
    try:
        for event in stream(node.info.url, "/v1/completions", body | {"return_token_ids": True}):
            choice = event["choices"][0]
            reason, tokens = str(choice["finish_reason"]), tokens + choice.get("token_ids", [])
    except TrinityError as error:
        return error.code, tokens
    return reason, tokens


def answers_of(node: Node, bodies: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(partial(answer_of, node), bodies))


def end_of(node: Node, body: dict[str, Any]) -> str:
    """Return the end of a streamed request."""
    return answer_of(node, body)[0]


def last_of(node: Node, body: dict[str, Any]) -> tuple[str, bool]:
    """Ask until an answer is cut or refused; return its error code, and whether it had begun."""
    while True:
        reason, tokens = answer_of(node, body)
        if reason != "length":
            return reason, bool(tokens)


def in_flight(node: Node, count: int, metric: str = "trinity_requests_in_flight") -> None:
    """Wait until the node has so many requests."""
    eventually(lambda: node.metric(metric) >= count, WAIT_S, f"{count} requests in flight")


def as_undisturbed(answers: list[list[Any]], undisturbed: list[tuple[str, list[int]]]) -> bool:
    """Whether every answer to each question is the one that it had before."""
    return all(found and found == [one] * len(found) for found, one in zip(answers, undisturbed, strict=True))


@pytest.mark.parametrize("worker", ["pool-0", "prefill-0", "decode-0"])
def test_a_killed_worker_loses_no_request_or_token_and_restarts(node: Node, worker: str) -> None:
    retrieval = False if worker == "pool-0" else BODY["retrieval"]  # a search that waits for the next pool may be late
    bodies = [BODY | {"prompt": prompt, "retrieval": retrieval} for prompt in prompts(12)]
    undisturbed = answers_of(node, bodies)
    assert {reason for reason, _ in undisturbed} == {"length"}
    with repeated(partial(answer_of, node), bodies) as answers:
        in_flight(node, 6)
        before = node.status()
        for one in before.workers:
            for kind in (signal.SIGINT, signal.SIGHUP):  # from a terminal: the supervisor's alone
                os.kill(one.pid, kind)
        node.kill(worker)
    assert as_undisturbed(answers, undisturbed)
    node.wait_ready()
    after = {w.name: w for w in node.status().workers}
    for was in before.workers:
        assert after[was.name].restarts == was.restarts + (was.name == worker)
    assert end_of(node, bodies[0]) == "length"
    node.wait_idle()


def test_a_worker_that_hangs_under_load_is_killed_and_its_requests_complete(mortal: Node) -> None:
    bodies = [BODY | {"prompt": prompt} for prompt in prompts(8)]
    undisturbed = answers_of(mortal, bodies)
    assert {reason for reason, _ in undisturbed} == {"length"}
    with repeated(partial(answer_of, mortal), bodies) as answers:
        in_flight(mortal, 2, "trinity_num_requests_running")
        os.kill(mortal.pid("decode-0"), signal.SIGSTOP)  # its connections stay open: only its silence tells
    assert as_undisturbed(answers, undisturbed)
    mortal.wait_ready()
    assert {w.name: w.restarts for w in mortal.status().workers if w.restarts} == {"decode-0": 1}
    assert "decode-0 has no heartbeat for 30 s: killed" in mortal.log.read_text()
    assert mortal.metric("trinity_requests_total", outcome="failed") == 0


def test_a_wall_clock_that_jumps_by_days_changes_no_answer_and_unfinished_requests_get_a_typed_error_after_a_drain(
    node: Node, start_node: StartNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)  # Python imports it at the start of every process
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    jumping = start_node(drain_s=1)
    bodies = [BODY | {"prompt": prompt} for prompt in prompts(4)]
    assert [answer_of(jumping, body) for body in bodies] == [answer_of(node, body) for body in bodies]
    created = [jumping.post("/v1/completions", BODY | {"prompt": "when?"})[1]["created"] for _ in range(8)]
    assert max(created) - min(created) > 80_000, "the clock did not jump"
    jumping.kill("pool-0")
    jumping.wait_ready()
    assert answer_of(jumping, bodies[0])[0] == "length"
    assert {w.name: w.restarts for w in jumping.status().workers if w.restarts} == {"pool-0": 1}
    long = BODY | {"prompt": "a" * 100, "max_tokens": 1900, "retrieval": False}
    with ThreadPoolExecutor(6) as threads:
        ends = [threads.submit(last_of, jumping, long) for _ in range(6)]
        in_flight(jumping, 6, "trinity_num_requests_running")
        assert jumping.stop() == 0
        assert {end.result()[0] for end in ends} == {"unavailable"}


def test_a_killed_pool_delays_searches_instead_of_failing_them(node: Node) -> None:
    node.kill("pool-0")
    status, answer = node.post("/v1/retrieval", {"query": "the with statement", "collection": "docs", "k": 3})
    assert status == 200
    assert len(answer["passages"]) == 3


def test_a_coupled_pool_serves_its_worker_and_another_pool_takes_over_while_it_is_down(
    node: Node, coupled: Node
) -> None:
    bodies = [BODY | {"prompt": prompt, "retrieval": PROBES} for prompt in prompts(4)]
    answers = [answer_of(node, body) for body in bodies]
    own, others = [("pool-0", "prefill"), ("pool-1", "decode")], [("pool-0", "decode"), ("pool-1", "prefill")]

    def queries(pools: list[tuple[str, str]]) -> list[float]:
        return [coupled.metric("trinity_pool_queries_total", worker=pool, stage=stage) for pool, stage in pools]

    def asked_their_own() -> bool:
        before, elsewhere = queries(own), queries(others)
        assert [answer_of(coupled, body) for body in bodies] == answers
        each = [after - count for after, count in zip(queries(own), before, strict=True)]
        return min(each) >= 4 and queries(others) == elsewhere

    # Workers that start ask whichever pool is up, and later any if theirs is slow, as on a busy machine now and then.
    eventually(asked_their_own, WAIT_S, "the queries of each stage to reach its own pool")
    (elsewhere,) = queries([("pool-1", "prefill")])
    coupled.kill("pool-0")
    assert answer_of(coupled, bodies[0]) == answers[0]
    eventually(lambda: queries([("pool-1", "prefill")]) > [elsewhere], WAIT_S, "a query of prefill elsewhere")
    coupled.wait_ready()


def test_with_a_pool_a_killed_prefill_worker_restarts_no_prompt_that_waits_and_a_killed_decode_worker_loses_none(
    node: Node, start_node: StartNode
) -> None:
    pooled = start_node(more='\n[handover]\nmode = "pool"\ndisaggregate = "always"\n')
    bodies = [BODY | {"prompt": prompt, "retrieval": False, "max_tokens": 400} for prompt in prompts(12)]
    undisturbed = answers_of(node, bodies)

    def handed_over(count: int) -> bool:
        done = pooled.metric("trinity_kv_handovers_total", mode="pool") == count
        held = [pooled.metric(f"trinity_num_requests_{state}") for state in ("running", "waiting")]
        return done and pooled.metric("trinity_prefill_running") == 0 and held == [6, 6]

    for worker, count in (("prefill-0", 12), ("decode-0", 24)):
        with ThreadPoolExecutor(12) as threads:
            with slowed(pooled.pid("decode-0"), stopped_s=0.5):  # or it has answered six before anyone looks
                answers = [threads.submit(answer_of, pooled, body) for body in bodies]
                eventually(partial(handed_over, count), WAIT_S, "12 hand-overs, of which six wait in decode")
            pooled.kill(worker)
            assert [answer.result() for answer in answers] == undisturbed
        assert (pooled.metric("trinity_requests_restarted_total") > 0) == (worker == "decode-0")
        pooled.wait_ready()
    pooled.wait_idle()


def test_standby_workers_replace_killed_ones_and_no_token_changes(node: Node, coupled: Node) -> None:
    bodies = [BODY | {"prompt": prompt} for prompt in prompts(12)]
    undisturbed = answers_of(node, bodies)
    for worker in ("decode-0", "prefill-0"):
        eventually(lambda: all(w.phase == "standby" for w in coupled.status().spares), WAIT_S, "standby workers")
        spares = {w.name: w.pid for w in coupled.status().spares}
        with repeated(partial(answer_of, coupled), bodies) as answers:
            in_flight(coupled, 6)
            coupled.kill(worker)
        assert as_undisturbed(answers, undisturbed)
        coupled.wait_ready()
        assert coupled.pid(worker) == spares[worker.replace("-0", "-spare-0")]
    coupled.wait_idle()
    assert coupled.metric("trinity_requests_total", outcome="failed") == 0
    info, pids = coupled.info, coupled.pids().values()
    assert coupled.stop() == 0  # the last test of this node
    assert leftovers(token_of(info), pids, coupled.run_dir) == []


def test_a_killed_frontend_ends_its_streams_and_workers_drop_the_requests(node: Node) -> None:
    long = BODY | {"prompt": "x", "max_tokens": 1500}
    with ThreadPoolExecutor(1) as thread:
        cut = thread.submit(last_of, node, long)
        in_flight(node, 1, "trinity_num_requests_running")
        node.kill("frontend-0")
        cut.result()  # the client sees its connection close
    node.wait_ready()
    eventually(lambda: node.metric("trinity_num_requests_running") == 0, WAIT_S, "the row to be dropped")
    assert end_of(node, BODY | {"prompt": "again"}) == "length"


def test_a_killed_supervisor_takes_everything_down_with_it(mortal: Node, mortals: list[Node]) -> None:
    pids, token = mortal.pids().values(), token_of(mortal.info)
    os.kill(mortal.process.pid, signal.SIGKILL)
    mortal.process.wait(timeout=60)
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), 60, "all processes to be gone")
    left = leftovers(token, pids, mortal.run_dir)
    assert left == [f"directory {mortal.run_dir}"], "only the stale run directory may remain"
    mortals.append(Node(mortal.config))
    assert end_of(mortals[-1], BODY | {"prompt": "x"}) == "length"


def test_sigint_drains_requests_in_flight_and_leaks_nothing(mortal: Node) -> None:
    pids, token = mortal.pids().values(), token_of(mortal.info)
    with ThreadPoolExecutor(4) as threads:
        ends = [threads.submit(last_of, mortal, BODY | {"prompt": prompt}) for prompt in prompts(4)]
        in_flight(mortal, 4)
        assert mortal.stop(signal.SIGINT) == 0
        # What was in flight ends whole; a request after it is refused.
        assert [end.result() for end in ends] == [("unavailable", False)] * 4
    assert leftovers(token, pids, mortal.run_dir) == []


def test_requests_whose_worker_dies_in_a_drain_end_with_an_error_without_waiting_for_its_end(mortal: Node) -> None:
    long = BODY | {"prompt": "a" * 100, "max_tokens": 1900, "retrieval": False}
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(end_of, mortal, long) for _ in range(2)]
        in_flight(mortal, 2, "trinity_num_requests_running")
        os.kill(mortal.pid("decode-0"), signal.SIGSTOP)  # they do not end before it is killed
        mortal.process.send_signal(signal.SIGINT)
        draining = {"frontend-0": "draining"}
        mortal.wait(lambda: draining.items() <= {w.name: w.phase for w in mortal.status().workers}.items())
        mortal.kill("decode-0")
        assert [end.result() for end in ends] == ["worker_lost"] * 2
    assert mortal.process.wait(timeout=60) == 0


def test_requests_whose_worker_dies_while_http_workers_drain_first_end_with_an_error(start_node: StartNode) -> None:
    node = start_node(drain_s=240.0, http=2, notice_s=120.0)
    for _ in range(2):  # a health check that polls: the port stays open for a while
        node.wait_ready()
    long = BODY | {"prompt": "a" * 100, "max_tokens": 1900, "retrieval": False}
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(end_of, node, long) for _ in range(2)]
        in_flight(node, 2, "trinity_num_requests_running")
        decode = node.pid("decode-0")
        os.kill(decode, signal.SIGSTOP)  # they do not end before it is killed
        node.process.send_signal(signal.SIGINT)
        node.wait(lambda: node.status().draining)
        eventually(lambda: not node.ready(), WAIT_S, "the drain to be seen")
        os.kill(decode, signal.SIGKILL)
        assert [end.result(100) for end in ends] == ["worker_lost"] * 2
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(timeout=60) == 0


def test_a_second_node_in_the_same_run_directory_is_refused(node: Node) -> None:
    with pytest.raises(RuntimeError, match="a node already runs in"):
        Node(node.config)
