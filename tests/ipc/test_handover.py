"""Tests of the KV hand-over: offers, pulls, answers, and the death of either side.

Every test runs with the payload in host memory and in GPU memory (faked, see `fake_cuda`).
"""

import numpy as np
import pytest

from ipc import HandoverSink, HandoverSource, KvArena, Offer, Outcome, PeerLost
from ipc.handover.sink import RENEW_NS
from tests.ipc.handovers import (
    SLOT_BYTES,
    SLOTS,
    SOON_MS,
    address,
    content,
    fill,
    make_arena,
    open_device,
    outcomes,
    receive,
)
from tests.ipc.processes import child


def test_a_slot_is_offered_pulled_and_acknowledged(arena: KvArena, source: HandoverSource, sink: HandoverSink) -> None:
    fill(arena, 2, 9)
    offer_id = source.offer(sink.endpoint, 2, b"tokens")
    (offer,) = receive(sink)
    assert (offer.source, offer.slot, offer.generation, offer.payload) == ("prefill-0", 2, 1, b"tokens")
    assert content(sink, offer) == bytes([9]) * SLOT_BYTES
    assert sink.is_current(offer)
    assert sink.acknowledge(offer)
    assert outcomes(source) == [Outcome(offer_id, 2, True, "")]
    assert not sink.acknowledge(offer)
    assert not sink.reject(offer, "late")
    assert source.poll() == []


def test_a_rejection_reaches_the_source_with_its_reason(source: HandoverSource, sink: HandoverSink) -> None:
    offer_id = source.offer(sink.endpoint, 0, b"")
    (offer,) = receive(sink)
    sink.reject(offer, "no free slot")
    assert outcomes(source) == [Outcome(offer_id, 0, False, "no free slot")]
    assert source.counts["rejected"] == 1


@pytest.mark.parametrize("kind", ["host"], indirect=True)  # CUDA maps what it opens for writing, too
def test_the_puller_cannot_write_into_the_arena(source: HandoverSource, sink: HandoverSink) -> None:
    source.offer(sink.endpoint, 0, b"")
    (offer,) = receive(sink)
    assert sink.memory(offer).readonly
    with pytest.raises(TypeError):
        sink.memory(offer)[0] = 1


