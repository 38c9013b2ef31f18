"""Tests of session filters: written once, referenced by requests, never overwritten before the pool has read them."""

import pytest

from ipc import InvalidArgument, RingClient, RingFull, SearchSpec
from ipc.ring.filters import FILTER_SLOTS, MAX_FILTER_BYTES
from tests.ipc.ring_server import RingServer
from tests.ipc.sessions import answer, ask, forge_requests, vector


def filters_of(server: RingServer) -> list[bytes]:
    requests = server.receive()
    for request in requests:
        server.publish(request.client, request.request_id)
    return [request.spec.filter for request in requests]


def test_a_request_arrives_with_its_filter_and_the_next_one_without(server: RingServer, client: RingClient) -> None:
    ask(client, filter=b"tenant = a")
    ask(client)
    ask(client, filter=b"tenant = b")
    assert filters_of(server) == [b"tenant = a", b"", b"tenant = b"]


def test_the_same_filter_of_two_collections_is_distinguished(server: RingServer, client: RingClient) -> None:
    ask(client, filter=b"same")
    client.submit(vector(3, 3), SearchSpec("code", 1, filter=b"same"))
    requests = server.receive()
    assert [(one.spec.collection, one.spec.filter) for one in requests] == [("docs", b"same"), ("code", b"same")]


def test_more_filters_than_places_reuse_places_that_were_read(server: RingServer, client: RingClient) -> None:
    for number in range(3 * FILTER_SLOTS):
        ask(client, filter=b"%d" % number)
        assert filters_of(server) == [b"%d" % number]
        client.poll()


def test_a_place_referenced_by_an_unread_request_is_not_overwritten(client: RingClient) -> None:
    writer = client.attachment.filters
    for number in range(FILTER_SLOTS):
        writer.slot_of(b"%d" % number, number + 1, 0)
    with pytest.raises(RingFull, match="all 32 filter slots"):
        writer.slot_of(b"one more", 99, 0)
    assert writer.slot_of(b"7", 100, 0) == 8  # known: referenced again
    assert writer.slot_of(b"one more", 101, 1) == 1  # the first request was read
    with pytest.raises(RingFull):
        writer.slot_of(b"and another", 102, 1)


def test_a_filter_that_is_too_long_is_rejected_and_nothing_is_sent(server: RingServer, client: RingClient) -> None:
    with pytest.raises(InvalidArgument, match=f"{MAX_FILTER_BYTES + 1} bytes; the limit is {MAX_FILTER_BYTES}"):
        ask(client, filter=b"x" * (MAX_FILTER_BYTES + 1))
    assert client.outstanding == 0
    ask(client)
    assert answer(server) == 1


@pytest.mark.parametrize("size", [-1, MAX_FILTER_BYTES + 1, 1 << 62])
def test_a_client_that_writes_an_impossible_size_is_evicted(server: RingServer, client: RingClient, size: int) -> None:
    ask(client, filter=b"good")
    view = client.attachment.filters.view
    view[8:16] = size.to_bytes(8, "little", signed=True)
    assert server.receive() == []
    assert client.wait(1000)
    assert [result.status for result in client.poll()] == ["lost"]
    assert server.client_count == 0


def test_an_invalid_place_is_rejected(server: RingServer, client: RingClient) -> None:
    forge_requests(client, [1], filter=FILTER_SLOTS + 1)
    assert server.receive() == []
    assert [result.status for result in client.poll()] == ["invalid_request"]
