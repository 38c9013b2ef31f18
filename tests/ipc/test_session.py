"""A pool and its clients: requests, results, limits, refusals, ends."""

import asyncio
import os
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipc import (
    AttachRefused,
    AttachTimeout,
    Cancel,
    Draining,
    InvalidArgument,
    MemoryReference,
    PeerLost,
    ProtocolViolation,
    Result,
    RingClient,
    RingFull,
    RingServer,
    StaleEpoch,
    UnknownRequest,
    connect,
)
from ipc.descriptors import PARAMETERS, REQUEST_HEADER, RESULT_HEADER
from ipc.session import MAX_MESSAGE_BYTES, Attach, encode
from tests.ipc.processes import attach, child, ended_well, endpoint, readable, served

DIM = 8
SLOTS = 4


@pytest.fixture
def server() -> Iterator[RingServer]:
    with RingServer(endpoint(), {"docs": DIM, "code": 3}, epoch=5, ring_slots=SLOTS, max_k=6, max_clients=3) as made:
        yield made


@pytest.fixture(params=["eventfd", "zeromq"])
def client(request: pytest.FixtureRequest, server: RingServer) -> Iterator[RingClient]:
    with attach(server, doorbell=request.param) as made:
        yield made


def vector(seed: int = 0, dim: int = DIM) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(dim, np.float32)


def ask(client: RingClient, seed: int = 0, **changes: Any) -> int:
    return client.submit(vector(seed), **{"collection": "docs", "stage": "prefill", "k": 2, **changes})


def answer(server: RingServer, limit: int = 256) -> int:
    """Answer what waits with the vector's first k values; returns how many."""
    requests = server.receive(limit)
    for request in requests:
        server.publish(request.client, request.request_id, "ok", np.arange(request.k), request.vector[: request.k])
    return len(requests)


def test_a_request_arrives_as_it_was_asked(server: RingServer, client: RingClient) -> None:
    before = time.monotonic_ns()
    request_id = client.submit(
        vector(1), collection="docs", stage="decode", k=3, top_m=77, search_width=4, patience=2, deadline_ns=99
    )
    (request,) = server.receive()
    assert (request.request_id, request.collection, request.stage) == (request_id, "docs", "decode")
    assert (request.k, request.top_m, request.search_width, request.patience) == (3, 77, 4, 2)
    assert request.deadline_ns == 99
    assert before <= request.enqueue_ns <= request.receive_ns <= time.monotonic_ns()
    assert np.array_equal(request.vector, vector(1))
    ask(client, patience=None)
    assert server.receive()[0].patience is None


def test_a_result_arrives_as_it_was_published(server: RingServer, client: RingClient) -> None:
    request_id = ask(client)
    (request,) = server.receive()
    begin = time.monotonic_ns()
    assert server.publish(request.client, request_id, "ok", [7, -1], [0.5, np.inf], extends=9, begin_ns=begin)
    (result,) = client.poll()
    assert (result.request_id, result.status, result.extends) == (request_id, "ok", 9)
    assert (result.ids.dtype, result.distances.dtype) == (np.int64, np.float32)
    assert result.ids.tolist() == [7, -1]
    assert result.distances.tolist() == [0.5, np.inf]
    assert result.enqueue_ns <= result.receive_ns <= result.begin_ns == begin <= result.end_ns
    assert client.outstanding == 0


def test_collections_of_other_dimensions_share_a_ring(server: RingServer, client: RingClient) -> None:
    client.submit(vector(3, 3), collection="code", stage="prefill", k=1)
    ask(client, seed=4)
    first, second = server.receive()
    assert (first.collection, second.collection) == ("code", "docs")
    assert np.array_equal(first.vector, vector(3, 3))
    assert np.array_equal(second.vector, vector(4))


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int32])
def test_vectors_of_any_number_type_and_layout_become_float32(
    server: RingServer, client: RingClient, kind: type[Any]
) -> None:
    strided = np.arange(2 * DIM, dtype=kind)[::2]
    strided.flags.writeable = False
    client.submit(strided, collection="docs", stage="prefill", k=1)
    assert np.array_equal(server.receive()[0].vector, strided.astype(np.float32))


