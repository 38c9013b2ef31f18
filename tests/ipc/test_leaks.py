"""Tests that closing releases all resources; each leak check is verified by leaking once."""

import gc
import os

import pytest

from ipc import HandoverSink, HandoverSource, KvArena, SearchSpec, SharedMemory, new_token, private_endpoint
from tests.ipc.leaks import Holdings, settled
from tests.ipc.processes import attach, endpoint
from tests.ipc.ring_server import RingServer


@pytest.mark.parametrize("doorbell", ["eventfd", "zeromq"])
def test_sessions_leak_nothing(doorbell: str) -> None:
    def session() -> None:
        with RingServer(endpoint(), {"docs": 4}, epoch=1) as server:
            with attach(server, doorbell=doorbell) as client:
                client.submit([1, 2, 3, 4], SearchSpec("docs", 1, "prefill"))
            server.wait(1)
            attach(server, doorbell=doorbell).close()

    session()
    before = settled()
    for _ in range(20):
        session()
    assert settled() == before


def test_hand_overs_leak_nothing() -> None:
    def hand_over() -> None:
        arena = KvArena.create(2, 100, epoch=1)
        sink = HandoverSink(private_endpoint(new_token(), "sink"))
        with sink, HandoverSource("source", arena) as source:
            source.offer(sink.endpoint, 0, b"")
            assert sink.socket.poll(60_000)
            (offer,) = sink.receive()
            sink.acknowledge(offer)
            assert source.socket.poll(60_000)
        arena.close()

    hand_over()
    before = settled()
    for _ in range(20):
        hand_over()
    assert settled() == before


def test_the_check_detects_a_leaked_descriptor() -> None:
    before = Holdings.now()
    fd = os.eventfd(0)
    assert Holdings.now() != before
    os.close(fd)
    assert Holdings.now() == before


def test_the_check_detects_leaked_memory_even_with_its_descriptor_closed() -> None:
    before = Holdings.now()
    memory = SharedMemory.create("trinity-leak", 4096)
    kept = memory.view[:1]
    memory.close()
    assert Holdings.now().memfds == before.memfds + 1
    kept.release()
    del memory, kept
    gc.collect()
    assert Holdings.now() == before