def test_the_written_length_of_a_slot_is_visible_and_resets_with_new_content(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    for slot in (1, 2):
        arena.begin(slot)
        source.offer(sink.endpoint, slot, b"")
    found: list[Offer] = []
    while len(found) < 2:
        found += receive(sink)
    one, other = found
    assert (sink.written(one), sink.written(other)) == (0, 0)
    source.set_written(2, 40)
    assert (sink.written(one), sink.written(other)) == (0, 40)
    arena.begin(2)
    assert sink.written(other) == 0


def test_a_copy_torn_by_a_new_begin_is_detected(arena: KvArena, source: HandoverSource, sink: HandoverSink) -> None:
    fill(arena, 1, 5)
    source.offer(sink.endpoint, 1, b"")
    (offer,) = receive(sink)
    half = content(sink, offer, end=SLOT_BYTES // 2)
    fill(arena, 1, 6)
    copied = half + content(sink, offer, begin=SLOT_BYTES // 2)
    assert len(set(copied)) == 2
    assert not sink.is_current(offer)


def test_an_offer_of_an_overwritten_slot_is_rejected_on_arrival(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    offer_id = source.offer(sink.endpoint, 1, b"")
    arena.begin(1)
    assert receive(sink) == []
    (outcome,) = outcomes(source)
    assert (outcome.offer_id, outcome.accepted) == (offer_id, False)
    assert "was rewritten" in outcome.reason


def test_a_withdrawn_offer_is_not_received_and_has_no_outcome(source: HandoverSource, sink: HandoverSink) -> None:
    offer_id = source.offer(sink.endpoint, 0, b"")
    assert source.withdraw(offer_id)
    assert not source.withdraw(offer_id)
    kept = source.offer(sink.endpoint, 1, b"")
    received: list[Offer] = []
    while not received:
        received = receive(sink)
    assert [offer.offer_id for offer in received] == [kept]
    sink.acknowledge(received[0])
    assert [outcome.offer_id for outcome in outcomes(source)] == [kept]


def test_an_offer_withdrawn_during_its_pull_is_no_longer_current(source: HandoverSource, sink: HandoverSink) -> None:
    offer_id = source.offer(sink.endpoint, 0, b"")
    (offer,) = receive(sink)
    source.withdraw(offer_id)
    assert receive(sink) == []
    assert not sink.is_current(offer)
    assert not sink.acknowledge(offer)


def test_an_unanswered_offer_expires(arena: KvArena, sink: HandoverSink) -> None:
    with HandoverSource("prefill-0", arena, lease_ms=1) as source:
        offer_id = source.offer(sink.endpoint, 0, b"")
        assert outcomes(source) == [Outcome(offer_id, 0, False, "expired")]


def test_a_lease_is_renewed_while_the_sink_lives_and_holds_the_offer(arena: KvArena) -> None:
    now_ns = [0]
    with (
        HandoverSource("prefill-0", arena, lease_ms=30_000, clock=lambda: now_ns[0]) as source,
        HandoverSink(address(), open_device, clock=lambda: now_ns[0]) as sink,
    ):
        first, second = (source.offer(sink.endpoint, slot, b"") for slot in (0, 1))
        offers: list[Offer] = []
        while len(offers) < 2:
            offers += receive(sink)
        for _ in range(20):  # it waits for free blocks for two minutes
            now_ns[0] += RENEW_NS
            sink.receive()
            assert source.socket.poll(SOON_MS)
            assert source.poll() == []
        sink.acknowledge(offers[0])
        assert outcomes(source) == [Outcome(first, 0, True, "")]
        now_ns[0] += 29 * 10**9  # the sink is blocked
        assert source.poll() == []
        now_ns[0] += 10**9
        assert source.poll() == [Outcome(second, 1, False, "expired")]
        assert source.counts["expired"] == 1


def test_an_answer_after_the_lease_expired_is_ignored(arena: KvArena, sink: HandoverSink) -> None:
    with HandoverSource("prefill-0", arena, lease_ms=1) as source:
        source.offer(sink.endpoint, 0, b"")
        (offer,) = receive(sink)
        assert len(outcomes(source)) == 1
        sink.acknowledge(offer)
        source.socket.poll(SOON_MS)
        assert source.poll() == []


def _receive_and_hang(endpoint: str) -> None:
    with HandoverSink(endpoint, open_device) as sink:
        receive(sink)
        sink.socket.poll()  # forever


def test_offers_to_a_killed_decode_process_end_as_lost(arena: KvArena) -> None:
    endpoint = address()
    with HandoverSource("prefill-0", arena) as source, child(_receive_and_hang, endpoint) as process:
        offer_id = source.offer(endpoint, 1, b"")
        assert source.socket.poll(SOON_MS)  # it has received the offer
        assert source.poll() == []
        process.kill()
        process.join(60)
        assert outcomes(source) == [Outcome(offer_id, 1, False, "lost")]


def _pull_and_hang(endpoint: str) -> None:
    with HandoverSink(endpoint, open_device) as sink:
        sink.acknowledge(receive(sink)[0])
        sink.socket.poll()  # forever


def test_a_restarted_sink_is_not_affected_by_its_predecessors_death(arena: KvArena) -> None:
    endpoint = address()
    with HandoverSource("prefill-0", arena) as source:
        with child(_pull_and_hang, endpoint) as process:
            source.offer(endpoint, 0, b"")
            assert [outcome.accepted for outcome in outcomes(source)] == [True]
            process.kill()
            process.join(60)
        with HandoverSink(endpoint, open_device) as sink:
            offer_id = source.offer(endpoint, 1, b"")
            assert source.poll() == []
            sink.acknowledge(receive(sink)[0])
            assert outcomes(source) == [Outcome(offer_id, 1, True, "")]


def _offer_and_hang(endpoint: str, kind: str) -> None:
    arena = make_arena(kind, epoch=1)
    fill(arena, 3, 8)
    with HandoverSource("prefill-9", arena) as source:
        source.offer(endpoint, 3, b"")
        while True:
            source.poll()
            source.socket.poll()


@pytest.mark.parametrize("kind", ["GPU"], indirect=True)
def test_gpu_memory_of_a_killed_prefill_process_is_no_longer_current(sink: HandoverSink, kind: str) -> None:
    """CUDA does not define its contents then, so a copy in flight is void, and no new one starts."""
    with child(_offer_and_hang, sink.endpoint, kind) as process:
        (offer,) = receive(sink)
        assert content(sink, offer) == bytes([8]) * SLOT_BYTES
        assert sink.is_current(offer)
        process.kill()
        process.join(60)
    assert not sink.is_current(offer)
    assert sink.reject(offer, "its owner is gone")
    sink.receive()
    assert not sink.arenas
    with pytest.raises(PeerLost, match="gone"):
        sink.device_memory(offer)


@pytest.mark.parametrize("kind", ["host"], indirect=True)
def test_offers_of_a_killed_prefill_process_can_still_be_pulled(sink: HandoverSink, kind: str) -> None:
    with child(_offer_and_hang, sink.endpoint, kind) as process:
        (offer,) = receive(sink)
        process.kill()
        process.join(60)
    sink.receive()
    assert content(sink, offer) == bytes([8]) * SLOT_BYTES
    assert sink.is_current(offer)
    sink.acknowledge(offer)
    sink.receive()
    assert not sink.arenas
    with pytest.raises(PeerLost, match="gone"):
        sink.memory(offer)


def _pull(endpoint: str, count: int) -> None:
    with HandoverSink(endpoint, open_device) as sink:
        done = 0
        while done < count:
            for offer in receive(sink):
                copy = content(sink, offer)
                if sink.is_current(offer):
                    assert copy == bytes([offer.payload[0]]) * SLOT_BYTES, "a torn copy was accepted as current"
                    sink.acknowledge(offer)
                else:
                    sink.reject(offer, "torn")
                done += 1
        while sink.socket.poll(SOON_MS):  # until the source says stop
            if any(offer.payload == b"end" for offer in sink.receive()):
                return


def test_a_puller_in_another_process_never_accepts_a_torn_copy(arena: KvArena, source: HandoverSource) -> None:
    """The source violates the protocol and rewrites slots at random while they are pulled."""
    rng = np.random.default_rng(4)
    endpoint, count = address(), 400
    accepted = torn = refused = 0
    with child(_pull, endpoint, count) as process:
        offered = 0
        while accepted + torn + refused < count:
            if offered < count:
                slot = offered % SLOTS
                fill(arena, slot, offered % 251)
                source.offer(endpoint, slot, bytes([offered % 251]))
                offered += 1
                for _ in range(int(rng.integers(0, 3))):
                    source.socket.poll(1)
            for outcome in source.poll():
                accepted += outcome.accepted
                torn += outcome.reason == "torn"
                refused += "was rewritten" in outcome.reason
            if refused:
                count -= refused  # it never receives these
                break
        while accepted + torn + refused < offered:
            for outcome in outcomes(source):
                accepted += outcome.accepted
                torn += outcome.reason == "torn"
                refused += "was rewritten" in outcome.reason
        process.kill()
    assert accepted + torn + refused == offered
    assert accepted


@pytest.mark.parametrize("kind", ["GPU"], indirect=True)
def test_a_decode_worker_without_a_gpu_rejects_offers_in_gpu_memory(source: HandoverSource) -> None:
    with HandoverSink(address()) as sink:
        offer_id = source.offer(sink.endpoint, 0, b"")
        assert receive(sink) == []
        (outcome,) = outcomes(source)
        assert (outcome.offer_id, outcome.accepted) == (offer_id, False)
        assert "this one has no GPU" in outcome.reason