def test_a_received_vector_stays_when_its_slot_is_written_again(server: RingServer, client: RingClient) -> None:
    ask(client, seed=1)
    (request,) = server.receive()
    for seed in range(2, 2 + SLOTS - 1):
        ask(client, seed=seed)
    server.receive()
    assert np.array_equal(request.vector, vector(1))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.sampled_from(["submit", "serve", "poll", "cancel"]), st.integers(1, 5)), max_size=30)
)
def test_every_request_ends_exactly_once_whatever_the_order(
    server: RingServer, client: RingClient, steps: list[tuple[str, int]]
) -> None:
    open_ids: set[int] = set()
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
                    except RingFull:  # cancels take request slots, too
                        assert client.statistics().cancelled
        elif step == "serve":
            serve(count)
        elif step == "cancel" and open_ids:
            client.cancel(min(open_ids))
        else:
            take(client.poll())
    assert not open_ids
    assert client.outstanding == 0


def test_a_full_ring_refuses_and_accepts_again_after_a_result(server: RingServer, client: RingClient) -> None:
    for _ in range(SLOTS):
        ask(client)
    with pytest.raises(RingFull, match=f"{SLOTS} requests are outstanding"):
        ask(client)
    assert answer(server, 1) == 1
    with pytest.raises(RingFull):  # its slot in the result ring is still taken
        ask(client)
    assert len(client.poll()) == 1
    ask(client)
    assert client.statistics().full == 2


def test_submit_can_wait_for_room_and_keeps_what_it_read_meanwhile(server: RingServer, client: RingClient) -> None:
    with served(server, lambda s: void(answer(s))):
        ids = [ask(client, block_ms=20_000) for _ in range(5 * SLOTS)]
        results: list[Result] = []
        while len(results) < len(ids):
            assert client.wait(20_000)
            results += client.poll()
    assert [result.request_id for result in results] == ids


def void(_: object) -> None:
    return None


def test_a_bounded_wait_for_room_ends_with_ring_full(server: RingServer, client: RingClient) -> None:
    for _ in range(SLOTS):
        ask(client)
    with pytest.raises(RingFull):
        ask(client, block_ms=5)


def test_a_client_that_never_reads_is_not_served_on_and_hinders_nobody(server: RingServer) -> None:
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
        assert server.wait(20_000)
        assert answer(server) == SLOTS


def forge_requests(client: RingClient, ids: Any, **changes: int) -> None:
    """Write descriptors that `submit` would not."""
    ring = client._session.requests
    fields = {"epoch": 5, "kind": 0, "stage": 0, "collection": 0, "k": 1, "top_m": 8, "width": 1, "patience": 0}
    fields = {**fields, "dim": DIM, "deadline": 0, **changes}
    deadline = fields.pop("deadline")
    for request_id in ids:
        offset = ring.header_offsets[ring.loan()]
        REQUEST_HEADER.pack_into(ring.view, offset, request_id, deadline, 0, PARAMETERS.pack(*fields.values()))
        client._outstanding[request_id] = 0
        ring.send()


