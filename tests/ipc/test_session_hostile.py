"""Tests of descriptors, results and session messages that no correct peer writes: only their sender is affected."""

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from ipc import (
    AttachTimeout,
    MemoryReference,
    MemoryRefused,
    PeerLost,
    ProtocolViolation,
    RingClient,
    StaleEpoch,
    connect,
)
from ipc.client.attachment import Attachment
from ipc.ring.descriptors import RESULT_HEADER
from ipc.ring.doorbell import FdMailbox
from ipc.server.server import JOIN_NS
from ipc.session.messages import MAX_MESSAGE_BYTES, VERSION, Attach, Attached, decode_answer, encode
from tests.ipc.processes import as_root, attach, become_another_user, child, served, succeeded
from tests.ipc.ring_server import Cancel, RingServer
from tests.ipc.sessions import answer, ask, forge_requests, place_of, void


@pytest.mark.parametrize(
    "change",
    [
        {"stage": 2},
        {"collection": 2},
        {"k": 0},
        {"k": 7},
        {"k": (1 << 16) - 1},
        {"top_m": 0},
        {"top_m": 1025},
        {"width": 0},
        {"dim": 7},
        {"dim": (1 << 16) - 1},
        {"deadline": -1},
    ],
    ids=str,
)
def test_a_descriptor_with_hostile_numbers_ends_as_an_invalid_request(
    server: RingServer, client: RingClient, change: dict[str, int]
) -> None:
    forge_requests(client, [1], **change)
    assert server.receive() == []
    (result,) = client.poll()
    assert (result.request_id, result.status, len(result.ids)) == (1, "invalid_request", 0)
    client.pending.next_id = 2
    ask(client)
    assert answer(server) == 1


def test_a_request_of_another_epoch_is_rejected(server: RingServer, client: RingClient) -> None:
    forge_requests(client, [1], epoch=4)
    assert server.receive() == []
    (result,) = client.poll()
    assert result.status == "stale_epoch"


def test_a_result_of_another_epoch_is_rejected_and_its_request_still_ends(
    server: RingServer, client: RingClient
) -> None:
    request_id = ask(client)
    (request,) = server.receive()
    ring = place_of(server, request.client).results
    RESULT_HEADER.pack_into(ring.view, ring.header_offsets[ring.loan()], request_id, 4, 0, 0, 0, 0, 0, 0)
    ring.send()
    with pytest.raises(StaleEpoch, match="epoch 4 in a session of epoch 5"):
        client.poll()
    assert client.poll() == []
    server.publish(request.client, request_id)
    assert [result.status for result in client.poll()] == ["ok"]


@pytest.mark.parametrize("change", [{"request_id": 99}, {"status": 7}, {"status": 255}, {"count": 7}], ids=str)
def test_an_invalid_result_ends_the_session_and_fails_outstanding_requests(
    server: RingServer, client: RingClient, change: dict[str, int]
) -> None:
    request_id = ask(client)
    (request,) = server.receive()
    ring = place_of(server, request.client).results
    fields = {"request_id": request_id, "epoch": 5, "status": 0, "count": 0, **change}
    RESULT_HEADER.pack_into(ring.view, ring.header_offsets[ring.loan()], *fields.values(), 0, 0, 0, 0)
    ring.send()
    with pytest.raises(ProtocolViolation):
        client.poll()
    assert [(r.request_id, r.status) for r in client.poll()] == [(request_id, "lost")]
    with pytest.raises(PeerLost):
        ask(client)


@pytest.mark.parametrize("request_id", [0, -1, 1, 1 << 62])
def test_a_client_whose_ids_do_not_increase_is_evicted(server: RingServer, client: RingClient, request_id: int) -> None:
    first = ask(client)
    (request,) = server.receive()
    forge_requests(client, [request_id])
    assert server.receive() == []
    assert server.cancellations() == [Cancel(request.client, first)]
    assert not server.publish(request.client, first)
    assert client.wait(60_000)
    assert {r.status for r in client.poll()} == {"lost"}
    assert "evicted" in str(client.lost)


def test_a_client_that_writes_an_unknown_kind_is_evicted(server: RingServer, client: RingClient) -> None:
    forge_requests(client, [1], kind=9)
    assert server.receive() == []
    assert server.client_count == 0


GARBAGE = [
    encode(Attach(VERSION, "name", 7, "eventfd", "nobody")).replace(b"name", b"n\xffme", 1),
    b"\x91" * 60_000,
    encode(Attach(VERSION, "n", os.getpid(), "telegraph", "x")),
    encode(Attach(VERSION + 1, "n", os.getpid(), "eventfd", "x")),
    encode(Attach(VERSION, "n" * 101, os.getpid(), "eventfd", "x")),
    msgspec.msgpack.encode(MemoryReference(1, 2, 3, 4)),
]


