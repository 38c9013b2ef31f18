"""A peer that writes or says anything at all costs itself the session, and nobody else anything."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import event, given
from hypothesis import strategies as st

from ipc import (
    AttachTimeout,
    HandoverSink,
    HandoverSource,
    IpcError,
    KvArena,
    Offer,
    RingClient,
    RingServer,
    SharedMemory,
    bind,
    connect,
)
from ipc.endpoints import receive_all
from ipc.memory.device import HostMemory
from ipc.ring.doorbell import FdMailbox
from ipc.server.roster import JOIN_NS
from ipc.session.device_arena import DeviceArena, arena_bytes
from ipc.session.messages import MAX_MESSAGE_BYTES, VERSION, Attached
from tests.fuzz.budget import fuzzed
from tests.ipc.handovers import SLOT_BYTES, address, open_device, receive
from tests.ipc.processes import attach, endpoint
from tests.ipc.sessions import DIM, SLOTS, ask
from tests.ipc.test_handover_hostile import offered

WORDS = st.sampled_from(
    [0, 1, 2, 3, 5, -1, 7, SLOTS, SLOTS + 1, 64, 512, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, (1 << 62) - 1, 1 << 62,
     (1 << 63) - 1, -(1 << 63)]
) | st.integers(-(1 << 63), (1 << 63) - 1)  # fmt: skip
SMALL = st.integers(-1, 9)
VALUES = st.recursive(
    st.none() | st.booleans() | WORDS | SMALL | st.floats() | st.text(max_size=9) | st.binary(max_size=70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def scribbles(draw: st.DrawFn) -> list[Callable[[memoryview], None]]:
    """Writes into a memory: words where words are, bytes anywhere."""

    def word(place: int, value: int) -> Callable[[memoryview], None]:
        return lambda view: struct.pack_into("<q", view, place * 8 % (len(view) - 8), value)

    def some(place: int, content: bytes) -> Callable[[memoryview], None]:
        def write(view: memoryview) -> None:
            begin = place % (len(view) - len(content))
            view[begin : begin + len(content)] = content

        return write

    # Words of the ring's header, or of any slot's; the second ring begins at the first page that the first leaves free.
    places = st.integers(0, 80) | st.integers(512, 592) | st.integers(0, 2000)
    kinds = st.builds(word, places, WORDS) | st.builds(some, st.integers(0, 8000), st.binary(min_size=1, max_size=56))
    return draw(st.lists(kinds, min_size=1, max_size=5))


MOVES = st.lists(st.sampled_from(["ask", "forge", "scribble", "cancel", "answer", "poll"]), min_size=1, max_size=8)


@contextlib.contextmanager
def pool() -> Iterator[RingServer]:
    arena = DeviceArena(HostMemory.create(arena_bytes(8 * SLOTS, 4 * DIM)), 8 * SLOTS, 4 * DIM, epoch=5)
    options: dict[str, Any] = {"epoch": 5, "ring_slots": SLOTS, "max_k": 6, "max_clients": 8}
    with RingServer(endpoint(), {"docs": DIM, "code": 3}, arena=arena, **options) as made:
        yield made
    arena.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RingServer]:
    with pool() as made:
        yield made


@pytest.fixture(scope="module")
def honest(server: RingServer) -> Iterator[RingClient]:
    with attach(server, "honest") as made:
        yield made


def answer(server: RingServer) -> None:
    """Answer what waits."""
    for request in server.receive():
        k = request.spec.k
        server.publish(request.client, request.request_id, "ok", np.arange(k), np.zeros(k, np.float32))


def expect_served(server: RingServer, honest: RingClient) -> None:
    """The honest client's request is answered, whatever else waits."""
    asked = ask(honest)
    found = []
    for _ in range(100):
        server.wait(0)
        answer(server)
        found += honest.poll()
        if found:
            break
    assert [(result.request_id, result.status) for result in found] == [(asked, "ok")]


