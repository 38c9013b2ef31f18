"""The frontend's link to its workers: who is there, what they are given, what comes back, and what a death ends.

One ROUTER socket. Workers introduce themselves (`Hello`), are welcomed with the frontend's epoch, and report their
load. A worker is gone when it has been silent for `lost_after_ns`, when its connection is, or when another process
says `Hello` under its name: its requests are started again elsewhere (`engine.py`), or end with WorkerLost, once, and
their other worker is told to forget them. A worker that was only slow comes back with its next report.

Everything but the socket's receive loop is synchronous and reads the time from the injected clock, so that tests
decide what time it is (`tick`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import zmq
import zmq.asyncio

from ipc.endpoints import bind
from ipc.errors import MALFORMED
from runtime.errors import DeadlineExceeded, TrinityError, Unavailable, WorkerLost, error_from_code
from runtime.serving.frontend.engine import Engine, EngineStatistics, RestartLimits, Starts
from runtime.serving.frontend.requests import Request, RequestOutcome
from runtime.serving.frontend.router import Router
from runtime.serving.messages import (
    Cancel,
    Failed,
    Hello,
    MalformedMessages,
    Release,
    Report,
    Retrieved,
    Role,
    Tokens,
    ToWorker,
    Welcome,
    decode_to_frontend,
    encode,
)

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 8 << 20  # of one message from a worker: a long prompt's tokens are the largest
MAX_WORKERS = 256
MAX_NAME = 128
TICK_SECONDS = 0.1
BURST = 32
QUEUE = 10_000  # messages that may wait for one worker; one that lets more gather is taken for lost
_PROBE_AFTER_NS = 1_000_000_000  # silent for longer than between two reports: see whether it is still there


@dataclass(slots=True)
class Peer:
    """A worker's connection. One that is lost stays known, so that it can come back."""

    hello: Hello
    identity: bytes
    heard_ns: int
    lost: bool = False
    released: bool = False  # told that it may go: it had drained


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatistics(EngineStatistics):
    """`workers` by role, those that answer; `stale` counts messages that were dropped."""

    workers: dict[Role, int]
    lost_workers: int
    stale: int


