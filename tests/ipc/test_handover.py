"""The KV hand-over: offers, pulls, answers, and what happens when either side goes away or lies.

Every test runs over both memories that a payload can lie in: the host's, and a GPU's (a stand-in, see `fake_cuda`).
"""

import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
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
    PeerLost,
    SharedMemory,
    connect,
    new_token,
    private_endpoint,
    send_now,
)
from ipc.arena import MappedArena
from ipc.device_memory import CudaReference, DeviceMemory
from ipc.endpoints import receive_all
from ipc.handover import MAX_PAYLOAD_BYTES, Ended, Seen, decode_at_source, encode
from tests.ipc.fake_cuda import FakeCuda, from_elsewhere
from tests.ipc.processes import child

SLOTS = 4
SLOT_BYTES = 1000
SOON_MS = 20_000


def make_arena(kind: str, epoch: int) -> KvArena:
    if kind == "host":
        return KvArena.create(SLOTS, SLOTS * SLOT_BYTES, epoch)
    from ipc.cuda_memory import CudaMemory

    return KvArena.create_on(CudaMemory.create(SLOTS * SLOT_BYTES, "cuda:0", FakeCuda()), SLOTS, epoch)


def open_device(reference: CudaReference) -> DeviceMemory:
    from ipc.cuda_memory import CudaMemory

    return CudaMemory.open(from_elsewhere(reference), "cuda:1", FakeCuda())


def address() -> str:
    return private_endpoint(new_token(), "decode-0")


