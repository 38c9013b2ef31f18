"""A worker's link to the frontend: introduces the worker, reports its load, and brings in what it is to do."""

import logging
import time
from collections.abc import Iterator

import msgspec
import zmq

from ipc.endpoints import connect, send_now
from ipc.errors import MALFORMED
from runtime.serving.messages import (
    Cancel,
    Hello,
    MalformedMessages,
    Prefill,
    Release,
    Report,
    ToFrontend,
    Welcome,
    decode_to_worker,
    encode,
)

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 << 20  # a prompt; HTTP bounds it far lower
_REPORT_NS = 250_000_000  # a report at least this often, so that the frontend sees that the worker lives


class FrontendLink:
    """The DEALER socket of one worker. `frontend_epoch` is 0 until the frontend has welcomed it."""

    def __init__(self, endpoint: str, hello: Hello) -> None:
        self.socket = connect(zmq.DEALER, endpoint, max_message_bytes=_MAX_MESSAGE_BYTES)
        self.frontend_epoch = 0
        self.malformed = MalformedMessages(log)
        self.released = False  # the frontend has nothing placed on this worker, which drains
        self._hello = hello
        self._reported: Report | None = None
        self._reported_ns = 0
        self.send(hello)

    def receive(self) -> Iterator[Welcome | Prefill | Cancel]:
        """What has come in. A `Welcome` is passed on only if the frontend is new: all earlier work is void then."""
        while self.socket.poll(0):
            try:
                message = decode_to_worker(self.socket.recv_multipart()[-1])
            except MALFORMED as error:
                self.malformed.record("the frontend", error)
                continue
            if isinstance(message, Release):
                self.released = True
                continue
            if isinstance(message, Welcome):
                if message.frontend_epoch == self.frontend_epoch:
                    continue
                self.frontend_epoch = message.frontend_epoch
                self.send(self._hello)
            elif isinstance(message, Prefill) and message.frontend_epoch != self.frontend_epoch:
                continue
            yield message

    def send(self, message: ToFrontend) -> None:
        """Queue a message. While no frontend runs it waits, and the next frontend ignores what is not its own."""
        send_now(self.socket, encode(message))  # a frontend that takes nothing is dead: its requests are void with it

    def report(
        self,
        queued: int,
        running: int,
        free_slots: int,
        draining: bool,
        free_blocks: int,
        evicted_ns: int,
        step_ns: int = 0,
    ) -> None:
        """Tell the worker's load if it has changed, or if it was told a while ago."""
        now = time.monotonic_ns()
        report = Report(
            self._hello.worker, self._hello.epoch, self.frontend_epoch, queued, running, free_slots, draining,
            free_blocks, evicted_ns, step_ns,
        )  # fmt: skip
        told = self._reported
        # Blocks and times change with nearly every step: they travel with the rest.
        changed = told is None or told != msgspec.structs.replace(
            report, free_blocks=told.free_blocks, evicted_ns=told.evicted_ns, step_ns=told.step_ns
        )
        if changed or now - self._reported_ns > _REPORT_NS:
            self.send(report)
            self._reported, self._reported_ns = report, now

    def close(self) -> None:
        self.socket.close()
