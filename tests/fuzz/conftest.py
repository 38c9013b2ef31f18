"""Fixtures: a pool's end of the rings, and a well-behaved client."""

from collections.abc import Iterator

import pytest

from benchmarks.common.ring_server import RingServer
from ipc import RingClient
from tests.fuzz.peers import pool
from tests.ipc.processes import attach


@pytest.fixture(scope="module")
def server() -> Iterator[RingServer]:
    with pool() as made:
        yield made


@pytest.fixture(scope="module")
def honest(server: RingServer) -> Iterator[RingClient]:
    with attach(server, "honest") as made:
        yield made
