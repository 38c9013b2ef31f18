"""Tests that sockets of the node's processes reveal nothing to other users' processes and are not disturbed by them."""

import contextlib
import socket

import pytest
import zmq

from ipc.endpoints import bind, connect
from ipc.errors import InvalidArgument
from tests.ipc.processes import as_root, become_another_user, child, endpoint, succeeded

CONNECTS = 300
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f"  # the greeting of a ZeroMQ peer


def _connect_as_another_user(address: str) -> None:
    """Connect repeatedly. Raises AssertionError if the socket sends anything or keeps a connection."""
    become_another_user()
    name = "\0" + address.removeprefix("ipc://@")
    for _ in range(CONNECTS):
        with socket.socket(socket.AF_UNIX) as knocking:
            knocking.settimeout(60)
            knocking.connect(name)  # the kernel accepts it: abstract names have no permissions
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                knocking.sendall(GREETING)
            try:
                said = knocking.recv(100)
            except ConnectionResetError:
                said = b""
            assert said == b""


@as_root
def test_another_users_connection_is_closed_silently_and_the_owners_continue() -> None:
    address = endpoint()
    with (
        bind(zmq.ROUTER, address, max_message_bytes=100) as server,
        connect(zmq.DEALER, address, max_message_bytes=100) as mine,
        child(_connect_as_another_user, address) as stranger,
    ):
        assert succeeded(stranger)
        mine.send(b"hello")
        assert server.poll(60_000)
        assert server.recv_multipart()[1:] == [b"hello"]
        assert not server.poll(0)


def test_the_name_of_a_closed_socket_can_be_bound_at_once() -> None:
    address = endpoint()
    for _ in range(50):  # without a wait, two of three binds failed
        bind(zmq.ROUTER, address, max_message_bytes=100).close()


def test_a_name_in_use_is_rejected() -> None:
    address = endpoint()
    with bind(zmq.ROUTER, address, max_message_bytes=100), pytest.raises(InvalidArgument, match="in use"):
        bind(zmq.ROUTER, address, max_message_bytes=100)
