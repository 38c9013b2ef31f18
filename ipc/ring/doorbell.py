"""Doorbells, which wake a process that sleeps on an empty ring: by eventfd or by ZeroMQ.

A *sleeper* owns the bell: it polls `fileno()` for reading and calls `silence()` when awake. A *ringer*, usually in
another process, calls `ring()`, which never blocks; several rings before the sleeper wakes may be merged into one.
After `silence()` the next `ring()` makes `fileno()` readable again; `silence` may clear a ring just before it, so poll
the rings after it.

- **eventfd**: about 0.8 µs to ring. Descriptors travel as SCM_RIGHTS in one datagram to an abstract Unix socket that
  the receiver opens for it (`FdMailbox`); the kernel reports the sender's uid, and other users' are dropped.
- **ZeroMQ**: PUSH to PULL; works wherever sessions do, and costs about 100 µs more per wake-up.
"""

import array
import contextlib
import os
import select
import socket
import struct
import time
from typing import Protocol

import zmq

from ipc.endpoints import bind, connect, new_token, receive_all, send_now
from ipc.errors import AttachTimeout, InvalidArgument, PeerLost
from ipc.native.compiled import compiled
from ipc.native.records import Record, address_of, record, record_at

_BELL_BYTES = 1024  # a bell's message is empty, but the limit also applies to the connection's handshake
_MAILBOX_NAME_LIMIT = 100
_FDS_LIMIT = 8


class Sleeper(Protocol):
    """Owner's end of a doorbell."""

    def fileno(self) -> int: ...

    def silence(self) -> None: ...

    def close(self) -> None: ...


class Ringer(Protocol):
    """Other end of a doorbell."""

    def ring(self) -> None: ...

    def close(self) -> None: ...


class EventfdBell:
    """Both ends of an eventfd doorbell; each process has its own descriptor of the same eventfd."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if fd is None else fd

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is full: the bell already rings
            os.eventfd_write(self._fd, 1)

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ZmqSleeper:
    """Owner's end of a ZeroMQ doorbell, bound at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self._socket = bind(zmq.PULL, endpoint, max_message_bytes=_BELL_BYTES)
        self.silence()

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def silence(self) -> None:
        while receive_all(self._socket):
            pass

    def close(self) -> None:
        self._socket.close()


class ZmqRinger:
    """Other end of a ZeroMQ doorbell, connected to `endpoint`. Rings without a sleeper are dropped."""

    def __init__(self, endpoint: str) -> None:
        self._socket = connect(zmq.PUSH, endpoint, max_message_bytes=_BELL_BYTES, queue=16)

    def ring(self) -> None:
        send_now(self._socket, b"")  # if the queue is full, a ring is already on its way

    def close(self) -> None:
        self._socket.close()


class FdMailbox:
    """Abstract datagram socket that receives file descriptors from another process of this user."""

    def __init__(self) -> None:
        self.name = f"trinity-fds-{new_token()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self.name)

    def receive(self, token: bytes, count: int, timeout_ms: float) -> list[int]:
        """Return the `count` descriptors sent with this token; the caller owns them. Raises `AttachTimeout`.

        Datagrams of other users, with another token or another count are dropped, their descriptors closed.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        deadline = time.monotonic_ns() + int(timeout_ms * 1e6)
        while (left := deadline - time.monotonic_ns()) > 0:
            if not poller.poll(left / 1e6):
                continue
            sent_token, uid, fds = self._receive_datagram()
            if sent_token == token and uid == os.getuid() and len(fds) == count:
                return fds
            for fd in fds:
                os.close(fd)
        raise AttachTimeout(f"no file descriptors were received within {timeout_ms:.0f} ms")

    def _receive_datagram(self) -> tuple[bytes, int, list[int]]:
        room = socket.CMSG_SPACE(4 * _FDS_LIMIT) + socket.CMSG_SPACE(12)
        data, ancillary, _, _ = self._socket.recvmsg(64, room, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        uid = -1
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) // 4 * 4])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                _, uid, _ = struct.unpack("3i", content)
        return data, uid, fds.tolist()

    def close(self) -> None:
        self._socket.close()


def send_fds(mailbox: str, token: bytes, fds: list[int]) -> None:
    """Send descriptors to the `FdMailbox` of this name; never blocks. Raises `PeerLost` if it does not exist."""
    if not 0 < len(mailbox) <= _MAILBOX_NAME_LIMIT or "\0" in mailbox:
        raise InvalidArgument(f"a mailbox name has 1..{_MAILBOX_NAME_LIMIT} characters, got {mailbox!r:.200}")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendmsg([token], rights, socket.MSG_DONTWAIT, "\0" + mailbox)
        except (OSError, ValueError) as error:
            raise PeerLost(f"cannot send descriptors to {mailbox!r}: {error}") from error


# ---- spinning before a sleep


_MIN_SPIN_NS = 2_000
_LONG_WAITS = 2  # in a row, after which the spin is shortened


@record
class _Budget(Record):
    limit_ns: int
    next_ns: int  # spin of the next wait
    long_waits: int  # in a row


_budget_at = record_at(_Budget)


@compiled
def spin_ns(budget: int) -> int:
    """Return how long the next wait may spin, by the budget at this address."""
    return _budget_at(budget).next_ns


@compiled
def learn_wait(budget: int, waited_ns: int) -> None:
    """`SpinBudget.learn` for compiled code, by the budget's address."""
    own = _budget_at(budget)
    own.long_waits = own.long_waits + 1 if waited_ns > own.limit_ns else 0
    own.next_ns = min(_MIN_SPIN_NS, own.limit_ns) if own.long_waits >= _LONG_WAITS else own.limit_ns


class SpinBudget:
    """Adaptive limit of the next spin: `limit_ns`, but only 2 µs after two waits in a row that took longer.

    So an idle process does not burn its core, and a busy one does not sleep because of a single late reply: a wake-up
    takes longer than most waits of a busy phase (a budget of twice the usual wait was measured, and slower).
    """

    def __init__(self, limit_ns: int) -> None:
        self._budget = _Budget(limit_ns=limit_ns, next_ns=limit_ns)
        self.address = address_of(self._budget)

    @property
    def ns(self) -> int:
        return self._budget.next_ns

    def learn(self, waited_ns: int) -> None:
        """Record a wait that had to sleep and took `waited_ns` in all. (One that ends while spinning has no effect.)"""
        learn_wait(self.address, waited_ns)
