"""Sockets of the node's processes: a process of another user is told nothing and cannot disturb them."""

import contextlib
import os
import socket

import pytest
import zmq

from ipc.endpoints import bind, connect
from ipc.errors import InvalidArgument
from tests.ipc.processes import child, ended_well, endpoint

CONNECTS = 300
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f"  # how a ZeroMQ peer begins


def _knock_as_a_stranger(address: str) -> None:
    """Connect again and again. Raises AssertionError if the socket says anything, or keeps a connection."""
    os.setgid(65534)
    os.setuid(65534)
    name = "\0" + address.removeprefix("ipc://@")
    for _ in range(CONNECTS):
        with socket.socket(socket.AF_UNIX) as knocking:
            knocking.settimeout(60)
            knocking.connect(name)  # the kernel does not refuse it: abstract names have no permissions
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                knocking.sendall(GREETING)
            try:
                said = knocking.recv(100)
            except ConnectionResetError:
                said = b""
            assert said == b""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_connection_is_closed_without_a_word_and_the_owners_own_go_on() -> None:
    address = endpoint()
    with (
        bind(zmq.ROUTER, address, max_message_bytes=100) as server,
        connect(zmq.DEALER, address, max_message_bytes=100) as mine,
        child(_knock_as_a_stranger, address) as stranger,
    ):
        assert ended_well(stranger)
        mine.send(b"hello")
        assert server.poll(60_000)
        assert server.recv_multipart()[1:] == [b"hello"]
        assert not server.poll(0)


def test_the_name_of_a_socket_that_was_just_closed_is_free_for_the_next() -> None:
    address = endpoint()
    for _ in range(50):  # without waiting two of three binds failed
        bind(zmq.ROUTER, address, max_message_bytes=100).close()


def test_a_name_that_another_socket_holds_is_refused() -> None:
    address = endpoint()
    with bind(zmq.ROUTER, address, max_message_bytes=100), pytest.raises(InvalidArgument, match="in use"):
        bind(zmq.ROUTER, address, max_message_bytes=100)
