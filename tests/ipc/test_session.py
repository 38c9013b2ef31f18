"""Tests of a pool and its clients: requests, results, cancellations and full rings."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipc import InvalidArgument, Result, RingClient, RingFull, SearchSpec
from tests.ipc.processes import attach
from tests.ipc.ring_server import Cancel, RingServer
from tests.ipc.sessions import DIM, SLOTS, answer, ask, forge_requests, vector


def test_a_request_arrives_unchanged(server: RingServer, client: RingClient) -> None:
    before = time.monotonic_ns()
    spec = SearchSpec("docs", 3, "decode", top_m=77, search_width=4, patience=2, deadline_ns=99, flow=65535)
    request_id = client.submit(vector(1), spec)
    (request,) = server.receive()
    assert request.request_id == request_id
    assert request.spec == spec
    assert before <= request.enqueue_ns <= request.receive_ns <= time.monotonic_ns()
    assert np.array_equal(request.vector, vector(1))
    ask(client, patience=None)
    assert server.receive()[0].spec.patience is None


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int32])
def test_vectors_of_any_number_type_and_layout_become_float32(
    server: RingServer, client: RingClient, kind: type[Any]
) -> None:
    strided = np.arange(2 * DIM, dtype=kind)[::2]
    strided.flags.writeable = False
    client.submit(strided, SearchSpec("docs", 1, "prefill"))
    assert np.array_equal(server.receive()[0].vector, strided.astype(np.float32))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.sampled_from(["submit", "serve", "poll", "cancel"]), st.integers(1, 5)), max_size=30)
)
def test_every_request_ends_exactly_once_in_any_order(
    server: RingServer, client: RingClient, steps: list[tuple[str, int]]
) -> None:
    open_ids, cancelled = set[int](), set[int]()
    received: list[tuple[int, int]] = []

    def take(results: list[Result]) -> None:
        for result in results:
            assert result.status in ("ok", "cancelled")
            open_ids.remove(result.request_id)

    def serve(count: int) -> None:
        received.extend((r.client, r.request_id) for r in server.receive(count))
        for cancel in server.cancellations():
            received.remove((cancel.client, cancel.request_id))
            server.publish(cancel.client, cancel.request_id, "cancelled")
        for handle, request_id in received[:count]:
            server.publish(handle, request_id, "ok", [1], [1.0])
        del received[:count]

    for step, count in [*steps, *[("serve", SLOTS + 5), ("poll", 1)] * 3]:
        if step == "submit":
            for _ in range(count):
                if client.outstanding == SLOTS:
                    with pytest.raises(RingFull):
                        ask(client)
                else:
                    try:
                        open_ids.add(ask(client))
                    except RingFull:  # cancellations take request slots too
                        assert cancelled
        elif step == "serve":
            serve(count)
        elif step == "cancel" and open_ids:
            cancelled.add(min(open_ids))
            client.cancel(min(open_ids))
        else:
            take(client.poll())
    assert not open_ids
    assert client.outstanding == 0


def test_a_full_ring_rejects_requests_until_a_result_is_read(server: RingServer, client: RingClient) -> None:
    for _ in range(SLOTS):
        ask(client)
    with pytest.raises(RingFull, match=f"{SLOTS} requests are outstanding"):
        ask(client)
    assert answer(server, 1) == 1
    with pytest.raises(RingFull):  # its slot in the result ring is still occupied
        ask(client)
    assert len(client.poll()) == 1
    ask(client)


def test_a_client_that_never_reads_is_paused_without_affecting_others(server: RingServer) -> None:
    with attach(server) as silent, attach(server) as other:
        for _ in range(SLOTS):
            ask(silent)
        assert answer(server) == SLOTS
        forge_requests(silent, range(SLOTS + 1, 2 * SLOTS + 1))
        assert answer(server) == 0
        for _ in range(3):
            ask(other)
            assert answer(server) == 1
            assert len(other.poll()) == 1
        assert len(silent.poll()) == SLOTS
        assert server.wait(60_000)
        assert answer(server) == SLOTS


def test_a_cancellation_is_delivered_after_its_request_which_ends_once(server: RingServer, client: RingClient) -> None:
    request_id = ask(client)
    assert client.cancel(request_id)
    assert server.cancellations() == []
    (request,) = server.receive()
    assert server.cancellations() == [Cancel(request.client, request_id)]
    assert server.cancellations() == []
    server.publish(request.client, request_id, "cancelled")
    assert [r.status for r in client.poll()] == ["cancelled"]
    assert not client.cancel(request_id)


def test_a_cancellation_is_sent_later_if_the_ring_is_full(server: RingServer, client: RingClient) -> None:
    ids = [ask(client) for _ in range(SLOTS)]
    assert client.cancel(ids[0])
    (*_, request) = server.receive()
    assert server.cancellations() == []
    assert client.poll() == []
    server.receive()
    assert server.cancellations() == [Cancel(request.client, ids[0])]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"collection": "nope"}, "no collection 'nope'; available:"),
        ({"collection": "code"}, r"shape \(3,\), got \(8,\)"),
        ({"stage": "later"}, "stage must be one of"),
        ({"k": 0}, r"k 0 must be within 1\.\.6"),
        ({"k": 7}, r"k 7 must be within 1\.\.6"),
        ({"top_m": 1025}, r"^top_m 1025 must be within 1\.\.1024$"),
        ({"search_width": 0}, "search_width 0"),
        ({"patience": 0}, "patience 0"),
        ({"patience": 1 << 16}, "patience 65536"),
        ({"flow": -1}, r"flow -1 must be within 0\.\.65535"),
        ({"flow": 1 << 16}, "flow 65536"),
        ({"deadline_ns": -1}, "got -1"),
        ({"deadline_ns": 2**63}, "within 0..9223372036854775807, got 9223372036854775808"),
        ({"deadline_ns": 1.5}, "an integer .* got 1.5"),
    ],
)
def test_submit_rejects_invalid_requests_and_accepts_none(
    client: RingClient, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        ask(client, **change)
    assert client.outstanding == 0


def test_receive_respects_its_limit_and_serves_clients_round_robin(server: RingServer) -> None:
    with attach(server) as first, attach(server) as second:
        for client in (first, second):
            for _ in range(3):
                ask(client)
        taken = [[r.client for r in server.receive(2)] for _ in range(4)]
        assert [len(turn) for turn in taken] == [2, 2, 2, 0]
        assert all(len(set(turn)) == 2 for turn in taken[:3])  # one of each, although the first has three waiting


def test_a_failed_submit_leaves_nothing_outstanding(server: RingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise MemoryError("no memory")

    with attach(server) as client:
        with monkeypatch.context() as patch:
            patch.setattr(client.attachment.requests, "send_row", broken)
            for _ in range(SLOTS + 1):
                with pytest.raises(MemoryError):
                    ask(client)
        assert client.outstanding == 0
        assert [ask(client, seed=seed) for seed in range(SLOTS)] == list(range(1, SLOTS + 1))
        assert answer(server) == SLOTS