@pytest.mark.parametrize(
    "change",
    [
        {"stage": 2},
        {"collection": 2},
        {"k": 0},
        {"k": 7},
        {"k": (1 << 32) - 1},
        {"top_m": 0},
        {"top_m": 1025},
        {"width": 0},
        {"dim": 7},
        {"dim": (1 << 32) - 1},
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
    assert server.statistics().invalid == 1
    client._next_id = 2
    ask(client)
    assert answer(server) == 1


def test_a_request_of_another_epoch_is_refused(server: RingServer, client: RingClient) -> None:
    forge_requests(client, [1], epoch=4)
    assert server.receive() == []
    (result,) = client.poll()
    assert result.status == "stale_epoch"
    assert server.statistics().stale == 1


def test_a_result_of_another_epoch_is_refused_and_its_request_still_ends(
    server: RingServer, client: RingClient
) -> None:
    request_id = ask(client)
    (request,) = server.receive()
    ring = server._clients[request.client].results
    RESULT_HEADER.pack_into(ring.view, ring.header_offsets[ring.loan()], request_id, 4, 0, 0, 0, 0, 0, 0)
    ring.send()
    with pytest.raises(StaleEpoch, match="epoch 4 in a session of epoch 5"):
        client.poll()
    assert client.poll() == []
    server.publish(request.client, request_id)
    assert [result.status for result in client.poll()] == ["ok"]


@pytest.mark.parametrize("change", [{"request_id": 99}, {"status": 7}, {"status": 255}, {"count": 7}], ids=str)
def test_a_result_that_no_pool_writes_ends_the_session_and_loses_what_is_outstanding(
    server: RingServer, client: RingClient, change: dict[str, int]
) -> None:
    request_id = ask(client)
    (request,) = server.receive()
    ring = server._clients[request.client].results
    fields = {"request_id": request_id, "epoch": 5, "status": 0, "count": 0, **change}
    RESULT_HEADER.pack_into(ring.view, ring.header_offsets[ring.loan()], *fields.values(), 0, 0, 0, 0)
    ring.send()
    with pytest.raises(ProtocolViolation):
        client.poll()
    assert [(r.request_id, r.status) for r in client.poll()] == [(request_id, "lost")]
    with pytest.raises(PeerLost):
        ask(client)


@pytest.mark.parametrize("request_id", [0, -1, 1, 1 << 62])
def test_a_client_whose_ids_do_not_rise_is_evicted(server: RingServer, client: RingClient, request_id: int) -> None:
    first = ask(client)
    (request,) = server.receive()
    forge_requests(client, [request_id])
    assert server.receive() == []
    assert server.cancellations() == [Cancel(request.client, first)]
    assert not server.publish(request.client, first)
    assert client.wait(20_000)
    assert {r.status for r in client.poll()} == {"lost"}
    assert "evicted" in str(client.lost)
    assert server.statistics().evicted == 1


def test_a_client_with_a_kind_that_does_not_exist_is_evicted(server: RingServer, client: RingClient) -> None:
    forge_requests(client, [1], kind=9)
    assert server.receive() == []
    assert server.statistics().evicted == 1


@settings(max_examples=150, deadline=None)
@given(header=st.binary(min_size=56, max_size=56))
def test_random_descriptors_never_break_the_pool(header: bytes) -> None:
    with one_server() as server, attach(server) as hostile, attach(server) as honest:
        ring = hostile._session.requests
        offset = ring.header_offsets[ring.loan()]
        ring.view[offset : offset + 56] = header
        ring.send()
        ask(honest)
        assert answer(server) + answer(server) >= 1
        assert [r.status for r in honest.poll()] == ["ok"]


def one_server() -> RingServer:
    return RingServer(endpoint(), {"docs": DIM}, epoch=5, ring_slots=SLOTS, max_k=6)


@pytest.mark.parametrize("offset", [128, 256, 320])
@pytest.mark.parametrize("word", [-1, 7, 1 << 40])
def test_garbage_in_the_shared_words_costs_only_its_writer_the_session(
    server: RingServer, offset: int, word: int
) -> None:
    with attach(server) as hostile, attach(server) as honest:
        ask(hostile)
        view = hostile._session.memory.view
        split = len(view) - hostile._session.results.layout.size
        for base in (0, split):
            struct.pack_into("<q", view, base + offset, word)
        for _ in range(3):
            ask(honest)
            server.wait(0)
            while not (found := honest.poll()):
                answer(server)
            assert [r.status for r in found] == ["ok"]


def test_a_cancelled_request_is_told_after_its_request_and_ends_once(server: RingServer, client: RingClient) -> None:
    request_id = ask(client)
    assert client.cancel(request_id)
    assert server.cancellations() == []
    (request,) = server.receive()
    assert server.cancellations() == [Cancel(request.client, request_id)]
    assert server.cancellations() == []
    server.publish(request.client, request_id, "cancelled")
    assert [r.status for r in client.poll()] == ["cancelled"]
    assert not client.cancel(request_id)


def test_a_cancel_that_crosses_its_result_is_not_told(server: RingServer, client: RingClient) -> None:
    request_id = ask(client)
    answer(server)
    assert client.cancel(request_id)
    server.receive()
    assert server.cancellations() == []
    assert [r.status for r in client.poll()] == ["ok"]


def test_a_cancel_that_finds_the_ring_full_goes_out_later(server: RingServer, client: RingClient) -> None:
    ids = [ask(client) for _ in range(SLOTS)]
    assert client.cancel(ids[0])
    (*_, request) = server.receive()
    assert server.cancellations() == []
    assert client.poll() == []
    server.receive()
    assert server.cancellations() == [Cancel(request.client, ids[0])]


def test_nothing_is_published_twice_or_for_nobody(server: RingServer, client: RingClient) -> None:
    ask(client)
    (request,) = server.receive()
    server.publish(request.client, request.request_id)
    for handle, request_id in [(request.client, request.request_id), (request.client, 77), (99, 1), (0, 1)]:
        with pytest.raises(UnknownRequest):
            server.publish(handle, request_id)


@pytest.mark.parametrize(
    ("ids", "distances", "status"),
    [([1], [], "ok"), ([1] * 7, [1.0] * 7, "ok"), ([[1]], [[1.0]], "ok"), ([], [], "fine"), ([], [], "lost")],
)
def test_a_result_that_does_not_fit_is_refused_and_the_request_stays(
    server: RingServer, client: RingClient, ids: Any, distances: Any, status: str
) -> None:
    ask(client)
    (request,) = server.receive()
    with pytest.raises(InvalidArgument):
        server.publish(request.client, request.request_id, status, ids, distances)
    assert server.publish(request.client, request.request_id, "failed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"collection": "nope"}, "no collection 'nope'; there are"),
        ({"collection": "code"}, r"shape \(3,\), got \(8,\)"),
        ({"stage": "later"}, "stage must be one of"),
        ({"k": 0}, r"k 0 must be within 1\.\.6"),
        ({"k": 7}, r"k 7 must be within 1\.\.6"),
        ({"top_m": 1025}, r"top_m 1025 within 1\.\.1024"),
        ({"search_width": 0}, "search_width 0"),
        ({"patience": 0}, "patience 0"),
        ({"patience": 1 << 16}, "patience 65536"),
        ({"deadline_ns": -1}, "got -1"),
    ],
)
def test_submit_refuses_what_cannot_be_and_accepts_nothing(
    client: RingClient, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        ask(client, **change)
    assert client.outstanding == 0


def test_limit_bounds_a_receive_and_clients_take_turns(server: RingServer) -> None:
    with attach(server) as first, attach(server) as second:
        for client in (first, second):
            for _ in range(3):
                ask(client)
        taken = [[r.client for r in server.receive(2)] for _ in range(4)]
        assert [len(turn) for turn in taken] == [2, 2, 2, 0]
        assert taken[0] != taken[1]


def test_wait_says_whether_there_is_work(server: RingServer, client: RingClient) -> None:
    assert not server.wait(0)
    ask(client)
    assert server.wait(20_000)
    answer(server)
    assert not server.wait(1)


def test_a_sleeping_pool_and_a_sleeping_client_are_woken(server: RingServer, client: RingClient) -> None:
    with served(server, lambda s: void(answer(s))):
        for seed in range(100):
            ask(client, seed)
            assert client.wait(20_000)
            assert len(client.poll()) == 1


def test_wait_returns_at_once_when_nothing_is_outstanding(client: RingClient) -> None:
    assert not client.wait(1e9)


def test_asyncio_can_sleep_on_the_clients_descriptor(server: RingServer, client: RingClient) -> None:
    async def search(seed: int) -> Result:
        request_id = ask(client, seed)
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(client.fileno(), woken.set)
        try:
            while True:
                for result in client.poll():
                    assert result.request_id == request_id
                    return result
                if client.arm():
                    await asyncio.wait_for(woken.wait(), 20)
                woken.clear()
                client.disarm()
        finally:
            loop.remove_reader(client.fileno())

    async def main() -> None:
        for seed in range(50):
            assert (await search(seed)).distances.tolist() == vector(seed)[:2].tolist()

    with served(server, lambda s: void(answer(s))):
        asyncio.run(main())


def test_arm_does_not_let_sleep_over_a_result(server: RingServer, client: RingClient) -> None:
    ask(client)
    answer(server)
    assert not client.arm()
    client.poll()
    assert client.arm()
    client.disarm()


def test_the_servers_descriptor_can_be_slept_on_too(server: RingServer, client: RingClient) -> None:
    while not server.arm():
        pass
    assert not readable(server, 0) or True
    ask(client)
    assert readable(server, 20_000)
    server.disarm()
    assert not server.arm()
    assert answer(server) == 1


def test_a_draining_pool_finishes_what_it_has_and_takes_nothing_new(server: RingServer, client: RingClient) -> None:
    ask(client)
    server.drain()
    with pytest.raises(Draining):
        ask(client)
    assert answer(server) == 1
    assert [r.status for r in client.poll()] == ["ok"]
    with pytest.raises(AttachRefused, match="draining"):
        attach(server)


def test_when_the_pool_closes_published_results_still_arrive_and_the_rest_is_lost(
    server: RingServer, client: RingClient
) -> None:
    ids = [ask(client) for _ in range(3)]
    answer(server, 1)
    server.close()
    results: list[Result] = []
    while len(results) < 3:
        assert client.wait(20_000)
        results += client.poll()
    assert [(r.request_id, r.status) for r in results] == [(ids[0], "ok"), (ids[1], "lost"), (ids[2], "lost")]
    assert client.outstanding == 0
    with pytest.raises(PeerLost, match="closed"):
        ask(client)
    assert client.statistics().lost == 2


def test_a_client_that_closes_frees_its_place_and_its_requests_are_cancelled(server: RingServer) -> None:
    client = attach(server)
    request_id = ask(client)
    (request,) = server.receive()
    client.close()
    client.close()
    assert server.wait(20_000)
    assert server.cancellations() == [Cancel(request.client, request_id)]
    assert not server.publish(request.client, request_id)
    statistics = server.statistics()
    assert (statistics.clients, statistics.lost, statistics.dropped) == (0, 1, 1)
    assert [r.status for r in client.poll()] == ["lost"]


def test_only_so_many_clients_are_taken(server: RingServer) -> None:
    clients = [attach(server) for _ in range(3)]
    with pytest.raises(AttachRefused, match="all 3 places"):
        attach(server)
    clients[0].close()
    with attach(server):
        pass
    for client in clients:
        client.close()


def test_reconnect_begins_a_new_session_and_ids_go_on(server: RingServer, client: RingClient) -> None:
    first = ask(client)
    with served(server, lambda s: void(s.receive())):
        client.reconnect()
    server.wait(0)
    assert [(r.request_id, r.status) for r in client.poll()] == [(first, "lost")]
    assert ask(client) > first
    assert answer(server) == 1
    assert [r.status for r in client.poll()] == ["ok"]


def test_nobody_at_the_endpoint_is_said_in_time() -> None:
    with pytest.raises(AttachTimeout):
        RingClient(endpoint(), "test", timeout_ms=30)


@pytest.mark.parametrize("doorbell", ["bell", ""])
def test_an_unknown_doorbell_is_refused(doorbell: str) -> None:
    with pytest.raises(InvalidArgument, match="doorbell"):
        RingClient(endpoint(), "test", doorbell=doorbell)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "ipc:///tmp/x", "ipc://@" + "x" * 101, "ipc://@", ""])
