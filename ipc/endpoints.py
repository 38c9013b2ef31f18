"""ZeroMQ sockets as all of Trinity makes them: abstract names that leave no files, this user only, bounded in size.

An endpoint reads `ipc://@trinity-<token>-<what>`; the token is random per node, the name vanishes with its process.
"""

import os
import re
import secrets
import time
from typing import Any

import zmq

from ipc.errors import InvalidArgument

ZmqSocket = zmq.Socket[bytes]

_AT_ONCE = 1000  # messages of one look
_NAME_LIMIT = 100  # an abstract socket name has 107 bytes
_RETRY_MS, _MAX_RETRY_MS = 5, 100  # of a peer that is not there yet: the first time, doubled up to ZeroMQ's usual 100
_FREED_S, _LOOK_S = 1.0, 0.001  # how long ZeroMQ may hold the name of a closed socket; the time between looks
_ENDPOINT = re.compile(rf"ipc://@([\x21-\x7e]{{1,{_NAME_LIMIT}}})")


def new_token() -> str:
    """A fresh random token, 16 hex digits: unguessable for the life of a node."""
    return secrets.token_hex(8)


def private_endpoint(token: str, what: str) -> str:
    """The endpoint of `what` (`pool-0`, `frontend`, …) on the node with this token."""
    return check_endpoint(f"ipc://@trinity-{token}-{what}")


def check_endpoint(endpoint: str) -> str:
    """The endpoint itself, if it is an abstract ipc name of at most 100 printable ASCII characters.

    Raises `InvalidArgument` for anything else: an endpoint that a peer sends must not make us connect to the network.
    """
    if not isinstance(endpoint, str) or _ENDPOINT.fullmatch(endpoint) is None:
        raise InvalidArgument(f"not an abstract ipc endpoint of at most {_NAME_LIMIT} characters: {endpoint!r:.200}")
    return endpoint


def bind(kind: int, endpoint: str, *, max_message_bytes: int, queue: int = 1000) -> ZmqSocket:
    """A bound socket that closes other users' connections unread, and refuses messages over `max_message_bytes`.

    The kernel asks no permission for abstract names, so another user's connect succeeds; ZeroMQ then looks at the user
    id that the kernel vouches for (SO_PEERCRED) and closes.
    `queue` bounds the messages held in each direction and per peer. Raises `InvalidArgument` if the name is taken, and
    stays so for a second: ZeroMQ frees the name of a closed socket in a thread of its own, some time after `close`.
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
    deadline = time.monotonic() + _FREED_S
    while True:
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_S)


def connect(kind: int, endpoint: str, *, max_message_bytes: int, queue: int = 1000) -> ZmqSocket:
    """A socket connected to a bound one of this host (now, or as soon as that one exists)."""
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
    socket.setsockopt(zmq.LINGER, 0)  # closing never waits for a peer
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, queue)
    return socket


def send_now(socket: ZmqSocket, *frames: bytes) -> bool:
    """Send one message without blocking. False: the queue to the peer is full.

    ZeroMQ looks for freed room only every millisecond or so while sending, and a plain non-blocking send fails although
    the peer has read everything; asking for the socket's events makes it look.
    """
    for _ in range(2):
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
            return True
        except zmq.Again:
            socket.getsockopt(zmq.EVENTS)
    return False


def receive_all(socket: ZmqSocket) -> list[list[bytes]]:
    """Messages that wait now, at most 1000, each as its frames. Never blocks.

    A ZeroMQ file descriptor only reports *changes*: read until this returns an empty list before sleeping on one.
    """
    messages: list[list[bytes]] = []
    while len(messages) < _AT_ONCE:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages
