"""A pool and a client of it for the tests of sessions."""

import multiprocessing.forkserver
from collections.abc import Iterator

import pytest

from ipc import (
    RingClient,
    RingServer,
)
from tests.ipc.processes import attach, endpoint
from tests.ipc.sessions import DIM, SLOTS


@pytest.fixture(scope="session", autouse=True)
def _forkserver_is_running() -> None:
    """It keeps descriptors of its own from its start on, which no leak check shall count."""
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def server() -> Iterator[RingServer]:
    with RingServer(endpoint(), {"docs": DIM, "code": 3}, epoch=5, ring_slots=SLOTS, max_k=6, max_clients=3) as made:
        yield made


@pytest.fixture(params=["eventfd", "zeromq"])
def client(request: pytest.FixtureRequest, server: RingServer) -> Iterator[RingClient]:
    with attach(server, doorbell=request.param) as made:
        yield made
