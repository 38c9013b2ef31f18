"""Tests of the ring: against a queue as its model, with hostile shared words, and across two processes."""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import InvalidArgument, ProtocolViolation, RingConsumer, RingFull, RingLayout, RingProducer, format_ring
from ipc.memory.shared import MemoryReference, SharedMemory
from ipc.native.atomics import RingHeader
from ipc.native.records import offset_of
from ipc.ring.doorbell import EventfdBell, FdMailbox, send_fds
from ipc.ring.ring import CLOSED, MAX_EPOCH, MAX_PAYLOAD_BYTES, MAX_SLOTS, OPEN, Watch
from runtime.testing.waiting import until
from tests.ipc.processes import child, readable, succeeded

EPOCH = 3
_SLEEPING = offset_of(RingHeader, "sleeping")


def make(slots: int, payload_bytes: int = 16) -> tuple[memoryview, RingLayout]:
    layout = RingLayout(slots, payload_bytes)
    view = memoryview(bytearray(layout.size))
    format_ring(view, layout, EPOCH)
    return view, layout


def ends(slots: int, payload_bytes: int = 16) -> tuple[RingProducer, RingConsumer]:
    view, layout = make(slots, payload_bytes)
    return RingProducer(view, layout, EPOCH), RingConsumer(view, layout, EPOCH)


Operations = st.lists(st.tuples(st.sampled_from(["send", "take"]), st.integers(1, 9)), max_size=60)


@settings(max_examples=100)
@given(slots=st.integers(1, 8), operations=Operations)
def test_messages_are_received_once_in_order_and_never_overwritten(
    slots: int, operations: list[tuple[str, int]]
) -> None:
    producer, consumer = ends(slots)
    written, read = producer.payload(np.int64, 0, 2), consumer.payload(np.int64, 0, 2)
    model: deque[int] = deque()
    sent = 0
    for operation, count in operations:
        if operation == "send":
            for _ in range(count):
                if len(model) == slots:
                    with pytest.raises(RingFull, match=str(slots)):
                        producer.loan()
                    code = producer.send_row(np.zeros(1, np.float32), 0, 0, 0, 0, 0, 0)
                    assert isinstance(producer.send_error(code), RingFull)
                    assert producer.free() == 0
                else:
                    slot = producer.loan()
                    written[slot] = (sent, -sent)
                    producer.send()
                    model.append(sent)
                    sent += 1
        else:
            ready = consumer.ready(count)
            first = consumer.first
            assert ready == min(count, len(model), slots - first)
            for slot in range(first, first + ready):
                value = model.popleft()
                assert read[slot].tolist() == [value, -value]
            consumer.release(ready)
    assert producer.free() == slots - len(model)
    assert producer.position == sent
    assert producer.position - consumer.position == len(model)


