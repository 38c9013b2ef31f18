"""Where a pool's clients come and go: the session socket, the pool's ends of their doorbells, and their deaths."""

import contextlib
import select

import zmq

from ipc.endpoints import bind, receive_all, send_now
from ipc.errors import MALFORMED, InvalidArgument
from ipc.ring.doorbell import EventfdBell, Ringer, ZmqRinger, ZmqSleeper, send_fds
from ipc.session.messages import EVENTFD, MAX_MESSAGE_BYTES, ZEROMQ, Attach, Attached, Refused, decode_attach, encode

ASKED = -1
"""Stands for the session socket in what `Reception.listen` returns."""


class Reception:
    """Bound at `endpoint`. Raises `InvalidArgument` if that is taken, or no private endpoint."""

    def __init__(self, endpoint: str) -> None:
        with contextlib.ExitStack() as undo:
            self._socket = bind(zmq.ROUTER, endpoint, max_message_bytes=MAX_MESSAGE_BYTES)
            undo.callback(self._socket.close)
            self.bell_endpoint = f"{endpoint}-bell"
            """Where clients with ZeroMQ doorbells ring."""
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
        """Readable when a doorbell, a session message or a watched process wants attention; level-triggered."""
        return self._epoll.fileno()

    @property
    def bell_fileno(self) -> int:
        """Of the eventfd that clients ring."""
        return self._bell_fd

    def listen(self) -> set[int]:
        """The pidfds of watched processes that have died, and `ASKED` if messages may wait; bells are silenced."""
        heard: set[int] = set()
        for fd, _ in self._epoll.poll(0):
            if fd == self._bell_fd:
                self._bell.silence()
            elif fd == self._zmq_bell_fd:
                self._zmq_bell.silence()
            else:
                heard.add(ASKED if fd == self._socket_fd else fd)
        return heard

    def asks(self) -> list[tuple[bytes, Attach | Refused]]:
        """Who asks to be attached, and as whom to answer them; a refusal where the message was none."""
        found: list[tuple[bytes, Attach | Refused]] = []
        while messages := receive_all(self._socket):
            for frames in messages:
                try:
                    found.append((frames[0], decode_attach(frames[-1]) if len(frames) == 2 else Refused("odd frames")))
                except MALFORMED as error:
                    found.append((frames[0], Refused(f"malformed message: {error}")))
        return found

    def answer(self, asker: bytes, answer: Attached | Refused) -> None:
        """An asker that does not read gets nothing."""
        send_now(self._socket, asker, encode(answer))

    def ringer(self, attach: Attach, token: bytes) -> Ringer:
        """The bell that wakes a client, once both have each other's. Raises `InvalidArgument` or `PeerLost`."""
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

    def watch(self, pidfd: int) -> None:
        self._epoll.register(pidfd, select.EPOLLIN)

    def unwatch(self, pidfd: int) -> None:
        self._epoll.unregister(pidfd)

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def close(self) -> None:
        self._epoll.close()
        self._socket.close()
        self._zmq_bell.close()
        self._bell.close()
