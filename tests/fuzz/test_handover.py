"""Fuzz tests of the hand-over: any message and any arena is accepted or rejected without affecting others."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import event, given
from hypothesis import strategies as st

from ipc import (
    AttachTimeout,
    HandoverSink,
    HandoverSource,
    KvArena,
    Offer,
    connect,
)
from ipc.ring.doorbell import FdMailbox
from tests.fuzz.budget import fuzzed
from tests.fuzz.peers import OWN, SMALL, VALUES, WORDS, fits, packed, scribbles
from tests.ipc.handovers import SLOT_BYTES, address, open_device, receive
from tests.ipc.test_handover_hostile import offered

# ---- the hand-over


OFFER: dict[str, st.SearchStrategy[Any]] = {
    "offer_id": WORDS | VALUES,
    "source": VALUES,
    "reply": st.sampled_from(["", "tcp://127.0.0.1:1", "ipc:///tmp/x", "ipc://@" + "y" * 300, "a\0b"]) | VALUES,
    "epoch": SMALL | VALUES,
    "slot": SMALL | VALUES,
    "generation": SMALL | VALUES,
    "arena": VALUES,
    "payload": VALUES,
    "device": VALUES,
    "watched": VALUES,
}


@pytest.fixture(scope="module")
def kv() -> Iterator[tuple[KvArena, HandoverSource]]:
    arena = KvArena.create(4, 4 * SLOT_BYTES, epoch=3)
    with HandoverSource("prefill-0", arena) as source:
        yield arena, source
    arena.close()


@pytest.fixture(scope="module")
def sink() -> Iterator[HandoverSink]:
    with HandoverSink(address(), open_device) as made:
        yield made


def expect_handed_over(source: HandoverSource, sink: HandoverSink) -> None:
    offer_id = source.offer(sink.endpoint, 0, b"kv")
    found: list[Offer] = []
    while not found:
        found = [offer for offer in receive(sink) if offer.offer_id == offer_id and offer.source == "prefill-0"]
    sink.acknowledge(found[0])
    ended: list[Any] = []
    while not ended:
        source.socket.poll(20)
        ended = [outcome for outcome in source.poll() if outcome.offer_id == offer_id]
    assert ended[0].accepted


@fuzzed()
@given(
    changes=st.lists(st.sampled_from(sorted(OFFER)).flatmap(lambda n: st.tuples(st.just(n), OFFER[n])), max_size=3),
    memory=st.none() | st.tuples(st.sampled_from(["pid", "fd", "size", "inode"]), WORDS | SMALL),
    cut=st.none() | st.tuples(st.integers(0, 200), st.integers(0, 9), st.binary(max_size=9)),
)
def test_any_offer_is_accepted_or_rejected_and_others_continue(
    kv: tuple[KvArena, HandoverSource],
    changes: list[tuple[str, Any]],
    memory: tuple[str, int] | None,
    cut: tuple[int, int, bytes] | None,
) -> None:
    arena, source = kv
    fields = msgspec.msgpack.decode(offered(source, arena, offer_id=1 << 40))
    fields["source"] = "hostile"
    if memory is not None:
        fields["arena"][memory[0]] = memory[1]
    fields |= {name: value for name, value in changes if fits(value)}
    message = msgspec.msgpack.encode(fields)
    if cut is not None:
        at = cut[0] % len(message)
        message = message[:at] + cut[2] + message[at + cut[1] :]
    # A sink keeps every address it has received, up to a limit that is not tested here.
    with HandoverSink(address(), open_device) as sink, HandoverSource("prefill-0", arena) as honest:
        with connect(zmq.PUSH, sink.endpoint, max_message_bytes=1 << 20) as hostile:
            hostile.send(message)
            for offer in receive(sink):
                event("taken")
                sink.memory(offer)
                sink.is_current(offer)
                sink.acknowledge(offer)
        expect_handed_over(honest, sink)


@fuzzed(0.5)
@given(writes=scribbles(), slot=st.integers(0, 3))
def test_any_arena_is_mapped_or_rejected_and_others_continue(
    kv: tuple[KvArena, HandoverSource], writes: list[Callable[[memoryview], None]], slot: int
) -> None:
    with HandoverSink(address(), open_device) as sink:
        hostile = KvArena.create(4, 4 * SLOT_BYTES, epoch=3)
        with HandoverSource("hostile", hostile) as source:
            for number, write in enumerate([lambda view: None, *writes]):
                write(hostile.memory.view)
                source.offer(sink.endpoint, slot, b"")
                for offer in receive(sink):
                    event(f"taken after {number}")
                    assert len(sink.memory(offer)) <= hostile.memory.size
                    bytes(sink.memory(offer)[:64])
                    sink.is_current(offer)
                    sink.acknowledge(offer)
        with HandoverSource("prefill-0", kv[0]) as honest:
            expect_handed_over(honest, sink)
        hostile.close()


@fuzzed()
@given(
    said=st.fixed_dictionaries(
        {
            "type": st.sampled_from(["Seen", "Ended"]),
            "offer_id": st.just(1 << 41) | VALUES.filter(lambda value: not isinstance(value, int)),
        },
        optional={
            "pid": st.sampled_from([1, OWN, -1, 1 << 31]) | VALUES,
            "accepted": VALUES | st.booleans(),
            "reason": VALUES,
        },
    ),
    cut=st.none() | st.tuples(st.integers(0, 200), st.integers(0, 9), st.binary(max_size=9)),
)
def test_any_answer_to_a_source_is_accepted_or_dropped(
    kv: tuple[KvArena, HandoverSource], sink: HandoverSink, said: dict[str, Any], cut: tuple[int, int, bytes] | None
) -> None:
    _, source = kv
    message = packed(said)
    if cut is not None:
        at = cut[0] % len(message)
        message = message[:at] + cut[2] + message[at + cut[1] :]
    with connect(zmq.PUSH, source.endpoint, max_message_bytes=4096) as hostile:
        hostile.send(message)
        assert source.socket.poll(60_000)
        assert source.poll() == []
    expect_handed_over(source, sink)


def test_a_mailbox_accepts_only_expected_messages() -> None:
    with closing(FdMailbox()) as mailbox, closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as sender:
        for content in (b"", b"token", b"x" * 5000):
            sender.sendto(content, "\0" + mailbox.name)
        with pytest.raises(AttachTimeout):
            mailbox.receive(b"token", 2, 1.0)
