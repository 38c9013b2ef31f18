"""Tests of offers, answers and arenas that no correct peer sends, with payloads in host and in GPU memory."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from ipc import (
    HandoverSink,
    HandoverSource,
    InvalidArgument,
    KvArena,
    MemoryReference,
    Offer,
    Outcome,
    SharedMemory,
    connect,
    send_now,
)
from ipc.handover.messages import MAX_PAYLOAD_BYTES, Ended, Seen, encode
from ipc.memory.device import CudaReference
from tests.ipc.handovers import SLOT_BYTES, SLOTS, outcomes, receive


def offered(source: HandoverSource, owner: KvArena, **changes: Any) -> bytes:
    fields = {
        "offer_id": 1,
        "source": "x",
        "reply": source.endpoint,
        "epoch": 3,
        "slot": 0,
        "generation": 0,
        "arena": owner.memory.reference,
        "payload": b"",
        "device": owner.device_reference,
    }
    return encode(Offer(**{**fields, **changes}))


def assert_dropped(sink: HandoverSink, *messages: bytes) -> None:
    """Send these messages one by one: `receive` returns no offer for any."""
    with connect(zmq.PUSH, sink.endpoint, max_message_bytes=4096) as hostile:
        for message in messages:
            hostile.send(message)
            assert receive(sink) == []


def _reference(arena: KvArena, **changes: int) -> MemoryReference:
    return msgspec.structs.replace(arena.memory.reference, **changes)


HOSTILE: list[tuple[str, Callable[[KvArena], dict[str, Any]]]] = [
    ("slot 4", lambda _: {"slot": 4}),
    ("slot -1", lambda _: {"slot": -1}),
    ("epoch 2", lambda _: {"epoch": 2}),
    ("was rewritten", lambda _: {"generation": 7}),
    ("size", lambda arena: {"arena": _reference(arena, size=1 << 60)}),
    ("another memory", lambda arena: {"arena": _reference(arena, inode=1)}),
]


@pytest.mark.parametrize(("words", "changes"), HOSTILE, ids=[words for words, _ in HOSTILE])
def test_an_offer_with_hostile_numbers_is_rejected(
    arena: KvArena,
    source: HandoverSource,
    sink: HandoverSink,
    words: str,
    changes: Callable[[KvArena], dict[str, Any]],
) -> None:
    assert_dropped(sink, offered(source, arena, **changes(arena)))
    assert sink.refused == 1
    source.offer(sink.endpoint, 0, b"")
    assert len(receive(sink)) == 1


def test_an_offer_whose_header_and_message_disagree_on_the_payloads_address_is_rejected(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    elsewhere = CudaReference(1, "cuda:0", bytes(64), 9)
    devices = [elsewhere] if arena.device_reference is None else [elsewhere, None]
    assert_dropped(sink, *(offered(source, arena, device=device) for device in devices))
    assert sink.refused == len(devices)


@pytest.mark.parametrize("kind", ["GPU"], indirect=True)
def test_an_invalid_handle_is_rejected_and_nothing_stays_mapped(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    forged = CudaReference(1, "cuda:0", bytes(64), SLOTS * SLOT_BYTES)
    assert_dropped(sink, offered(source, arena, device=forged))
    assert (sink.refused, len(sink.arenas)) == (1, 0)


def test_a_sealed_memfd_that_is_not_an_arena_is_rejected(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    for size in (8, 4096):
        with SharedMemory.create("test", size) as memory:
            assert_dropped(sink, offered(source, arena, arena=memory.reference))
    assert sink.refused == 2
    assert not sink.arenas


@pytest.mark.parametrize("word", range(6))
@pytest.mark.parametrize("value", [-1, 0, 1 << 62])
def test_an_arena_with_a_hostile_header_is_rejected(
    arena: KvArena, source: HandoverSource, sink: HandoverSink, word: int, value: int
) -> None:
    header = arena.memory.view[:64].cast("q")
    header[word] = value if header[word] != value else 1  # a payload in GPU memory has 0 as its offset
    assert_dropped(sink, offered(source, arena))
    assert sink.refused == 1


NOT_UTF8 = encode(Ended(1, True, "reason")).replace(b"reason", b"rea\xffon")


@pytest.mark.parametrize(
    "message", [b"", b"\xc1", b"x" * 100, NOT_UTF8, encode(Seen(1, 1)), encode(Ended(1, True, ""))]
)
def test_a_sink_counts_and_drops_malformed_messages(source: HandoverSource, sink: HandoverSink, message: bytes) -> None:
    assert_dropped(sink, message)
    assert sink.malformed == 1


def test_an_offer_with_a_network_reply_address_is_dropped(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    assert_dropped(sink, offered(source, arena, reply="tcp://127.0.0.1:1"))
    assert sink.malformed == 1


def test_a_source_drops_malformed_messages_and_unexpected_answers(source: HandoverSource, sink: HandoverSink) -> None:
    offer_id = source.offer(sink.endpoint, 0, b"")
    (offer,) = receive(sink)
    with connect(zmq.PUSH, source.endpoint, max_message_bytes=4096) as hostile:
        for message in (b"\xc1", encode(Ended(99, True, "")), encode(Seen(99, 1)), encode(Seen(offer_id, 1))):
            assert send_now(hostile, message)
        sink.acknowledge(offer)
        assert outcomes(source) == [Outcome(offer_id, 0, True, "")]


@pytest.mark.parametrize(
    ("slots", "payload_bytes", "epoch"), [(0, 8, 0), (1 << 30, 8, 0), (1, 0, 0), (1, 1 << 60, 0), (1, 8, -1)]
)
def test_invalid_arena_parameters_are_rejected(slots: int, payload_bytes: int, epoch: int) -> None:
    with pytest.raises(InvalidArgument):
        KvArena.create(slots, payload_bytes, epoch)


def test_an_invalid_offer_is_rejected(source: HandoverSource, arena: KvArena, sink: HandoverSink) -> None:
    for slot in (-1, SLOTS):
        with pytest.raises(InvalidArgument, match=str(slot)):
            source.offer(sink.endpoint, slot, b"")
        with pytest.raises(InvalidArgument, match=str(slot)):
            arena.begin(slot)
    with pytest.raises(InvalidArgument, match=str(MAX_PAYLOAD_BYTES)):
        source.offer(sink.endpoint, 0, b"x" * (MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(InvalidArgument):
        source.offer("tcp://127.0.0.1:1", 0, b"")
    assert source.counts["offered"] == 0