class _ZmqReadable:
    """A ZeroMQ socket's edge-triggered descriptor made level-triggered, for tests."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket

    def wait(self) -> None:
        assert self.socket.poll(SOON_MS), "nothing came"


def receive(sink: HandoverSink) -> list[Offer]:
    """Sleep until offers come; none of them may be left."""
    _ZmqReadable(sink.socket).wait()
    return sink.receive()


def outcomes(source: HandoverSource, count: int = 1) -> list[Outcome]:
    found: list[Outcome] = []
    while len(found) < count:
        found += source.poll()
        if len(found) < count:
            source.socket.poll(20)
    return found


@pytest.fixture(params=["host", "GPU"])
def kind(request: pytest.FixtureRequest) -> str:
    """Whose memory the payload lies in."""
    if request.param == "GPU":
        pytest.importorskip("cuda.bindings.driver")
    return str(request.param)


@pytest.fixture
def arena(kind: str) -> Iterator[KvArena]:
    made = make_arena(kind, epoch=3)
    yield made
    made.close()


@pytest.fixture
def source(arena: KvArena) -> Iterator[HandoverSource]:
    with HandoverSource("prefill-0", arena) as made:
        yield made


@pytest.fixture
def sink() -> Iterator[HandoverSink]:
    with HandoverSink(address(), open_device) as made:
        yield made


def fill(arena: KvArena, slot: int, byte: int) -> None:
    arena.begin(slot)
    if arena.device is not None:
        arena.device.write(slot * SLOT_BYTES, np.full(SLOT_BYTES, byte, np.uint8))
        arena.device.flush()
    else:
        arena.payload[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytes([byte]) * SLOT_BYTES


def content(sink: HandoverSink, offer: Offer, begin: int = 0, end: int = SLOT_BYTES) -> bytes:
    """Bytes `begin:end` of the offered slot."""
    begin, end = offer.slot * SLOT_BYTES + begin, offer.slot * SLOT_BYTES + end
    if offer.device is None:
        return bytes(sink.memory(offer)[begin:end])
    found = np.zeros(end - begin, np.uint8)
    memory = sink.device_memory(offer)
    memory.read(begin, found)
    memory.flush()
    return found.tobytes()


def test_a_slot_is_offered_pulled_and_acknowledged(arena: KvArena, source: HandoverSource, sink: HandoverSink) -> None:
    fill(arena, 2, 9)
    offer_id = source.offer(sink.endpoint, 2, b"tokens")
    (offer,) = receive(sink)
    assert (offer.source, offer.slot, offer.generation, offer.payload) == ("prefill-0", 2, 1, b"tokens")
    assert content(sink, offer) == bytes([9]) * SLOT_BYTES
    assert sink.current(offer)
    assert sink.acknowledge(offer)
    assert outcomes(source) == [Outcome(offer_id, 2, True, "")]
    assert not sink.acknowledge(offer)
    assert not sink.reject(offer, "late")
    assert source.poll() == []


def test_a_rejected_offer_comes_back_with_its_reason(source: HandoverSource, sink: HandoverSink) -> None:
    offer_id = source.offer(sink.endpoint, 0, b"")
    (offer,) = receive(sink)
    sink.reject(offer, "no free slot")
    assert outcomes(source) == [Outcome(offer_id, 0, False, "no free slot")]
    assert source.statistics().rejected == 1


@pytest.mark.parametrize("kind", ["host"], indirect=True)  # CUDA maps what it opens for writing, too
def test_the_puller_cannot_write_into_the_arena(source: HandoverSource, sink: HandoverSink) -> None:
    source.offer(sink.endpoint, 0, b"")
    (offer,) = receive(sink)
    assert sink.memory(offer).readonly
    with pytest.raises(TypeError):
        sink.memory(offer)[0] = 1


def test_an_arena_is_mapped_once_for_all_its_offers(source: HandoverSource, sink: HandoverSink) -> None:
    source.offer(sink.endpoint, 0, b"")
    (first,) = receive(sink)
    source.offer(sink.endpoint, 1, b"")
    (second,) = receive(sink)
    memory = sink.memory if first.device is None else sink.device_memory
    assert memory(first) is memory(second)
    assert sink.statistics().arenas == 1


def test_the_pages_of_a_mapped_arena_are_there_before_they_are_read() -> None:
    pages = 3000
    owner = KvArena.create(1, pages * 4096, epoch=1)
    np.frombuffer(owner.payload, np.uint8)[:] = 1
    mapped = MappedArena(owner.memory.reference, epoch=1)
    if not mapped.prefault.wait(SOON_MS / 1e3):
        pytest.skip("this kernel fills no page tables ahead (before Linux 5.14)")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert int(np.frombuffer(mapped.payload, np.uint8)[::4096].sum()) == pages
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages // 64
    mapped.close()
    owner.close()


def test_a_sink_tells_a_source_who_it_is_only_until_the_source_watches_it(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    source.offer(sink.endpoint, 0, b"")
    (first,) = receive(sink)
    assert not first.watched
    assert source.socket.poll(SOON_MS)
    assert source.poll() == []
    source.offer(sink.endpoint, 1, b"")
    (second,) = receive(sink)
    assert second.watched
    sink.acknowledge(second)
    assert source.socket.poll(SOON_MS)
    assert [type(decode_at_source(frames[0])) for frames in receive_all(source.socket)] == [Ended]


def test_a_copy_torn_by_a_new_begin_is_noticed(arena: KvArena, source: HandoverSource, sink: HandoverSink) -> None:
    fill(arena, 1, 5)
    source.offer(sink.endpoint, 1, b"")
    (offer,) = receive(sink)
    half = content(sink, offer, end=SLOT_BYTES // 2)
    fill(arena, 1, 6)
    copied = half + content(sink, offer, begin=SLOT_BYTES // 2)
    assert len(set(copied)) == 2
    assert not sink.current(offer)


def test_begin_of_another_slot_disturbs_nothing(arena: KvArena, source: HandoverSource, sink: HandoverSink) -> None:
    source.offer(sink.endpoint, 1, b"")
    (offer,) = receive(sink)
    arena.begin(0)
    arena.begin(2)
    assert sink.current(offer)


def test_an_offer_of_an_overwritten_slot_is_rejected_before_anyone_sees_it(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    offer_id = source.offer(sink.endpoint, 1, b"")
    arena.begin(1)
    assert receive(sink) == []
    (outcome,) = outcomes(source)
    assert (outcome.offer_id, outcome.accepted) == (offer_id, False)
    assert "begun anew" in outcome.reason


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


def test_an_offer_withdrawn_while_it_is_pulled_is_not_current_any_more(
    source: HandoverSource, sink: HandoverSink
) -> None:
    offer_id = source.offer(sink.endpoint, 0, b"")
    (offer,) = receive(sink)
    source.withdraw(offer_id)
    assert receive(sink) == []
    assert not sink.current(offer)
    assert not sink.acknowledge(offer)


def test_an_offer_without_an_answer_expires(arena: KvArena, sink: HandoverSink) -> None:
    with HandoverSource("prefill-0", arena, lease_ms=1) as source:
        offer_id = source.offer(sink.endpoint, 0, b"")
        assert outcomes(source) == [Outcome(offer_id, 0, False, "expired")]


def test_an_answer_after_the_lease_changes_nothing(arena: KvArena, sink: HandoverSink) -> None:
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
        sink.socket.poll()  # for ever


def test_the_offers_of_a_killed_decode_process_end_as_lost(arena: KvArena) -> None:
    endpoint = address()
    with HandoverSource("prefill-0", arena) as source, child(_receive_and_hang, endpoint) as process:
        offer_id = source.offer(endpoint, 1, b"")
        assert source.socket.poll(SOON_MS)  # it has seen the offer
        assert source.poll() == []
        process.kill()
        process.join(20)
        assert outcomes(source) == [Outcome(offer_id, 1, False, "lost")]


def _pull_and_hang(endpoint: str) -> None:
    with HandoverSink(endpoint, open_device) as sink:
        sink.acknowledge(receive(sink)[0])
        sink.socket.poll()  # for ever


def test_a_sink_that_was_started_again_does_not_inherit_the_death_of_the_last_one(arena: KvArena) -> None:
    endpoint = address()
    with HandoverSource("prefill-0", arena) as source:
        with child(_pull_and_hang, endpoint) as process:
            source.offer(endpoint, 0, b"")
            assert [outcome.accepted for outcome in outcomes(source)] == [True]
            process.kill()
            process.join(20)
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
def test_gpu_memory_of_a_killed_prefill_process_is_not_current_any_more(sink: HandoverSink, kind: str) -> None:
    """CUDA says nothing of what it holds then, so a copy that was under way is void, and nothing new is begun."""
    with child(_offer_and_hang, sink.endpoint, kind) as process:
        (offer,) = receive(sink)
        assert content(sink, offer) == bytes([8]) * SLOT_BYTES
        assert sink.current(offer)
        process.kill()
        process.join(20)
    assert not sink.current(offer)
    assert sink.reject(offer, "its owner is gone")
    sink.receive()
    assert sink.statistics().arenas == 0
    with pytest.raises(PeerLost, match="gone"):
        sink.device_memory(offer)


@pytest.mark.parametrize("kind", ["host"], indirect=True)
def test_what_a_killed_prefill_process_offered_can_still_be_pulled(sink: HandoverSink, kind: str) -> None:
    with child(_offer_and_hang, sink.endpoint, kind) as process:
        (offer,) = receive(sink)
        process.kill()
        process.join(20)
    sink.receive()
    assert content(sink, offer) == bytes([8]) * SLOT_BYTES
    assert sink.current(offer)
    sink.acknowledge(offer)
    sink.receive()
    assert sink.statistics().arenas == 0
    with pytest.raises(PeerLost, match="gone"):
        sink.memory(offer)


def _pull(endpoint: str, count: int) -> None:
    with HandoverSink(endpoint, open_device) as sink:
        done = 0
        while done < count:
            for offer in receive(sink):
                copy = content(sink, offer)
                if sink.current(offer):
                    assert copy == bytes([offer.payload[0]]) * SLOT_BYTES, "a torn copy passed as current"
                    sink.acknowledge(offer)
                else:
                    sink.reject(offer, "torn")
                done += 1
        while sink.socket.poll(SOON_MS):  # until the source says enough
            if any(offer.payload == b"end" for offer in sink.receive()):
                return


def test_a_puller_in_another_process_never_accepts_a_torn_copy(arena: KvArena, source: HandoverSource) -> None:
    """The source breaks its own rule and begins slots while they are pulled, at random."""
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
                refused += "begun anew" in outcome.reason
            if refused:
                count -= refused  # it never sees these
                break
        while accepted + torn + refused < offered:
            for outcome in outcomes(source):
                accepted += outcome.accepted
                torn += outcome.reason == "torn"
                refused += "begun anew" in outcome.reason
        process.kill()
    assert accepted + torn + refused == offered
    assert accepted


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


def _reference(arena: KvArena, **changes: int) -> MemoryReference:
    return msgspec.structs.replace(arena.memory.reference, **changes)


HOSTILE: list[tuple[str, Callable[[KvArena], dict[str, Any]]]] = [
    ("slot 4", lambda _: {"slot": 4}),
    ("slot -1", lambda _: {"slot": -1}),
    ("epoch 2", lambda _: {"epoch": 2}),
    ("begun anew", lambda _: {"generation": 7}),
    ("size", lambda arena: {"arena": _reference(arena, size=1 << 60)}),
    ("size 0", lambda arena: {"arena": _reference(arena, size=0)}),
    ("found", lambda arena: {"arena": _reference(arena, size=64)}),
    ("cannot open", lambda arena: {"arena": _reference(arena, fd=1 << 30)}),
    ("cannot open", lambda arena: {"arena": _reference(arena, pid=(1 << 31) - 1)}),
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
    with connect(zmq.PUSH, sink.endpoint, max_message_bytes=4096) as hostile:
        hostile.send(offered(source, arena, **changes(arena)))
        assert receive(sink) == []
    assert sink.statistics().refused == 1
    source.offer(sink.endpoint, 0, b"")
    assert len(receive(sink)) == 1


def test_an_offer_whose_header_and_message_disagree_on_where_the_payload_is_is_rejected(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    elsewhere = CudaReference(1, "cuda:0", bytes(64), 9)
    devices = [elsewhere] if arena.device_reference is None else [elsewhere, None]
    with connect(zmq.PUSH, sink.endpoint, max_message_bytes=4096) as hostile:
        for device in devices:
            hostile.send(offered(source, arena, device=device))
            assert receive(sink) == []
    assert sink.statistics().refused == len(devices)


@pytest.mark.parametrize("kind", ["GPU"], indirect=True)
def test_a_handle_that_opens_nothing_is_rejected_and_nothing_stays_mapped(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    forged = CudaReference(1, "cuda:0", bytes(64), SLOTS * SLOT_BYTES)
    with connect(zmq.PUSH, sink.endpoint, max_message_bytes=4096) as hostile:
        hostile.send(offered(source, arena, device=forged))
        assert receive(sink) == []
    assert (sink.statistics().refused, sink.statistics().arenas) == (1, 0)


@pytest.mark.parametrize("kind", ["GPU"], indirect=True)
def test_a_decode_worker_without_a_gpu_says_so_to_a_prefill_worker_with_one(source: HandoverSource) -> None:
    with HandoverSink(address()) as sink:
        offer_id = source.offer(sink.endpoint, 0, b"")
        assert receive(sink) == []
        (outcome,) = outcomes(source)
        assert (outcome.offer_id, outcome.accepted) == (offer_id, False)
        assert "and we have no GPU" in outcome.reason


def test_a_sealed_memory_that_is_no_arena_is_rejected(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    for size in (8, 4096):
        with (
            SharedMemory.create("test", size) as memory,
            connect(zmq.PUSH, sink.endpoint, max_message_bytes=4096) as hostile,
        ):
            hostile.send(offered(source, arena, arena=memory.reference))
            assert receive(sink) == []
    assert sink.statistics().refused == 2
    assert sink.statistics().arenas == 0


@pytest.mark.parametrize("word", range(6))
@pytest.mark.parametrize("value", [-1, 0, 1 << 62])
def test_an_arena_with_a_hostile_header_is_rejected(
    arena: KvArena, source: HandoverSource, sink: HandoverSink, word: int, value: int
) -> None:
    header = arena.memory.view[:64].cast("q")
    header[word] = value if header[word] != value else 1  # a payload in GPU memory has 0 as its offset
    with connect(zmq.PUSH, sink.endpoint, max_message_bytes=4096) as hostile:
        hostile.send(offered(source, arena))
        assert receive(sink) == []
    assert sink.statistics().refused == 1


@pytest.mark.parametrize("message", [b"", b"\xc1", b"x" * 100, encode(Seen(1, 1)), encode(Ended(1, True, ""))])
def test_garbage_at_a_sink_is_counted_and_dropped(source: HandoverSource, sink: HandoverSink, message: bytes) -> None:
    with connect(zmq.PUSH, sink.endpoint, max_message_bytes=4096) as hostile:
        hostile.send(message)
        assert receive(sink) == []
    assert sink.statistics().malformed == 1


def test_an_offer_that_wants_its_answer_on_the_network_is_dropped(
    arena: KvArena, source: HandoverSource, sink: HandoverSink
) -> None:
    with connect(zmq.PUSH, sink.endpoint, max_message_bytes=4096) as hostile:
        hostile.send(offered(source, arena, reply="tcp://127.0.0.1:1"))
        assert receive(sink) == []
    assert sink.statistics().malformed == 1


def test_garbage_and_answers_to_nothing_at_a_source_are_dropped(source: HandoverSource, sink: HandoverSink) -> None:
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
def test_an_impossible_arena_is_refused(slots: int, payload_bytes: int, epoch: int) -> None:
    with pytest.raises(InvalidArgument):
        KvArena.create(slots, payload_bytes, epoch)


def test_an_impossible_offer_is_refused(source: HandoverSource, arena: KvArena, sink: HandoverSink) -> None:
    for slot in (-1, SLOTS):
        with pytest.raises(InvalidArgument, match=str(slot)):
            source.offer(sink.endpoint, slot, b"")
        with pytest.raises(InvalidArgument, match=str(slot)):
            arena.begin(slot)
    with pytest.raises(InvalidArgument, match=str(MAX_PAYLOAD_BYTES)):
        source.offer(sink.endpoint, 0, b"x" * (MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(InvalidArgument):
        source.offer("tcp://127.0.0.1:1", 0, b"")
    assert source.statistics().offered == 0


def test_a_payload_of_the_largest_size_arrives(source: HandoverSource, sink: HandoverSink) -> None:
    payload = os.urandom(MAX_PAYLOAD_BYTES)
    source.offer(sink.endpoint, 0, payload)
    assert receive(sink)[0].payload == payload
