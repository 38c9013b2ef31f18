"""Link of a worker to the frontend: sends its Hello and its load, and receives its requests."""

import logging
import time
from collections.abc import Iterator

import msgspec
import zmq

from ipc.endpoints import connect, send_now
from ipc.errors import MALFORMED
from runtime.serving.kv.block_events import BATCH_KEYS, BlockEvents
from runtime.serving.malformed import MalformedMessages
from runtime.serving.messages import (
    Cancel,
    Hello,
    ListCached,
    Prefill,
    Release,
    Report,
    ToFrontend,
    Welcome,
    decode_to_worker,
    encode,
)

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 << 20  # of a prompt; the HTTP limit is far lower
_REPORT_INTERVAL_NS = 250_000_000  # at most; reports are also the worker's heartbeat for the frontend
_CACHED_INTERVAL_NS = 10_000_000  # at least, between batches that are not full


class FrontendLink:
    """DEALER socket of one worker. `frontend_epoch` is 0 until the frontend has sent its `Welcome`.

    `events`: the changes of its KV blocks, which are sent with the reports."""

    def __init__(self, endpoint: str, hello: Hello, events: BlockEvents) -> None:
        self.socket = connect(zmq.DEALER, endpoint, max_message_bytes=_MAX_MESSAGE_BYTES)
        self.frontend_epoch = 0
        self.malformed = MalformedMessages(log)
        self.released = False  # this worker drains and the frontend has no request on it
        self._hello, self._events = hello, events
        self._cached_ns = 0
        self._reported: Report | None = None
        self._reported_ns = 0
        self.send(hello)

    def receive(self) -> Iterator[Welcome | Prefill | Cancel]:
        """Yield received messages. A `Welcome` is yielded only from a new frontend: earlier requests are void then."""
        while self.socket.poll(0):
            try:
                message = decode_to_worker(self.socket.recv_multipart()[-1])
            except MALFORMED as error:
                self.malformed.record("the frontend", error)
                continue
            if isinstance(message, Release):
                self.released = True
                continue
            if isinstance(message, ListCached):
                self._events.restart()
                continue
            if isinstance(message, Welcome):
                if message.frontend_epoch == self.frontend_epoch:
                    continue
                self.frontend_epoch = message.frontend_epoch
                self.send(self._hello)
                self._events.restart()
            elif isinstance(message, Prefill) and message.frontend_epoch != self.frontend_epoch:
                continue
            yield message

    def send(self, message: ToFrontend) -> None:
        """Queue a message. Without a frontend it stays queued; the next one ignores messages of another epoch."""
        send_now(self.socket, encode(message))  # a full queue means a dead frontend, whose requests are void

    def report(
        self,
        queued: int,
        running: int,
        free_slots: int,
        draining: bool,
        free_blocks: int,
        step_ns: int = 0,
        load_saves: float = 0.0,
    ) -> None:
        """Send the changes of its KV blocks, and its load if it has changed or the report interval has passed."""
        now = time.monotonic_ns()
        self._send_cached(now)
        report = Report(
            self._hello.worker, self._hello.epoch, self.frontend_epoch, queued, running, free_slots, draining,
            free_blocks, step_ns, self._events.number, load_saves,
        )  # fmt: skip
        last = self._reported
        # Blocks and times change with nearly every step: alone they do not trigger a report.
        changed = last is None or last != msgspec.structs.replace(
            report,
            free_blocks=last.free_blocks,
            step_ns=last.step_ns,
            cached_batch=last.cached_batch,
            load_saves=last.load_saves,
        )
        if changed or now - self._reported_ns > _REPORT_INTERVAL_NS:
            self.send(report)
            self._reported, self._reported_ns = report, now

    def _send_cached(self, now_ns: int) -> None:
        """Send at most one batch, once the frontend is known: it is a small part of any step's time."""
        waits = self._events.pending < BATCH_KEYS and now_ns - self._cached_ns < _CACHED_INTERVAL_NS
        if self.frontend_epoch and not waits and (batch := self._events.take(self._hello.worker, self._hello.epoch)):
            self.send(batch)  # one that is lost leaves a gap in the numbers
            self._cached_ns = now_ns

    def close(self) -> None:
        self.socket.close()
