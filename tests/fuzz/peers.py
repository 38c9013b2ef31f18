"""Helpers of the ring fuzz tests."""

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from ipc import RingClient
from tests.ipc.arenas import clients_on, make_arena
from tests.ipc.fake_cuda import FakeCuda
from tests.ipc.processes import endpoint
from tests.ipc.ring_server import RingServer
from tests.ipc.sessions import DIM, SLOTS, ask

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
    """Draw writes into a memory: words at word addresses, bytes anywhere."""

    def word(place: int, value: int) -> Callable[[memoryview], None]:
        return lambda view: struct.pack_into("<q", view, place * 8 % (len(view) - 8), value)

    def some(place: int, content: bytes) -> Callable[[memoryview], None]:
        def write(view: memoryview) -> None:
            begin = place % (len(view) - len(content))
            view[begin : begin + len(content)] = content

        return write

    # Words of the ring's header or of any slot's; the second ring begins at the page after the first.
    places = st.integers(0, 80) | st.integers(512, 592) | st.integers(0, 2000)
    kinds = st.builds(word, places, WORDS) | st.builds(some, st.integers(0, 8000), st.binary(min_size=1, max_size=56))
    return draw(st.lists(kinds, min_size=1, max_size=5))


@contextlib.contextmanager
def pool() -> Iterator[RingServer]:
    pytest.importorskip("cuda.bindings.driver")
    cuda = FakeCuda()
    arena = make_arena(cuda, 8 * SLOTS, DIM, epoch=5)
    options: dict[str, Any] = {"epoch": 5, "ring_slots": SLOTS, "max_k": 6, "max_clients": 8}
    with clients_on(cuda), RingServer(endpoint(), {"docs": DIM, "code": 3}, arena=arena, **options) as made:
        yield made
    arena.close()


def answer(server: RingServer) -> None:
    """Answer all waiting requests."""
    for request in server.receive():
        k = request.spec.k
        server.publish(request.client, request.request_id, "ok", np.arange(k), np.zeros(k, np.float32))


def expect_served(server: RingServer, honest: RingClient) -> None:
    """Check that the well-behaved client's request is answered, whatever other requests wait."""
    request_id = ask(honest)
    found = []
    for _ in range(100):
        server.wait(0)
        answer(server)
        found += honest.poll()
        if found:
            break
    assert [(result.request_id, result.status) for result in found] == [(request_id, "ok")]


OWN = os.getpid()


def fits(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return False
    return True


def packed(fields: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode({name: value for name, value in fields.items() if fits(value)})
