"""Attachment of a client to a pool process: the resources of one session."""

import contextlib
import os
import select
import time

import zmq

from ipc.endpoints import connect, new_token, receive_all
from ipc.errors import MALFORMED, AttachRefused, AttachTimeout, PeerLost, ProtocolViolation
from ipc.memory.shared import SharedMemory
from ipc.ring.doorbell import EventfdBell, FdMailbox, Ringer, Sleeper, ZmqRinger, ZmqSleeper
from ipc.ring.filters import FilterWriter
from ipc.ring.ring import RingConsumer, RingProducer, Watch
from ipc.session.messages import (
    EVENTFD,
    MAX_MESSAGE_BYTES,
    VERSION,
    Attach,
    Attached,
    Refused,
    decode_answer,
    encode,
    filter_offset,
    result_offset,
    session_bytes,
)

MAX_SESSION_BYTES = 1 << 32
SLEEP_NS = 100_000_000  # longest sleep, in case a doorbell is missed


class Attachment:
    """Rings, doorbells and the pidfd of a pool process. All or nothing; raises as `RingClient` documents."""

    def __init__(self, endpoint: str, name: str, doorbell: str, timeout_ms: float, arena: bool) -> None:
        deadline = time.monotonic_ns() + int(timeout_ms * 1e6)
        with contextlib.ExitStack() as undo:
            mailbox: FdMailbox | None = None
            if doorbell == EVENTFD:
                mailbox = FdMailbox()
                undo.callback(mailbox.close)
                bell = mailbox.name
            else:
                bell = f"{endpoint[:60]}-{new_token()}"
                self.sleeper: Sleeper = ZmqSleeper(bell)
                undo.callback(self.sleeper.close)
            answer = _request_attach(endpoint, Attach(VERSION, name, os.getpid(), doorbell, bell, arena), deadline)
            self.answer = answer
            self.ringer: Ringer
            if mailbox is not None:
                left_ms = max((deadline - time.monotonic_ns()) / 1e6, 1.0)
                ringer_fd, sleeper_fd = mailbox.receive(answer.token, 2, left_ms)
                self.ringer, self.sleeper = EventfdBell(ringer_fd), EventfdBell(sleeper_fd)
                undo.callback(self.sleeper.close)
            else:
                self.ringer = ZmqRinger(answer.bell)
            undo.callback(self.ringer.close)
            try:
                self.pidfd = os.pidfd_open(answer.pid)
            except OSError as error:
                raise PeerLost(f"the pool (process {answer.pid}) is gone: {error.strerror}") from error
            undo.callback(os.close, self.pidfd)
            self.map_rings(answer)
            undo.callback(self.memory.close)
            if isinstance(self.ringer, EventfdBell):
                self.requests.ring_with(self.ringer.fileno())
            self._epoll = select.epoll()
            self._epoll.register(self.sleeper.fileno(), select.EPOLLIN)
            self._epoll.register(self.pidfd, select.EPOLLIN)
            # Last: from here on the pool keeps the session; one that is not joined in time is removed.
            self.results.join()
            undo.pop_all()
        if mailbox is not None:
            mailbox.close()

    def map_rings(self, answer: Attached) -> None:
        """Map the rings that the pool has announced. Raises `ProtocolViolation` for inconsistent sizes."""
        layouts, max_k, max_dim = (answer.requests, answer.results), answer.max_k, answer.catalogue.max_dim
        if 4 * max_dim != layouts[0].payload_bytes:
            raise ProtocolViolation(f"dimension {max_dim} does not fit payloads of {layouts[0].payload_bytes} bytes")
        if max_k < 1 or 12 * max_k != layouts[1].payload_bytes:
            raise ProtocolViolation(f"max_k {max_k} does not fit payloads of {layouts[1].payload_bytes} bytes")
        split = result_offset(layouts[0])
        if (size := session_bytes(*layouts)) != answer.memory.size:
            raise ProtocolViolation(f"rings and filters of {size} bytes in a memory of {answer.memory.size}")
        self.memory = SharedMemory.open(answer.memory, max_size=MAX_SESSION_BYTES, writable=True)
        try:
            view = self.memory.view
            self.requests = RingProducer(view[: layouts[0].size], layouts[0], answer.epoch)
            self.results = RingConsumer(view[split : split + layouts[1].size], layouts[1], answer.epoch)
            self.filters = FilterWriter(view[filter_offset(*layouts) :])
        except BaseException:
            self.memory.close()
            raise
        self.watch = Watch([self.results])

    def pool_died(self) -> bool:
        return any(fd == self.pidfd for fd, _ in self._epoll.poll(0))

    def ignore_death(self) -> None:
        """Stop watching the pool: a dead process would keep `fileno()` readable forever."""
        with contextlib.suppress(OSError):
            self._epoll.unregister(self.pidfd)

    def fileno(self) -> int:
        """Readable when the pool rings or dies."""
        return self._epoll.fileno()

    def arm(self) -> bool:
        """Request a doorbell. False: a result is already available."""
        if self.watch.arm():
            return True
        self.watch.disarm()
        return False

    def sleep(self, at_most_ns: int) -> bool:
        """Sleep until a result arrives, the pool dies, or the timeout. Return whether there is a result."""
        self.sleeper.silence()
        return self.watch.sleep(self.fileno(), min(at_most_ns, SLEEP_NS))

    def disarm(self) -> None:
        self.watch.disarm()
        self.sleeper.silence()

    def close(self) -> None:
        self.requests.close()
        self.ringer.ring()
        self._epoll.close()
        os.close(self.pidfd)
        self.sleeper.close()
        self.ringer.close()
        # The last view of the mapping unmaps it.
        del self.requests, self.results, self.watch, self.filters
        self.memory.close()


def _request_attach(endpoint: str, attach: Attach, deadline: int) -> Attached:
    socket = connect(zmq.DEALER, endpoint, max_message_bytes=MAX_MESSAGE_BYTES)
    try:
        socket.send(encode(attach))
        while (left := deadline - time.monotonic_ns()) > 0:
            socket.poll(max(left // 1_000_000, 1))
            for frames in receive_all(socket):
                try:
                    answer: Attached | Refused = decode_answer(frames[-1])
                except MALFORMED as error:
                    raise ProtocolViolation(f"the pool at {endpoint} sent a malformed answer: {error}") from error
                if isinstance(answer, Refused):
                    raise AttachRefused(f"the pool at {endpoint} refuses: {answer.reason}")
                if answer.version != VERSION:
                    raise ProtocolViolation(f"the pool speaks version {answer.version}, this client {VERSION}")
                return answer
    finally:
        socket.close()
    raise AttachTimeout(f"no pool answered at {endpoint}")