class WorkerLink(Engine):
    """Binds `endpoint` and serves the workers that connect to it. Lives in one event loop, `run` in a task.

    Raises `ipc.errors.InvalidArgument` when the endpoint is taken.
    """

    def __init__(
        self,
        endpoint: str,
        router: Router,
        *,
        epoch: int,
        clock: Callable[[], int] = time.monotonic_ns,
        lost_after_ns: int = 10_000_000_000,
        on_end: Callable[[RequestOutcome], None] | None = None,
        on_refused: Callable[[TrinityError], None] | None = None,
        restarts: RestartLimits = RestartLimits(),  # noqa: B008
        keep_traces: int = 0,
    ) -> None:
        super().__init__(epoch=epoch, clock=clock, on_end=on_end, on_refused=on_refused, keep_traces=keep_traces)
        self.router = router
        self._lost_after_ns = lost_after_ns
        self._starts = Starts(
            router,
            self.requests,
            restarts,
            epoch=epoch,
            clock=clock,
            send=self._send,
            lost=self.worker_lost,
            end=self._fail,
        )
        self._peers: dict[str, Peer] = {}
        self._names: dict[bytes, str] = {}
        self._lost_workers = self._stale = 0
        self._malformed = MalformedMessages(log, clock)
        self.endpoint = endpoint
        self._zmq_socket = bind(zmq.ROUTER, endpoint, max_message_bytes=MAX_MESSAGE_BYTES, queue=QUEUE)
        self._zmq_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a worker that is not there is an error, not silence
        self._zmq_socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted worker takes over its predecessor's identity
        self._socket = zmq.asyncio.Socket(self._zmq_socket)

    # ---- for the routes

    def missing(self) -> list[Role]:
        """The roles without a worker that takes requests; empty when the node is ready."""
        return self.router.missing()

    def _accept(self, request: Request, sent: dict[str, Any]) -> None:
        """Place it and send it off. While a role has no worker it waits for one. Raises ContextLengthExceeded too."""
        try:
            self._starts.start(request)
        except Unavailable as error:
            self._starts.wait(request, error)

    def worker_lost(self, name: str, reason: str) -> None:
        """A worker is gone: end its requests. Called by the link itself; a supervisor that knows sooner may call it."""
        peer = self._peers.get(name)
        if peer is None or peer.lost:
            return
        level = logging.INFO if peer.released else logging.WARNING
        log.log(level, "%s worker %s is %s: %s", peer.hello.role, name, "gone" if peer.released else "lost", reason)
        peer.lost = True
        self._lost_workers += 1
        self.router.remove(name)
        for request in self.requests.of_worker(name):
            if request.runs_on(name):  # and was not moved meanwhile
                self._restart(request, WorkerLost(f"{peer.hello.role} worker {name!r} was lost: {reason}"))

    def statistics(self) -> LinkStatistics:
        """A snapshot of the link's counters."""
        answering = [worker.hello.role for worker in self.router.workers()]
        workers: dict[Role, int] = {"prefill": answering.count("prefill"), "decode": answering.count("decode")}
        return LinkStatistics(
            workers=workers, in_flight=len(self.requests), lost_workers=self._lost_workers,
            restarts=self._starts.restarts, stale=self._stale, malformed=self._malformed.count,
        )  # fmt: skip

    # ---- the loop

    async def run(self) -> None:
        """Receive until cancelled; requests still in flight then end with WorkerLost."""
        ticking = asyncio.create_task(self._tick_forever())
        try:
            while True:
                for _ in range(BURST):
                    self.handle(await self._socket.recv_multipart())
                await asyncio.sleep(0)  # receiving what is there already does not yield: let the answers out
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            self.end_all(WorkerLost("the frontend is stopping"))

    def tick(self) -> None:
        """End what is late, and what belongs to workers that have fallen silent."""
        now = self._clock()
        for name, peer in list(self._peers.items()):
            silent = now - peer.heard_ns
            if not peer.lost and silent > self._lost_after_ns:
                self.worker_lost(
                    name, f"silent for {silent / 1e9:.1f} s, the limit is {self._lost_after_ns / 1e9:.1f} s"
                )
            elif not peer.lost and silent > _PROBE_AFTER_NS and not self._send(name, Welcome(self.epoch)):
                self.worker_lost(name, "its connection is gone")
        self._starts.retry()
        for request in self.requests.expired(now):
            where = "decode" if request.prefilled else "prefill"
            self._fail(
                request,
                DeadlineExceeded(f"the request's deadline passed in {where}, after {request.delivered.count} tokens"),
            )

    def close(self) -> None:
        """Close the socket; nothing is waited for."""
        self._socket.close()
        self._zmq_socket.close()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick()

    # ---- what workers say

    def handle(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            message = decode_to_frontend(frames[1]) if len(frames) == 2 else None
        except MALFORMED as error:
            self._malformed.record(self._sender(identity), error)
            return
        if message is None:
            self._malformed.record(self._sender(identity), f"{len(frames) - 1} frames")
        elif isinstance(message, Hello):
            self._hello(identity, message)
        elif isinstance(message, Report):
            self._report(identity, message)
        else:
            self._answer(identity, message)

    def _sender(self, identity: bytes) -> str:
        return f"worker {self._names.get(identity, '?')}"

    def _hello(self, identity: bytes, hello: Hello) -> None:
        known = self._peers.get(hello.worker)
        if known is None and len(self._peers) >= MAX_WORKERS:
            self._evict_lost()
        if len(hello.worker) > MAX_NAME or hello.slots < 1 or (known is None and len(self._peers) >= MAX_WORKERS):
            self._malformed.record(
                self._sender(identity), f"a worker of {hello.slots} slots that calls itself {hello.worker[:40]!r}"
            )
            return
        if known is not None and known.hello == hello and known.identity == identity and not known.lost:
            known.heard_ns = self._clock()  # the same process once more: its first Welcome was a new epoch to it
        else:
            if known is not None:
                # Another process, or another connection: whatever the last one held or sent may be gone with it.
                renewed = "its connection was renewed" if hello.epoch == known.hello.epoch else "it was started anew"
                self.worker_lost(hello.worker, renewed)
                self._names.pop(known.identity, None)
            self._peers[hello.worker] = Peer(hello, identity, self._clock())
            self._names[identity] = hello.worker
            self.router.add(hello)
        self._send(hello.worker, Welcome(self.epoch))

    def _report(self, identity: bytes, report: Report) -> None:
        peer = self._peers.get(report.worker)
        if peer is None or peer.hello.epoch != report.epoch:
            self._welcome_unknown(identity)
            return
        if peer.identity != identity:
            self._hello(identity, peer.hello)  # ZeroMQ has reconnected; the worker itself did not notice
            return
        peer.heard_ns = self._clock()
        if report.frontend_epoch != self.epoch:
            self._send(report.worker, Welcome(self.epoch))
            return
        if peer.lost:
            log.info("%s worker %s is back", peer.hello.role, report.worker)
            peer.lost = peer.released = False
            self.router.add(peer.hello)
        self.router.report(report)
        if report.draining and not self.router.assigned(report.worker):
            peer.released = self._send(report.worker, Release())

    def _answer(self, identity: bytes, message: Retrieved | Tokens | Failed) -> None:
        name = self._names.get(identity)
        if name is None:
            self._welcome_unknown(identity)
            return
        peer = self._peers[name]
        peer.heard_ns = self._clock()
        request = self.requests.get(message.request_id)
        if request is None or not request.placed or name not in (request.placement.prefill, request.placement.decode):
            self._stale += 1
            if not isinstance(message, Failed) and not (isinstance(message, Tokens) and message.finish_reason):
                self._send(name, Cancel(message.request_id))  # it goes on with what has ended: say it again
        elif isinstance(message, Failed):
            error = error_from_code(message.code, message.message, message.param)
            if isinstance(error, WorkerLost):
                self._restart(request, error, reported_by=name)
            else:
                self._fail(request, error, reported_by=name)
        else:
            if isinstance(message, Tokens) and not request.prefilled:
                request.prefilled = True
                request.first_token_ns = request.first_token_ns or self._clock()
                self.router.prefilled(request.placement)
            self.traces.record(request, message)
            self.requests.deliver(message)

    def _evict_lost(self) -> None:
        for name, peer in list(self._peers.items()):
            if peer.lost:
                del self._peers[name]
                self._names.pop(peer.identity, None)

    def _welcome_unknown(self, identity: bytes) -> None:
        """A worker that this frontend does not know: it served the last one, and has yet to say Hello to this."""
        self._stale += 1
        self._send_to(identity, Welcome(self.epoch))

    # ---- what they are told

    def _fail(self, request: Request, error: TrinityError, reported_by: str = "") -> None:
        """End a request with an error, and have both its workers forget it."""
        self._cancel_on_workers(request, reported_by)
        self.requests.fail(request, error)

    def _restart(self, request: Request, error: WorkerLost, reported_by: str = "") -> None:
        """Have both its workers forget a request, and start it anew."""
        log.info("is to start again: %s", error.message, extra={"request": request.id})
        self._cancel_on_workers(request, reported_by)
        # Prefill tells of decode workers that it cannot reach before they are known to be lost.
        self._starts.again(request, error, avoid=request.placement.decode if reported_by else "")

    def _cancel_on_workers(self, request: Request, reported_by: str) -> None:
        if request.placed:
            for name in {request.placement.prefill, request.placement.decode} - {reported_by}:
                self._send(name, Cancel(request.attempt_id))

    def _ended(self, ended: RequestOutcome, request: Request) -> None:
        self._starts.leave(request)
        super()._ended(ended, request)

    def _send(self, name: str, message: ToWorker) -> bool:
        peer = self._peers.get(name)
        return peer is not None and self._send_to(peer.identity, message)

    def _send_to(self, identity: bytes, message: ToWorker) -> bool:
        """Send without waiting; False when the worker is not there, or lets its messages pile up."""
        if self._socket.closed:
            return False
        sending = self._socket.send_multipart([identity, encode(message)], flags=zmq.DONTWAIT)
        sent = cast("asyncio.Future[object]", sending)  # with DONTWAIT it is done at once
        return sent.exception() is None