@pytest.mark.parametrize("message", GARBAGE, ids=range(len(GARBAGE)))
def test_an_invalid_session_message_is_answered_with_a_refusal(server: RingServer, message: bytes) -> None:
    with zmq_dealer(server) as socket:
        socket.send(message)
        while not socket.poll(0):
            server.wait(1)
        assert b"Refused" in socket.recv()
    assert server.client_count == 0
    with attach(server):
        pass


def zmq_dealer(server: RingServer) -> Any:
    return connect(zmq.DEALER, server.endpoint, max_message_bytes=MAX_MESSAGE_BYTES)


def test_the_place_of_a_client_that_never_opens_its_rings_is_reclaimed(server: RingServer) -> None:
    with zmq_dealer(server) as socket, closing(FdMailbox()) as mailbox:
        socket.send(encode(Attach(VERSION, "gone", os.getpid(), "eventfd", mailbox.name)))
        while not socket.poll(0):
            server.wait(1)
        with attach(server) as client:
            assert server.client_count == 2
            server.housekeep(time.monotonic_ns() + JOIN_NS)
            assert server.client_count == 1
            ask(client)
            assert answer(server) == 1


def test_an_answer_with_a_token_that_no_mailbox_could_match_is_malformed(client: RingClient) -> None:
    answer = client.attachment.answer
    assert decode_answer(encode(answer)) == answer
    with pytest.raises(msgspec.ValidationError, match="length <= 64"):
        decode_answer(encode(msgspec.structs.replace(answer, token=b"t" * 65)))


@pytest.mark.parametrize("moment", ["before it maps its rings", "before it says that it has"])
def test_a_slow_client_never_opens_anothers_rings_and_can_attach_again(
    server: RingServer, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its place is reclaimed meanwhile, and another client owns its descriptors by then."""
    answered, taken_back = threading.Event(), threading.Event()
    map_rings = Attachment.map_rings

    def slowly(self: Attachment, place: Attached) -> None:
        if moment.endswith("has"):
            map_rings(self, place)
        answered.set()
        assert taken_back.wait(60)
        if not moment.endswith("has"):
            map_rings(self, place)

    monkeypatch.setattr(Attachment, "map_rings", slowly)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(RingClient, server.endpoint, "slow", timeout_ms=60_000.0)
        while not answered.is_set():
            server.wait(1)
        monkeypatch.setattr(Attachment, "map_rings", map_rings)
        server.housekeep(time.monotonic_ns() + JOIN_NS)
        assert server.client_count == 0
        with attach(server) as other:
            taken_back.set()
            if moment.endswith("has"):
                late = slow.result(60)
                with pytest.raises(PeerLost, match="closed the session"):
                    ask(late)
                late.close()
                with (
                    served(server, lambda s: void(answer(s))),
                    RingClient(server.endpoint, "slow", timeout_ms=60_000.0) as again,
                ):
                    ask(again)
                    assert again.wait(60_000)
            else:
                with pytest.raises(MemoryRefused):
                    slow.result(60)
            ask(other)
            while not other.wait(1):
                answer(server)
            assert [result.status for result in other.poll()] == ["ok"]


def test_the_place_of_a_client_that_fails_after_mapping_its_rings_is_reclaimed(
    server: RingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not confirmed the session, so its place is reclaimed although its process lives."""

    def none_left() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("ipc.client.attachment.select", SimpleNamespace(epoll=none_left))
        with pytest.raises(OSError, match="Too many"):
            attach(server)
    assert server.client_count == 1
    server.housekeep(time.monotonic_ns() + JOIN_NS)
    assert server.client_count == 0


def test_oversized_or_misshapen_messages_affect_no_other_session(server: RingServer) -> None:
    with zmq_dealer(server) as big, zmq_dealer(server) as odd:
        big.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        odd.send_multipart([b"a", b"b", b"c"])
        with attach(server) as client:
            ask(client)
            assert answer(server) == 1
            assert len(client.poll()) == 1


def _attach_as_another_user(address: str) -> None:
    become_another_user()
    with pytest.raises(AttachTimeout):
        RingClient(address, "stranger", timeout_ms=300)


@as_root
def test_another_user_cannot_attach(server: RingServer) -> None:
    with child(_attach_as_another_user, server.endpoint) as process:
        while process.is_alive():
            server.wait(5)
        assert succeeded(process)
    assert server.client_count == 0