@settings(max_examples=100)
@given(batches=st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_a_batch_becomes_visible_as_single_sends_would(batches: list[int]) -> None:
    producer, consumer = ends(5, 8)
    written, read = producer.payload(np.int64, 0, 1)[:, 0], consumer.payload(np.int64, 0, 1)[:, 0]
    sent = received = 0
    for count in batches:
        room = min(count, producer.free())
        for i in range(room):
            written[(producer.position + i) % 5] = sent + i
        producer.send(room)
        sent += room
        while ready := consumer.ready(5):
            assert read[consumer.first : consumer.first + ready].tolist() == list(range(received, received + ready))
            received += ready
            consumer.release(ready)
    assert received == sent


def test_a_slot_that_is_filled_but_not_sent_is_invisible() -> None:
    producer, consumer = ends(4)
    producer.payload(np.int64, 0, 2)[producer.loan()] = 7
    assert consumer.ready(4) == 0
    producer.send()
    assert consumer.ready(4) == 1


@given(sent=st.integers(0, 4), data=st.data())
def test_a_reader_position_before_the_last_one_or_behind_what_was_sent_is_rejected(
    sent: int, data: st.DataObject
) -> None:
    view, layout = make(4)
    producer, consumer = RingProducer(view, layout, EPOCH), RingConsumer(view, layout, EPOCH)
    producer.send(sent)
    consumer.release(released := data.draw(st.integers(0, consumer.ready(4))))
    assert producer.free() == 4 - sent + released
    below, above = st.integers(-(1 << 63), released - 1), st.integers(sent + 1, (1 << 63) - 1)
    view[128:136].cast("q")[0] = position = data.draw(below | above)
    with pytest.raises(ProtocolViolation, match=f"{position} is not within {released}..{sent}"):
        producer.free()


@given(garbage=st.binary(min_size=64, max_size=64))
def test_a_corrupted_slot_sequence_exposes_at_most_that_slot(garbage: bytes) -> None:
    view, layout = make(4)
    consumer = RingConsumer(view, layout, EPOCH)
    view[512:576] = garbage
    assert consumer.ready(4) == (int.from_bytes(garbage[:8], "little", signed=True) == 1)


@given(header=st.binary(min_size=64, max_size=64))
def test_a_foreign_header_is_rejected(header: bytes) -> None:
    view, layout = make(4)
    if bytes(view[:64]) == header:
        return
    view[:64] = header
    for end in (RingProducer, RingConsumer):
        with pytest.raises(ProtocolViolation, match="foreign"):
            end(view, layout, EPOCH)


def test_a_ring_of_another_epoch_or_layout_is_rejected() -> None:
    view, layout = make(4)
    with pytest.raises(ProtocolViolation):
        RingConsumer(view, layout, EPOCH + 1)
    with pytest.raises(ProtocolViolation):
        RingConsumer(view, RingLayout(3, 16), EPOCH)
    with pytest.raises(ProtocolViolation):
        RingConsumer(view[:-64], layout, EPOCH)


@pytest.mark.parametrize(
    ("slots", "payload_bytes"), [(0, 8), (-1, 8), (MAX_SLOTS + 1, 8), (4, -1), (4, MAX_PAYLOAD_BYTES + 1)]
)
def test_hostile_layouts_are_rejected(slots: int, payload_bytes: int) -> None:
    with pytest.raises(InvalidArgument):
        RingLayout(slots, payload_bytes)


@pytest.mark.parametrize("epoch", [-1, MAX_EPOCH + 1])
def test_an_epoch_out_of_bounds_is_rejected(epoch: int) -> None:
    layout = RingLayout(1, 8)
    with pytest.raises(InvalidArgument, match=str(epoch)):
        format_ring(memoryview(bytearray(layout.size)), layout, epoch)


def test_payload_arrays_stay_within_the_slot() -> None:
    producer, _ = ends(4, 16)
    with pytest.raises(InvalidArgument, match="16 payload bytes"):
        producer.payload(np.int64, 8, 2)


def test_states_are_exchanged_and_an_invalid_one_is_rejected() -> None:
    view, layout = make(4)
    producer, consumer = RingProducer(view, layout, EPOCH), RingConsumer(view, layout, EPOCH)
    assert (producer.consumer_state, consumer.producer_state) == (OPEN, OPEN)
    consumer.set_state(CLOSED)
    producer.close()
    assert (producer.consumer_state, consumer.producer_state) == (CLOSED, CLOSED)
    view[320:328].cast("q")[0] = 99
    with pytest.raises(ProtocolViolation, match="99"):
        _ = consumer.producer_state


def test_a_watch_finds_messages_and_rings_only_a_sleeper() -> None:
    pairs = [ends(4) for _ in range(3)]
    watch = Watch([consumer for _, consumer in pairs])
    assert watch.spin(1000) == -1
    assert not pairs[2][0].send()
    assert not pairs[0][0].send()
    assert watch.spin(0) >= 0
    assert not watch.arm()
    watch.disarm()
    for producer, consumer in pairs:
        consumer.release(consumer.ready(4))
        assert not producer.send()
        consumer.release(consumer.ready(4))
    assert watch.arm()
    assert pairs[1][0].send()
    assert not pairs[1][0].send()
    watch.disarm()
    assert watch.spin(0) >= 0


def test_an_empty_watch_never_has_messages() -> None:
    watch = Watch([])
    assert watch.spin(0) == -1
    assert watch.arm()
    watch.disarm()


def test_a_send_rings_a_sleeper_with_a_known_eventfd() -> None:
    producer, consumer = ends(4)
    watch, bell = Watch([consumer]), EventfdBell()
    producer.ring_with(bell.fileno())
    for awake in range(2):
        assert not producer.send(), "the caller has nothing to ring"
        assert producer.rung == awake
        consumer.release(1)
        assert watch.arm()
        assert not readable(bell, 0)
        assert not producer.send()
        assert readable(bell, 0)
        bell.silence()
        watch.disarm()
        consumer.release(1)
    bell.close()


def test_a_watch_sleeps_until_its_timeout_or_a_message() -> None:
    producer, consumer = ends(4)
    watch, bell = Watch([consumer]), EventfdBell()
    producer.ring_with(bell.fileno())
    assert not watch.sleep(bell.fileno(), 0)
    assert not watch.sleep(bell.fileno(), 1)
    with ThreadPoolExecutor(1) as thread:
        news = thread.submit(watch.sleep, bell.fileno(), 60_000_000_000)
        until(lambda: producer.view[_SLEEPING])
        producer.send()
        assert news.result(60)
    assert not producer.view[_SLEEPING]
    assert watch.sleep(-1, 60_000_000_000), "there are messages already"
    consumer.release(1)
    bell.ring()
    assert not watch.sleep(bell.fileno(), 60_000_000_000), "woken for another reason"
    bell.close()


STREAM = 30_000
STREAM_LAYOUT = RingLayout(16, 512)


def _produce(reference: MemoryReference, mailbox: str) -> None:
    bell = EventfdBell()
    send_fds(mailbox, b"bell", [bell.fileno()])
    rng = np.random.default_rng(1)
    with SharedMemory.open(reference, max_size=1 << 20, writable=True) as memory:
        producer = RingProducer(memory.view, STREAM_LAYOUT, EPOCH)
        payload = producer.payload(np.int64, 0, 64)
        pauses = rng.integers(0, 200, STREAM)
        for i in range(STREAM):
            while producer.free() == 0:
                os.sched_yield()
            payload[producer.loan()] = i
            if producer.send():
                bell.ring()
            for _ in range(pauses[i] if i % 16 == 0 else 0):
                pass


def test_two_processes_lose_no_wake_up_and_read_no_torn_message() -> None:
    """The consumer sleeps whenever the ring is empty, with a timeout that only a lost wake-up can reach."""
    with SharedMemory.create("test", STREAM_LAYOUT.size) as memory:
        format_ring(memory.view, STREAM_LAYOUT, EPOCH)
        consumer = RingConsumer(memory.view, STREAM_LAYOUT, EPOCH)
        watch = Watch([consumer])
        payload = consumer.payload(np.int64, 0, 64)
        mailbox = FdMailbox()
        with child(_produce, memory.reference, mailbox.name) as process:
            bell = EventfdBell(mailbox.receive(b"bell", 1, 10_000)[0])
            received = 0
            while received < STREAM:
                ready = consumer.ready(16)
                for slot in range(consumer.first, consumer.first + ready):
                    assert (payload[slot] == received).all()
                    received += 1
                consumer.release(ready)
                if ready == 0 and watch.arm():
                    assert readable(bell, 60_000), "a wake-up was lost"
                watch.disarm()
                bell.silence()
            bell.close()
            assert succeeded(process)
        mailbox.close()
