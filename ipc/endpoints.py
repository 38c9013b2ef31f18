"""ZeroMQ sockets of a node: abstract names without files, restricted to the same user, with bounded messages.

An endpoint is `ipc://@trinity-<token>-<what>`. The token is random per node; the name disappears with its process.
"""

import os
import re
import secrets
import time
from typing import Any

import zmq

from ipc.errors import InvalidArgument

ZmqSocket = zmq.Socket[bytes]

_BATCH = 1000  # messages of one call of `receive_all`
_NAME_LIMIT = 100  # an abstract socket name has 107 bytes
_RETRY_MS, _MAX_RETRY_MS = 5, 100  # reconnect interval: doubled from the first up to the second, ZeroMQ's default
_BIND_TIMEOUT_S, _BIND_RETRY_S = 1.0, 0.001  # ZeroMQ holds the name of a closed socket for a while
_ENDPOINT = re.compile(rf"ipc://@([\x21-\x7e]{{1,{_NAME_LIMIT}}})")


def new_token() -> str:
    """Return a random token of 16 hex digits."""
    return secrets.token_hex(8)


def private_endpoint(token: str, what: str) -> str:
    """Return the endpoint of `what` (`pool-0`, `frontend`, …) on the node with this token."""
    return check_endpoint(f"ipc://@trinity-{token}-{what}")


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint if it is an abstract ipc name of at most 100 printable ASCII characters.

    Raises `InvalidArgument` otherwise: an endpoint sent by a peer must not cause a connection to the network.
    """
    if not isinstance(endpoint, str) or _ENDPOINT.fullmatch(endpoint) is None:
        raise InvalidArgument(f"not an abstract ipc endpoint of at most {_NAME_LIMIT} characters: {endpoint!r:.200}")
    return endpoint


def bind(kind: int, endpoint: str, *, max_message_bytes: int, queue: int = 1000) -> ZmqSocket:
    """Return a bound socket that closes connections of other users and rejects messages over `max_message_bytes`.

    Abstract names have no permissions, so another user's connect succeeds; ZeroMQ then checks the peer's user id
    (SO_PEERCRED) and closes the connection. `queue` bounds the messages per direction and peer. Raises
    `InvalidArgument` if the name is still taken after a second: ZeroMQ frees the name of a closed socket in a thread of
    its own, some time after `close`.
    """
    socket = _socket(kind, max_message_bytes, queue)
    socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    try:
        _bind_once_free(socket, check_endpoint(endpoint))
    except (zmq.ZMQError, InvalidArgument) as error:
        socket.close()
        raise InvalidArgument(f"cannot bind {endpoint}: {error}") from error
    return socket


def _bind_once_free(socket: ZmqSocket, endpoint: str) -> None:
    deadline = time.monotonic() + _BIND_TIMEOUT_S
    while True:
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(_BIND_RETRY_S)


def connect(kind: int, endpoint: str, *, max_message_bytes: int, queue: int = 1000) -> ZmqSocket:
    """Return a socket connected to an endpoint of this host, now or once it is bound."""
    socket = _socket(kind, max_message_bytes, queue)
    socket.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RETRY_MS)
    try:
        socket.connect(check_endpoint(endpoint))
    except (zmq.ZMQError, InvalidArgument) as error:
        socket.close()
        raise InvalidArgument(f"cannot connect to {endpoint}: {error}") from error
    return socket


def _socket(kind: int, max_message_bytes: int, queue: int) -> ZmqSocket:
    context: Any = zmq.Context.instance()
    socket: ZmqSocket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)  # closing never blocks on a peer
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, queue)
    return socket


def send_now(socket: ZmqSocket, *frames: bytes) -> bool:
    """Send one message without blocking. Return False if the queue to the peer is full.

    ZeroMQ checks for freed space only every millisecond or so while sending, so that a plain non-blocking send can fail
    although the peer has read everything; reading the socket's events makes it check.
    """
    for _ in range(2):
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
            return True
        except zmq.Again:
            socket.getsockopt(zmq.EVENTS)
    return False


def receive_all(socket: ZmqSocket) -> list[list[bytes]]:
    """Return the waiting messages, at most 1000, each as a list of frames. Never blocks.

    A ZeroMQ file descriptor is edge-triggered: call this until it returns an empty list before sleeping on it.
    """
    messages: list[list[bytes]] = []
    while len(messages) < _BATCH:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages
