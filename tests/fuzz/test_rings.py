"""Fuzz tests of rings: a peer that writes arbitrary data ends at most its own session."""

import contextlib
import struct
import time
from collections.abc import Callable, Iterator

from hypothesis import event, given
from hypothesis import strategies as st

from ipc import IpcError, RingClient
from tests.fuzz.budget import fuzzed
from tests.fuzz.peers import SMALL, WORDS, answer, expect_served, scribbles
from tests.ipc.processes import attach
from tests.ipc.ring_server import RingServer
from tests.ipc.sessions import DIM, SLOTS, ask

MOVES = st.lists(st.sampled_from(["ask", "forge", "scribble", "cancel", "answer", "poll"]), min_size=1, max_size=8)


def move(
    what: str, server: RingServer, client: RingClient, left: Iterator[Callable[[memoryview], None]], forged: bytes
) -> None:
    match what:
        case "ask":
            ask(client)
        case "forge":
            ring = client.attachment.requests
            offset = ring.header_offsets[ring.loan()]
            ring.view[offset : offset + len(forged)] = forged
            ring.send()
        case "scribble":
            if (write := next(left, None)) is not None:
                write(client.attachment.memory.view)
        case "cancel":
            client.cancel(max(client.pending, default=1))
        case "poll":
            client.poll()


@fuzzed(0.5)
@given(writes=scribbles(), moves=MOVES, forged=st.binary(max_size=56), arena=st.booleans())
def test_a_client_that_writes_anything_into_its_rings_affects_no_other(
    server: RingServer,
    honest: RingClient,
    writes: list[Callable[[memoryview], None]],
    moves: list[str],
    forged: bytes,
    arena: bool,
) -> None:
    with attach(server, "hostile", arena=arena, timeout_ms=60_000.0) as hostile:
        left = iter(writes)
        for what in [*moves, *["scribble"] * len(writes)]:
            if what == "answer":
                answer(server)
                server.cancellations()
            else:
                with contextlib.suppress(IpcError):  # errors of the hostile client's own end
                    move(what, server, hostile, left, forged)
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
    written=st.integers(0, 3),
    arena=st.booleans(),
)  # fmt: skip
def test_any_descriptor_is_a_request_a_rejection_or_an_eviction(
    server: RingServer,
    honest: RingClient,
    request_id: int,
    deadline: int,
    fields: tuple[int, ...],
    place: tuple[int, int],
    written: int,
    arena: bool,
) -> None:
    with attach(server, "hostile", arena=arena, timeout_ms=60_000.0) as hostile:
        ring = hostile.attachment.requests
        offset = ring.header_offsets[ring.loan()]
        ring.view[offset : offset + 48] = struct.pack("<qqqIBBHIIHHI", request_id, deadline, 0, *fields)
        ring.view[offset + 48 : offset + 56] = struct.pack("<q", written)
        ring.view[offset + 56 : offset + 64] = struct.pack("<II", *place)
        hostile.pending[request_id] = 0
        ring.send()
        expect_served(server, honest)
        with contextlib.suppress(IpcError):
            event(str([result.status for result in hostile.poll()]))


@fuzzed(0.5)
@given(writes=scribbles(), moves=MOVES, arena=st.booleans())
def test_a_pool_that_writes_anything_into_the_rings_ends_at_most_the_session(
    server: RingServer,
    honest: RingClient,
    writes: list[Callable[[memoryview], None]],
    moves: list[str],
    arena: bool,
) -> None:
    """Any word that the client reads may be wrong: it raises only its own errors, and ends each request once."""
    with attach(server, "client", arena=arena, timeout_ms=60_000.0) as client:
        ends: list[int] = []
        left = iter(writes)
        for what in [*moves, "scribble", "ask", "scribble", "poll", "answer", "poll", "ask", "poll"]:
            if what == "forge":
                continue
            if what == "answer":
                answer(server)
                server.cancellations()
            else:
                with contextlib.suppress(IpcError):
                    move(what, server, client, left, b"")
            assert client.outstanding <= SLOTS
        with contextlib.suppress(IpcError):
            ends += [result.request_id for result in client.poll()]
        assert len(ends) == len(set(ends))
        client.close()
    expect_served(server, honest)
