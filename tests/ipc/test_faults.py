"""Tests with SIGKILL at random moments: every request ends exactly once, and no resources leak."""

import itertools
import os
import random
from collections import Counter

import numpy as np
import pytest

from ipc import AttachTimeout, Draining, PeerLost, Result, RingClient, RingFull, SearchSpec
from ipc.ring.descriptors import PARAMETERS, REQUEST_HEADER
from tests.ipc.leaks import settled
from tests.ipc.processes import attach, child, endpoint
from tests.ipc.ring_server import RingServer

DIM = 16
ROUNDS = 15
POOL_ROUNDS = 8  # with each doorbell
SLOTS = 8


def _flood(address: str) -> None:
    """Run a client that submits, cancels and reads as fast as it can, forever."""
    rng = random.Random(os.getpid())
    with RingClient(address, "flood", timeout_ms=60_000, spin_us=5) as client:
        vector = np.ones(DIM, np.float32)
        for i in itertools.count():
            try:
                request_id = client.submit(vector, SearchSpec("docs", 3, "decode", deadline_ns=i))
                if rng.random() < 0.2:
                    client.cancel(request_id)
            except RingFull:
                client.wait(1)
            client.poll()


def test_a_client_killed_at_any_moment_leaks_nothing_in_the_pool() -> None:
    rng = random.Random(1)
    before = settled()
    with (
        RingServer(endpoint(), {"docs": DIM}, epoch=1, ring_slots=SLOTS, max_k=4) as server,
        attach(server, "steady") as steady,
    ):
        received = answered = 0
        for round_ in range(ROUNDS):
            until = received + rng.randrange(1, 60)
            with child(_flood, server.endpoint) as process:
                open_requests: dict[tuple[int, int], None] = {}
                alive = True
                while alive or server.client_count > 1:
                    server.wait(5)
                    for request in server.receive(rng.randrange(1, 5)):
                        received += 1
                        open_requests[request.client, request.request_id] = None
                    for cancel in server.cancellations():
                        open_requests.pop((cancel.client, cancel.request_id))
                        server.publish(cancel.client, cancel.request_id, "cancelled")
                        answered += 1
                    for handle, request_id in list(open_requests)[: rng.randrange(4)]:
                        open_requests.pop((handle, request_id))
                        server.publish(handle, request_id, "ok", [1, 2], [0.1, 0.2])
                        answered += 1
                    if alive and received >= until:
                        process.kill()
                        alive = False
                for cancel in server.cancellations():  # the dead client's last ones
                    open_requests.pop((cancel.client, cancel.request_id))
                    assert not server.publish(cancel.client, cancel.request_id, "cancelled")
                    answered += 1
            assert not open_requests, f"round {round_}: requests of a dead client were not cancelled"
            steady.submit(np.ones(DIM), SearchSpec("docs", 1, "prefill"))
            (request,) = server.receive()
            server.publish(request.client, request.request_id, "ok", [1], [0.5])
            assert [result.status for result in steady.poll()] == ["ok"]
        assert received == answered
        assert server.client_count == 1
    del server, steady
    assert settled() == before


def _serve(address: str, epoch: int, seed: int) -> None:
    rng = random.Random(seed)
    with RingServer(address, {"docs": DIM}, epoch=epoch, ring_slots=SLOTS, max_k=4) as server:
        waiting = []
        while True:
            server.wait(50)
            waiting += [(r.client, r.request_id) for r in server.receive(rng.randrange(1, 6))]
            for cancel in server.cancellations():
                waiting.remove((cancel.client, cancel.request_id))
                server.publish(cancel.client, cancel.request_id, "cancelled")
            rng.shuffle(waiting)
            for _ in range(rng.randrange(len(waiting) + 1)):
                server.publish(*waiting.pop(), "ok", [epoch], [1.0])


@pytest.mark.parametrize("doorbell", ["eventfd", "zeromq"])
def test_a_pool_killed_at_any_moment_leaves_no_request_without_an_end(doorbell: str) -> None:
    rng = random.Random(2)
    address = endpoint()
    ends: Counter[tuple[int, int]] = Counter()
    statuses: Counter[str] = Counter()
    submitted: list[tuple[int, int]] = []
    before = settled()
    vector = np.ones(DIM, np.float32)

    def note(epoch: int, results: list[Result]) -> None:
        for result in results:
            ends[epoch, result.request_id] += 1
            statuses[result.status] += 1
            assert result.status in ("ok", "lost")
            assert result.status == "lost" or result.ids.tolist()

    for epoch in range(1, POOL_ROUNDS + 1):
        with child(_serve, address, epoch, epoch) as process:
            client = RingClient(address, "client", doorbell=doorbell, timeout_ms=60_000, spin_us=5)
            assert client.epoch == epoch
            until = len(submitted) + rng.randrange(1, 60)
            alive = True
            while client.lost is None or client.outstanding:
                try:
                    submitted.append((epoch, client.submit(vector, SearchSpec("docs", 1, "decode"))))
                except (RingFull, PeerLost, Draining):
                    client.wait(20)
                note(epoch, client.poll())
                if alive and len(submitted) >= until:
                    process.kill()
                    alive = False
            note(epoch, client.poll())
            client.close()
    assert ends == Counter(submitted)
    assert statuses["ok"]
    assert statuses["lost"]
    assert settled() == before


def test_a_client_whose_pool_died_stays_disconnected_and_a_new_one_attaches_to_the_next_pool() -> None:
    address = endpoint()
    before = settled()
    with child(_serve, address, 1, 1) as process:
        client = RingClient(address, "client", timeout_ms=60_000)
        process.kill()
        process.join(60)
        while client.lost is None:
            client.wait(20)
        for _ in range(3):
            with pytest.raises(AttachTimeout):
                RingClient(address, "client", timeout_ms=10)
            with pytest.raises(PeerLost, match="died"):
                client.submit(np.ones(DIM), SearchSpec("docs", 1, "prefill"))
        client.close()
    with child(_serve, address, 2, 2), RingClient(address, "client", timeout_ms=60_000) as client:
        client.submit(np.ones(DIM), SearchSpec("docs", 1, "prefill"))
        assert client.wait(60_000)
        assert [result.status for result in client.poll()] == ["ok"]
    assert settled() == before


def _die_before_sending(address: str) -> None:
    client = RingClient(address, "torn", timeout_ms=60_000)
    client.submit(np.ones(DIM), SearchSpec("docs", 1, "prefill"))
    ring = client.attachment.requests
    slot = ring.loan()
    ring.payload(np.float32, 0, DIM)[slot, :5] = 7
    packed = PARAMETERS.pack(1, 0, 0, 0, 1, 0, 8, 1, 0, DIM, 0)
    REQUEST_HEADER.pack_into(ring.view, ring.header_offsets[slot], 2, 0, 0, packed)
    os._exit(1)


def test_a_slot_whose_writer_died_is_never_received() -> None:
    with RingServer(endpoint(), {"docs": DIM}, epoch=1, ring_slots=SLOTS) as server:
        received = []
        with child(_die_before_sending, server.endpoint) as process:
            while process.is_alive() or server.client_count:
                server.wait(20)
                received += server.receive()
        assert [request.request_id for request in received] in ([1], [])