def move(what: str, server: RingServer, client: RingClient, scribble: Callable[[], None], forged: bytes) -> None:
    match what:
        case "ask":
            ask(client)
        case "forge":
            ring = client.attachment.requests
            offset = ring.header_offsets[ring.loan()]
            ring.view[offset : offset + len(forged)] = forged
            ring.send()
        case "scribble":
            scribble()
        case "cancel":
            client.cancel(max(client.pending, default=1))
        case "poll":
            client.poll()


@fuzzed(0.5)
@given(writes=scribbles(), moves=MOVES, forged=st.binary(max_size=56), arena=st.booleans())
def test_a_client_that_writes_anything_into_its_rings_disturbs_nobody(
    server: RingServer,
    honest: RingClient,
    writes: list[Callable[[memoryview], None]],
    moves: list[str],
    forged: bytes,
    arena: bool,
) -> None:
    with attach(server, "hostile", arena=arena, timeout_ms=60_000.0) as hostile:
        left = iter(writes)

        def scribble() -> None:
            for write in left:
                write(hostile.attachment.memory.view)
                return

        for what in [*moves, *["scribble"] * len(writes)]:
            if what == "answer":
                answer(server)
                server.cancellations()
            else:
                with contextlib.suppress(IpcError):  # of the hostile client's own end
                    move(what, server, hostile, scribble, forged)
        expect_served(server, honest)
        server.cancellations()
        event(f"evicted: {hostile.attachment.requests.view[256] == 3}")
    expect_served(server, honest)
    server.housekeep(time.monotonic_ns())


@fuzzed(0.5)
@given(
    request_id=st.integers(1, 9) | WORDS,
    deadline=SMALL | WORDS,
    fields=st.tuples(
        st.sampled_from([5, 5, 5, 4, 0]), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 8),
        st.sampled_from([0, 1, 8, 1024, 1025, 2**32 - 1]), st.integers(0, 33) | st.just(65535), st.integers(0, 65535),
        st.sampled_from([DIM, DIM, 3, 0, 2**32 - 1]),
    ),
    place=st.tuples(st.integers(0, 40) | st.just(2**32 - 1), st.integers(0, 3) | st.just(2**32 - 1)),
    arena=st.booleans(),
)  # fmt: skip
def test_any_descriptor_is_a_request_a_refusal_or_an_eviction(
    server: RingServer,
    honest: RingClient,
    request_id: int,
    deadline: int,
    fields: tuple[int, ...],
    place: tuple[int, int],
    arena: bool,
) -> None:
    with attach(server, "hostile", arena=arena, timeout_ms=60_000.0) as hostile:
        ring = hostile.attachment.requests
        offset = ring.header_offsets[ring.loan()]
        ring.view[offset : offset + 48] = struct.pack("<qqqIBBHIIHHI", request_id, deadline, 0, *fields)
        ring.view[offset + 56 : offset + 64] = struct.pack("<II", *place)
        hostile.pending[request_id] = 0
        ring.send()
        expect_served(server, honest)
        with contextlib.suppress(IpcError):
            event(str([result.status for result in hostile.poll()]))


@fuzzed(0.5)
@given(writes=scribbles(), moves=MOVES, arena=st.booleans(), device=scribbles())
def test_a_pool_that_writes_anything_into_the_rings_costs_its_client_the_session_at_most(
    server: RingServer,
    honest: RingClient,
    writes: list[Callable[[memoryview], None]],
    moves: list[str],
    arena: bool,
    device: list[Callable[[memoryview], None]],
) -> None:
    """Every word that the client reads may be a lie: it raises its own errors, and ends what it asked once."""
    with attach(server, "client", arena=arena, timeout_ms=60_000.0) as client:
        ends: list[int] = []
        grant = client.attachment.answer.arena
        granted = (
            None
            if grant is None or grant.host is None
            else SharedMemory.open(grant.host, max_size=1 << 20, writable=True)
        )
        left = [*writes, *(device if arena else [])]

        def scribble() -> None:
            if left:
                on_arena = arena and len(left) <= len(device)
                left.pop(0)(granted.view if on_arena and granted else client.attachment.memory.view)

        for what in [*moves, "scribble", "ask", "scribble", "poll", "answer", "poll", "ask", "poll"]:
            if what == "forge":
                continue
            if what == "answer":
                answer(server)
                server.cancellations()
            else:
                with contextlib.suppress(IpcError):
                    move(what, server, client, scribble, b"")
            assert client.outstanding <= SLOTS
        client.statistics()
        with contextlib.suppress(IpcError):
            ends += [result.request_id for result in client.poll()]
        assert len(ends) == len(set(ends))
        client.close()
        if granted is not None:
            granted.close()
    expect_served(server, honest)


