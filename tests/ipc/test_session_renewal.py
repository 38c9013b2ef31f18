"""Tests of session renewal after a catalogue change: clients continue in a second session, and requests of the first
end there."""

import time

import pytest

from ipc import Catalogue, Draining, InvalidArgument, RingClient, SearchSpec, Served, Unserved
from ipc.server.server import RENEW_NS
from tests.ipc.conftest import WAYS
from tests.ipc.processes import attach
from tests.ipc.ring_server import RingServer
from tests.ipc.sessions import DIM, answer, ask, vector

REBUILT = Catalogue((Served("docs", DIM, identity="second"), Served("code", 3)))


def test_after_a_renewal_requests_of_the_old_session_end_there(server: RingServer, client: RingClient) -> None:
    before = ask(client)
    assert not client.draining
    server.renew(REBUILT)
    assert client.draining
    with pytest.raises(Draining):
        ask(client)
    with attach(server) as renewed:
        assert [served.identity for served in renewed.catalogue.served] == ["second", ""]
        assert not renewed.draining
        after = ask(renewed)
        assert answer(server) == 2
        assert [(r.request_id, r.status) for r in client.poll()] == [(before, "ok")]
        assert [(r.request_id, r.status) for r in renewed.poll()] == [(after, "ok")]


def test_a_renewed_session_without_outstanding_requests_is_closed(server: RingServer, client: RingClient) -> None:
    ask(client)
    server.renew(REBUILT)
    server.housekeep(time.monotonic_ns() + RENEW_NS)
    assert client.lost is None
    assert server.in_use("docs", "")
    answer(server)
    server.housekeep(time.monotonic_ns() + RENEW_NS)
    assert [r.status for r in client.poll()] == ["ok"]
    client.wait(0)
    assert client.lost is not None
    assert not server.in_use("docs", "")
    assert server.in_use("docs", "second")


def test_sessions_under_renewal_do_not_occupy_places_of_their_successors(server: RingServer) -> None:
    old = [attach(server, **way) for way in (*WAYS.values(),)]
    server.renew(REBUILT)
    new = [attach(server) for _ in old]
    assert server.client_count == len(old) + len(new) == 6
    for one in (*old, *new):
        one.close()


def test_a_collection_may_be_replaced_by_one_of_another_dimension(server: RingServer, client: RingClient) -> None:
    old = ask(client)
    server.renew(Catalogue((Served("docs", 2 * DIM, identity="wider"),)))
    with attach(server, arena=True) as renewed:
        assert not renewed.has_arena
        new = renewed.submit(vector(1, 2 * DIM), SearchSpec("docs", 1, "decode"))
        assert sorted(request.vector.shape for request in server.receive()) == [(DIM,), (2 * DIM,)]
        with pytest.raises(InvalidArgument, match=r"shape \(16,\)"):
            renewed.submit(vector(1, DIM), SearchSpec("docs", 1, "decode"))
    assert (old, new) == (1, 1)


def test_a_pool_that_can_serve_nothing_reports_the_reason(server: RingServer) -> None:
    server.renew(Catalogue((), (Unserved("docs", "codes.npy is truncated"), Unserved("code", "gone"))))
    with attach(server) as client:
        assert client.catalogue.unserved[0] == Unserved("docs", "codes.npy is truncated")
        with pytest.raises(InvalidArgument, match="no collection 'docs'"):
            ask(client)


@pytest.mark.parametrize(
    "catalogue",
    [
        lambda: Catalogue(()),
        lambda: Catalogue((Served("docs", 1),), (Unserved("docs", ""),)),
        lambda: Served("docs", 0),
        lambda: Served("docs", 1, 2, 2),
        lambda: Served("docs", 1, identity="x" * 129),
        lambda: Unserved("docs", "x" * 501),
    ],
    ids=["nothing", "twice", "no dimension", "no such shard", "long identity", "long reason"],
)
def test_an_invalid_catalogue_is_rejected(catalogue: object) -> None:
    with pytest.raises(InvalidArgument):
        catalogue()  # type: ignore[operator]


def test_a_pool_that_stops_during_a_renewal_ends_both_sessions(server: RingServer, client: RingClient) -> None:
    ask(client)
    server.renew(REBUILT)
    server.drain()
    assert client.lost is None
    assert answer(server) == 1
    assert [r.status for r in client.poll()] == ["ok"]
