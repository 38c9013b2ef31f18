"""Fixtures: a pool and a client of it for session tests; the two ends of a KV hand-over."""

import multiprocessing.forkserver
from collections.abc import Iterator
from typing import Any

import pytest

from ipc import HandoverSink, HandoverSource, KvArena, RingClient
from tests.ipc.arenas import clients_on
from tests.ipc.arenas import make_arena as make_vector_arena
from tests.ipc.fake_cuda import FakeCuda
from tests.ipc.handovers import address, make_arena, open_device
from tests.ipc.processes import attach, endpoint
from tests.ipc.ring_server import RingServer
from tests.ipc.sessions import DIM, SLOTS


@pytest.fixture(scope="session", autouse=True)
def _forkserver_is_running() -> None:
    """Start the fork server first: it keeps descriptors open, which leak checks must not count."""
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(params=["host", "GPU"])
def kind(request: pytest.FixtureRequest) -> str:
    """Memory type of the payload."""
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


@pytest.fixture
def server() -> Iterator[RingServer]:
    pytest.importorskip("cuda.bindings.driver")
    cuda, dims = FakeCuda(), {"docs": DIM, "code": 3}
    arena = make_vector_arena(cuda, 3 * SLOTS, DIM, epoch=5)
    options: dict[str, Any] = {"epoch": 5, "ring_slots": SLOTS, "max_k": 6, "max_clients": 3, "arena": arena}
    with clients_on(cuda), RingServer(endpoint(), dims, **options) as made:
        yield made
    assert arena.free_slots == 3 * SLOTS
    arena.close()


WAYS: dict[str, dict[str, Any]] = {
    "eventfd": {"doorbell": "eventfd"},
    "zeromq": {"doorbell": "zeromq"},
    "arena": {"arena": True},
}


@pytest.fixture(params=list(WAYS))
def client(request: pytest.FixtureRequest, server: RingServer) -> Iterator[RingClient]:
    """A client over each doorbell, and one whose vectors go through the pool's arena where `ask` sends them."""
    with attach(server, **WAYS[request.param]) as made:
        assert made.has_arena == (request.param == "arena")
        yield made