# ---- what is said over the session's socket

OWN = os.getpid()
ATTACH: dict[str, st.SearchStrategy[Any]] = {
    "type": st.just("Attach") | VALUES,
    "version": st.just(VERSION) | VALUES,
    "name": st.text(max_size=120) | VALUES,
    "pid": st.sampled_from([OWN, 1, 0, -1, 1 << 31, 1 << 22]) | VALUES,
    "doorbell": st.sampled_from(["eventfd", "zeromq", "telegraph", ""]) | VALUES,
    "bell": st.sampled_from(["nobody", "", "a\0b", "x" * 101, "tcp://127.0.0.1:1", "ipc://@" + "x" * 200, "inproc://x"])
    | VALUES,
    "arena": st.booleans() | VALUES,
}


@st.composite
def attach_messages(draw: st.DrawFn) -> list[bytes]:
    """One to three frames: an Attach that is right but for a field or two, one cut or extended, or anything."""
    fields: dict[str, Any] = {
        "type": "Attach", "version": VERSION, "name": "n", "pid": OWN, "doorbell": "zeromq",
        "bell": "ipc://@trinity-fuzz", "arena": True,
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(ATTACH)), max_size=2)):
        fields[name] = draw(ATTACH[name])
    if draw(st.integers(0, 3)) == 0:
        fields.pop(draw(st.sampled_from(sorted(fields))))
    message = packed(fields)
    match draw(st.integers(0, 7)):
        case 0:
            message = draw(st.binary(max_size=100))
        case 1:
            at = draw(st.integers(0, len(message)))
            message = message[:at] + draw(st.binary(max_size=9)) + message[at + draw(st.integers(0, 9)) :]
        case 2:
            return [message, draw(st.binary(max_size=9)), message]
        case 3:
            message = msgspec.msgpack.encode(draw(VALUES.filter(fits)))
    return [message]


