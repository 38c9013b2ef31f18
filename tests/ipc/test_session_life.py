"""Tests of a session's life cycle: attaching, draining, closing."""

from typing import Any

import pytest

from ipc import AttachRefused, AttachTimeout, Draining, InvalidArgument, PeerLost, Result, RingClient
from tests.ipc.processes import attach, endpoint
from tests.ipc.ring_server import Cancel, RingServer
from tests.ipc.sessions import DIM, SLOTS, answer, ask


def test_a_draining_pool_finishes_or_cancels_its_requests_and_accepts_no_new_ones(
    server: RingServer, client: RingClient
) -> None:
    ids = [ask(client), ask(client)]
    server.drain()
    for _ in range(SLOTS):  # those that are not sent keep no slot of the arena
        with pytest.raises(Draining):
            ask(client)
    assert client.outstanding == 2
    assert answer(server, 1) == 1
    assert [(r.request_id, r.status) for r in client.poll()] == [(ids[0], "ok")]
    assert client.cancel(ids[1])
    (request,) = server.receive()
    assert server.cancellations() == [Cancel(request.client, ids[1])]
    with pytest.raises(AttachRefused, match="draining"):
        attach(server)


def test_when_the_pool_closes_published_results_arrive_and_other_requests_fail(
    server: RingServer, client: RingClient
) -> None:
    ids = [ask(client) for _ in range(3)]
    answer(server, 1)
    server.close()
    results: list[Result] = []
    while len(results) < 3:
        assert client.wait(60_000)
        results += client.poll()
    assert [(r.request_id, r.status) for r in results] == [(ids[0], "ok"), (ids[1], "lost"), (ids[2], "lost")]
    assert client.outstanding == 0
    with pytest.raises(PeerLost, match="closed"):
        ask(client)


def test_closing_a_client_frees_its_place_and_cancels_its_requests(server: RingServer) -> None:
    client = attach(server)
    request_id = ask(client)
    (request,) = server.receive()
    client.close()
    client.close()
    assert server.wait(60_000)
    assert server.cancellations() == [Cancel(request.client, request_id)]
    assert not server.publish(request.client, request_id)
    assert server.client_count == 0
    assert [r.status for r in client.poll()] == ["lost"]


def test_the_number_of_clients_is_limited(server: RingServer) -> None:
    clients = [attach(server) for _ in range(3)]
    with pytest.raises(AttachRefused, match="limit of 3 clients"):
        attach(server)
    clients[0].close()
    with attach(server):
        pass
    for client in clients:
        client.close()


def test_attaching_without_a_pool_times_out() -> None:
    with pytest.raises(AttachTimeout):
        RingClient(endpoint(), "test", timeout_ms=30)


@pytest.mark.parametrize("doorbell", ["bell", ""])
def test_an_unknown_doorbell_is_rejected(doorbell: str) -> None:
    with pytest.raises(InvalidArgument, match="doorbell"):
        RingClient(endpoint(), "test", doorbell=doorbell)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "ipc:///tmp/x", "ipc://@" + "x" * 101, "ipc://@", ""])
def test_only_abstract_endpoints_are_bound_or_connected(address: str) -> None:
    with pytest.raises(InvalidArgument):
        RingServer(address, {"docs": DIM}, epoch=1)
    with pytest.raises(InvalidArgument):
        RingClient(address, "test", timeout_ms=10)


@pytest.mark.parametrize(
    "options",
    [{"collections": {}}, {"collections": {"docs": 0}}, {"max_k": 0}, {"max_top_m": 1 << 16}, {"ring_slots": 0}],
    ids=str,
)
def test_invalid_server_parameters_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        RingServer(endpoint(), options.pop("collections", {"docs": DIM}), epoch=1, **options)