def test_only_abstract_endpoints_are_bound_or_connected(address: str) -> None:
    with pytest.raises(InvalidArgument):
        RingServer(address, {"docs": DIM}, epoch=1)
    with pytest.raises(InvalidArgument):
        RingClient(address, "test", timeout_ms=10)


def test_an_endpoint_that_is_taken_is_refused(server: RingServer) -> None:
    with pytest.raises(InvalidArgument, match="cannot bind"):
        RingServer(server.endpoint, {"docs": DIM}, epoch=1)


GARBAGE = [
    b"",
    b"\xc1",
    b"x" * 1000,
    encode(Attach(1, "n", 0, "eventfd", "nobody")),
    encode(Attach(1, "n", -1, "eventfd", "nobody")),
    encode(Attach(1, "n", 1 << 40, "eventfd", "nobody")),
    encode(Attach(1, "n", os.getpid(), "eventfd", "nobody")),
    encode(Attach(1, "n", os.getpid(), "eventfd", "")),
    encode(Attach(1, "n", os.getpid(), "zeromq", "tcp://127.0.0.1:1")),
    encode(Attach(1, "n", os.getpid(), "telegraph", "x")),
    encode(Attach(2, "n", os.getpid(), "eventfd", "x")),
    encode(Attach(1, "n" * 101, os.getpid(), "eventfd", "x")),
    msgspec.msgpack.encode({"type": "Attach", "version": "one"}),
    msgspec.msgpack.encode(MemoryReference(1, 2, 3, 4)),
]