def fits(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return False
    return True


def packed(fields: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode({name: value for name, value in fields.items() if fits(value)})


@fuzzed()
@given(frames=attach_messages())
def test_any_message_to_a_pool_is_answered_with_rings_or_a_refusal(
    server: RingServer, honest: RingClient, frames: list[bytes]
) -> None:
    with connect(zmq.DEALER, server.endpoint, max_message_bytes=MAX_MESSAGE_BYTES) as socket:
        socket.send_multipart(frames)
        while not socket.poll(0):
            server.wait(1)
        (said,) = socket.recv_multipart()
        event(str(msgspec.msgpack.decode(said)["type"]))
        assert msgspec.msgpack.decode(said)["type"] in ("Attached", "Refused")
    expect_served(server, honest)
    server.housekeep(time.monotonic_ns() + JOIN_NS)  # gives back what nobody opened
    assert server.statistics().clients == 1


class FakePool:
    """Answers whoever asks to attach with the same bytes."""

    def __init__(self) -> None:
        self.endpoint = endpoint()
        self.says = b""
        self._socket = bind(zmq.ROUTER, self.endpoint, max_message_bytes=MAX_MESSAGE_BYTES)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._socket.poll(20)
            for frames in receive_all(self._socket):
                self._socket.send_multipart([frames[0], self.says])

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()


@pytest.fixture(scope="module")
def fake() -> Iterator[FakePool]:
    made = FakePool()
    yield made
    made.close()


PATHS = [
    *[(name,) for name in Attached.__struct_fields__],
    *[("memory", name) for name in ("pid", "fd", "size", "inode")],
    *[(ring, name) for ring in ("requests", "results") for name in ("slots", "payload_bytes")],
    *[("catalogue", "served", 0, name) for name in ("name", "dim", "shard", "shards", "identity")],
    ("catalogue", "served"),
    ("catalogue", "unserved"),
    *[("arena", "lease", name) for name in ("epoch", "first", "generations")],
    *[("arena", "host", name) for name in ("pid", "fd", "size", "inode")],
]


@fuzzed()
@given(
    changes=st.lists(st.tuples(st.sampled_from(PATHS), VALUES | SMALL), max_size=2),
    cut=st.none() | st.tuples(st.integers(0, 400), st.integers(0, 9), st.binary(max_size=9)),
)
def test_any_answer_of_a_pool_is_a_session_or_a_typed_error(
    server: RingServer,
    honest: RingClient,
    fake: FakePool,
    changes: list[tuple[tuple[Any, ...], Any]],
    cut: tuple[int, int, bytes] | None,
) -> None:
    with attach(server, "template", doorbell="zeromq", arena=True, timeout_ms=60_000.0) as template:
        told = msgspec.msgpack.decode(msgspec.msgpack.encode(template.attachment.answer))
        for path, value in changes:
            inner = told
            for step in path[:-1]:
                try:
                    inner = inner[step]
                except (LookupError, TypeError):
                    inner = {}
            if fits(value) and isinstance(inner, dict):
                inner[path[-1]] = value
        fake.says = msgspec.msgpack.encode(told)
        if cut is not None:
            at = cut[0] % len(fake.says)
            fake.says = fake.says[:at] + cut[2] + fake.says[at + cut[1] :]
        try:
            client = RingClient(fake.endpoint, "lured", doorbell="zeromq", timeout_ms=60_000.0, arena=True)
        except AttachTimeout:
            raise
        except IpcError as error:
            event(type(error).__name__)
            return
        event("attached")
        with client:
            for collection in [one.name for one in client.catalogue.served]:
                with contextlib.suppress(IpcError):
                    ask(client, collection=collection)
            with contextlib.suppress(IpcError):
                client.poll()
            answer(server)


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
def test_any_offer_is_taken_or_refused_and_others_go_on(
    kv: tuple[KvArena, HandoverSource],
    changes: list[tuple[str, Any]],
    memory: tuple[str, int] | None,
    cut: tuple[int, int, bytes] | None,
) -> None:
    arena, source = kv
    told = msgspec.msgpack.decode(offered(source, arena, offer_id=1 << 40))
    told["source"] = "hostile"
    if memory is not None:
        told["arena"][memory[0]] = memory[1]
    told |= {name: value for name, value in changes if fits(value)}
    message = msgspec.msgpack.encode(told)
    if cut is not None:
        at = cut[0] % len(message)
        message = message[:at] + cut[2] + message[at + cut[1] :]
    # A sink keeps every address that was ever named, up to a limit that this test is not about.
    with HandoverSink(address(), open_device) as sink, HandoverSource("prefill-0", arena) as honest:
        with connect(zmq.PUSH, sink.endpoint, max_message_bytes=1 << 20) as hostile:
            hostile.send(message)
            for offer in receive(sink):
                event("taken")
                sink.memory(offer)
                sink.current(offer)
                sink.acknowledge(offer)
        expect_handed_over(honest, sink)


@fuzzed(0.5)
@given(writes=scribbles(), slot=st.integers(0, 3))
def test_any_arena_is_mapped_or_refused_and_others_go_on(
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
                    sink.current(offer)
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
def test_any_answer_to_a_source_is_heard_or_dropped(
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


def test_a_mailbox_takes_nothing_but_what_it_waits_for() -> None:
    with closing(FdMailbox()) as mailbox, closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as sender:
        for content in (b"", b"token", b"x" * 5000):
            sender.sendto(content, "\0" + mailbox.name)
        with pytest.raises(AttachTimeout):
            mailbox.take(b"token", 2, 1.0)
