"""Fuzz tests of the session socket: any message gives rings, a refusal or a typed error."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import event, given
from hypothesis import strategies as st

from ipc import AttachTimeout, IpcError, RingClient, bind, connect
from ipc.endpoints import receive_all
from ipc.server.server import JOIN_NS
from ipc.session.messages import MAX_MESSAGE_BYTES, VERSION, Attached
from tests.fuzz.budget import fuzzed
from tests.fuzz.peers import OWN, SMALL, VALUES, answer, expect_served, fits, packed
from tests.ipc.processes import attach, endpoint
from tests.ipc.ring_server import RingServer
from tests.ipc.sessions import ask

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
    """Draw one to three frames: an Attach valid except for a field or two, truncated or extended, or anything."""
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
    server.housekeep(time.monotonic_ns() + JOIN_NS)  # reclaims unopened rings
    assert server.client_count == 1


class FakePool:
    """Answers every attach request with the same bytes."""

    def __init__(self) -> None:
        self.endpoint = endpoint()
        self.reply = b""
        self._socket = bind(zmq.ROUTER, self.endpoint, max_message_bytes=MAX_MESSAGE_BYTES)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._socket.poll(20)
            for frames in receive_all(self._socket):
                self._socket.send_multipart([frames[0], self.reply])

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
    *[("arena", "lease", name) for name in ("epoch", "first", "count")],
    *[("arena", "memory", name) for name in ("pid", "device", "handle", "size")],
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
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(template.attachment.answer))
        for path, value in changes:
            inner = fields
            for step in path[:-1]:
                try:
                    inner = inner[step]
                except (LookupError, TypeError):
                    inner = {}
            if fits(value) and isinstance(inner, dict):
                inner[path[-1]] = value
        fake.reply = msgspec.msgpack.encode(fields)
        if cut is not None:
            at = cut[0] % len(fake.reply)
            fake.reply = fake.reply[:at] + cut[2] + fake.reply[at + cut[1] :]
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
