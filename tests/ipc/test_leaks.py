"""Closing releases all resources of a hand-over."""

from ipc import HandoverSink, HandoverSource, KvArena, new_token, private_endpoint
from tests.ipc.leaks import settled


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
