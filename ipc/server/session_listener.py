"""Events of a pool's clients: attach requests on the session socket, doorbells, and deaths of client processes."""

import contextlib
import select

import zmq

from ipc.endpoints import bind, receive_all, send_now
from ipc.errors import MALFORMED, InvalidArgument
from ipc.ring.doorbell import EventfdBell, Ringer, ZmqRinger, ZmqSleeper, send_fds
from ipc.session.messages import EVENTFD, MAX_MESSAGE_BYTES, ZEROMQ, Attach, Attached, Refused, decode_attach, encode

ATTACH_PENDING = -1
"""Stands for the session socket in the result of `SessionListener.poll_events`."""


class SessionListener:
    """Session socket, doorbells and pidfds in one epoll. Raises `InvalidArgument` for a taken or invalid endpoint."""

    def __init__(self, endpoint: str) -> None:
        with contextlib.ExitStack() as undo:
            self._socket = bind(zmq.ROUTER, endpoint, max_message_bytes=MAX_MESSAGE_BYTES)
            undo.callback(self._socket.close)
            self.bell_endpoint = f"{endpoint}-bell"
            """Endpoint that clients with ZeroMQ doorbells ring."""
            self._zmq_bell = ZmqSleeper(self.bell_endpoint)
            undo.callback(self._zmq_bell.close)
            self._bell = EventfdBell()
            undo.callback(self._bell.close)
            self._epoll = select.epoll()
            undo.pop_all()
        self._bell_fd = self._bell.fileno()
        self._zmq_bell_fd = self._zmq_bell.fileno()
        self._socket_fd = int(self._socket.getsockopt(zmq.FD))
        for fd in (self._bell_fd, self._zmq_bell_fd, self._socket_fd):
            self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable on a doorbell, a session message or the death of a watched process; level-triggered."""
        return self._epoll.fileno()

    @property
    def bell_fileno(self) -> int:
        """File descriptor of the eventfd that clients ring."""
        return self._bell_fd

    def poll_events(self) -> set[int]:
        """Return the watched descriptors that are readable, as pidfds of dead processes are, and `ATTACH_PENDING` if
        messages may wait. Silences the bells."""
        events: set[int] = set()
        for fd, _ in self._epoll.poll(0):
            if fd == self._bell_fd:
                self._bell.silence()
            elif fd == self._zmq_bell_fd:
                self._zmq_bell.silence()
            else:
                events.add(ATTACH_PENDING if fd == self._socket_fd else fd)
        return events

    def receive_attaches(self) -> list[tuple[bytes, Attach | Refused]]:
        """Return pending attach requests with their senders' identities; a refusal for a malformed message."""
        attaches: list[tuple[bytes, Attach | Refused]] = []
        while messages := receive_all(self._socket):
            for frames in messages:
                try:
                    attaches.append(
                        (frames[0], decode_attach(frames[-1]) if len(frames) == 2 else Refused("odd frames"))
                    )
                except MALFORMED as error:
                    attaches.append((frames[0], Refused(f"malformed message: {error}")))
        return attaches

    def reply(self, sender: bytes, answer: Attached | Refused) -> None:
        """Send a reply; it is dropped if the sender's queue is full."""
        send_now(self._socket, sender, encode(answer))

    def open_bell(self, attach: Attach, token: bytes) -> Ringer:
        """Exchange doorbells with a client and return the one that wakes it. Raises `InvalidArgument`, `PeerLost`."""
        if attach.doorbell == ZEROMQ:
            return ZmqRinger(attach.bell)
        if attach.doorbell != EVENTFD:
            raise InvalidArgument(f"no such doorbell: {attach.doorbell!r:.100}")
        bell = EventfdBell()
        try:
            send_fds(attach.bell, token, [self._bell.fileno(), bell.fileno()])
        except BaseException:
            bell.close()
            raise
        return bell

    @property
    def has_events(self) -> bool:
        """Whether the descriptor is readable."""
        return bool(self._epoll.poll(0, 1))

    def watch(self, fd: int) -> None:
        """Make the descriptor readable also when `fd`, of a process or of the server's owner, is."""
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        self._epoll.unregister(fd)

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def close(self) -> None:
        self._epoll.close()
        self._socket.close()
        self._zmq_bell.close()
        self._bell.close()
