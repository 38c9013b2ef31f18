"""Fixtures: a pool's end of the rings, and a well-behaved client."""

from collections.abc import Iterator

import pytest

from ipc import RingClient
from tests.fuzz.peers import pool
from tests.ipc.processes import attach
from tests.ipc.ring_server import RingServer


@pytest.fixture(scope="module")
def server() -> Iterator[RingServer]:
    with pool() as made:
        yield made


@pytest.fixture(scope="module")
def honest(server: RingServer) -> Iterator[RingClient]:
    with attach(server, "honest") as made:
        yield made