@pytest.mark.parametrize("message", GARBAGE)
def test_a_session_message_that_cannot_be_is_answered_with_a_refusal(server: RingServer, message: bytes) -> None:
    with zmq_dealer(server) as socket:
        socket.send(message)
        while not socket.poll(0):
            server.wait(1)
        assert b"Refused" in socket.recv()
    assert server.statistics().clients == 0
    with attach(server):
        pass


def zmq_dealer(server: RingServer) -> Any:
    return connect(zmq.DEALER, server.endpoint, max_message_bytes=MAX_MESSAGE_BYTES)


def test_messages_over_the_limit_or_of_odd_shape_disturb_nobody(server: RingServer) -> None:
    with zmq_dealer(server) as big, zmq_dealer(server) as odd:
        big.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        odd.send_multipart([b"a", b"b", b"c"])
        with attach(server) as client:
            ask(client)
            assert answer(server) == 1
            assert len(client.poll()) == 1


def _attach_as_a_stranger(address: str) -> None:
    os.setgid(65534)
    os.setuid(65534)
    try:
        RingClient(address, "stranger", timeout_ms=300)
    except AttachTimeout:
        return
    raise AssertionError("a stranger was let in")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_attach(server: RingServer) -> None:
    with child(_attach_as_a_stranger, server.endpoint) as process:
        while process.is_alive():
            server.wait(5)
        assert ended_well(process)
    assert server.statistics().attached == 0


def test_the_heartbeat_says_that_the_pool_looks_after_its_rings(server: RingServer, client: RingClient) -> None:
    server.wait(0)
    young = client.heartbeat_age_ns
    assert young < client.heartbeat_age_ns
    server.wait(0)
    assert server.statistics().clients == 1


def test_statistics_count_both_sides(server: RingServer, client: RingClient) -> None:
    for _ in range(3):
        ask(client)
    client.cancel(1)
    answer(server)
    client.poll()
    ours, theirs = client.statistics(), server.statistics()
    assert (ours.submitted, ours.returned, ours.cancelled, ours.outstanding, ours.attached) == (3, 3, 1, 0, 1)
    assert (theirs.received, theirs.published, theirs.outstanding, theirs.clients) == (3, 3, 0, 1)


@pytest.mark.parametrize(
    "options",
    [{"collections": {}}, {"collections": {"docs": 0}}, {"max_k": 0}, {"max_top_m": 1 << 16}, {"ring_slots": 0}],
    ids=str,
)
def test_a_server_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        RingServer(endpoint(), options.pop("collections", {"docs": DIM}), epoch=1, **options)
