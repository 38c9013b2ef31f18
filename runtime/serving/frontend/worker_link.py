"""Engine that runs requests on the node's own prefill and decode workers, over one ZeroMQ ROUTER socket.

Workers introduce themselves (`Hello`), receive the frontend's epoch (`Welcome`) and report their load. A worker is lost
when it has been silent for `lost_after_ns`, when its connection is gone, or when another process sends `Hello` under
its name. A worker that was only slow rejoins with its next report.

A request whose worker is lost is restarted on other workers or ends with WorkerLost, once; its remaining worker
receives a `Cancel`. If the client has received nothing yet, it starts from the beginning. Otherwise it continues from
the tokens that the client has: they run through a prefill worker like a prompt (its prefix cache often holds most of
them), and a decode worker samples the next token. While a role has no ready worker, restarted requests wait for one,
for a bounded time; so do new ones, as all workers of a role may have died at once.

Everything but the receive loop is synchronous and reads the injected clock, so tests control the time (`tick`).
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
from runtime.errors import (
    DeadlineExceeded,
    Overloaded,
    ResponseTooLarge,
    TrinityError,
    Unavailable,
    WorkerLost,
    error_from_code,
)
from runtime.serving.frontend.engine import KEPT_TRACES, Engine, RestartLimits
from runtime.serving.frontend.requests import Request, RequestOutcome
from runtime.serving.frontend.router import Router
from runtime.serving.malformed import MalformedMessages
from runtime.serving.messages import (
    Cached,
    Cancel,
    Failed,
    Hello,
    ListCached,
    Release,
    Report,
    Retrieved,
    Role,
    Taken,
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
QUEUE = 10_000  # messages queued for one worker; a worker that lets more pile up counts as lost
_PROBE_AFTER_NS = 1_000_000_000  # silent for longer than the report interval: check the connection


@dataclass(slots=True)
class Peer:
    """Connection of a worker. A lost one stays known so that it can rejoin."""

    hello: Hello
    identity: bytes
    heard_ns: int
    lost: bool = False
    released: bool = False  # it has drained and was sent `Release`


class WorkerLink(Engine):
    """Binds `endpoint` and serves the workers that connect to it. Belongs to one event loop, `run` in a task.

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
        restarts: RestartLimits = RestartLimits(0),  # noqa: B008
        keep_traces: int = KEPT_TRACES,
    ) -> None:
        super().__init__(epoch=epoch, clock=clock, on_end=on_end, on_refused=on_refused, keep_traces=keep_traces)
        self.router, self.endpoint = router, endpoint
        self._lost_after_ns, self._limits = lost_after_ns, restarts
        self._waiting: dict[Request, tuple[int, TrinityError]] = {}  # for a worker: until when, and why
        self._peers: dict[str, Peer] = {}
        self._names: dict[bytes, str] = {}
        self._restarts = 0
        self._malformed = MalformedMessages(log, clock)
        self._zmq_socket = bind(zmq.ROUTER, endpoint, max_message_bytes=MAX_MESSAGE_BYTES, queue=QUEUE)
        self._zmq_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to an absent worker is an error
        self._zmq_socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted worker takes over its predecessor's identity
        self._socket = zmq.asyncio.Socket(self._zmq_socket)

    def missing(self) -> list[Role]:
        """Return the roles without a worker that accepts requests; empty when the node is ready."""
        return self.router.missing()

    @property
    def restarts(self) -> int:
        return self._restarts

    @property
    def malformed(self) -> int:
        return self._malformed.count

    def expect_no_worker(self) -> None:
        self._limits = RestartLimits(self._limits.times)

    def worker_lost(self, name: str, reason: str) -> None:
        """Remove a worker and restart its requests. A supervisor that detects the loss earlier may call it, too."""
        peer = self._peers.get(name)
        if peer is None or peer.lost:
            return
        level = logging.INFO if peer.released else logging.WARNING
        log.log(level, "%s worker %s is %s: %s", peer.hello.role, name, "gone" if peer.released else "lost", reason)
        peer.lost = True
        self.router.remove(name)
        for request in self.requests.of_worker(name):
            if request.runs_on(name):  # and was not moved meanwhile
                self._restart(request, WorkerLost(f"{peer.hello.role} worker {name!r} was lost: {reason}"))

    # ---- placement and restart of requests

    def _accept(self, request: Request, sent: dict[str, Any]) -> None:
        """Place a new request, or queue it while a role has no worker. Raises ContextLengthExceeded too."""
        try:
            self._place(request)
        except Unavailable as error:
            if not self._limits.times or not self._limits.wait_ns:
                raise
            if len(self.requests) >= self.router.max_in_flight:
                message = f"{error.message}; {len(self.requests)} requests are in flight or wait, the limit"
                raise Overloaded(message) from None
            self._wait(request, error)

    def _place(self, request: Request, avoid: str = "") -> None:
        """Choose workers and send the request to its prefill worker. `avoid` is used only if there is no other worker.

        Raises Overloaded, Unavailable or ContextLengthExceeded; nothing was sent then.
        """
        generation, resume = request.generation, request.resume()
        prompt = resume.tokens if resume else generation.prompt
        tokens = generation.sampling.max_tokens - (len(resume.generated) if resume else 0)
        tokens += len(prompt) if isinstance(prompt, tuple) else 1
        prefix = request.known_prefix(resume)
        while True:
            placement = self.router.place(
                prefix.blocks, tokens, avoid=avoid, blocks=prefix.whole, expected=generation.expected_tokens
            )
            if self._send(placement.prefill, request.message(self.epoch, placement, resume)):
                request.placement, request.placed = placement, True
                return
            self.router.finished(placement, prefilled=False)
            self.worker_lost(placement.prefill, "its connection is gone")  # the next iteration has one worker less

    def _wait(self, request: Request, error: TrinityError) -> None:
        """Queue a request until workers are ready; after the wait limit it ends with `error`."""
        self._waiting[request] = (min(request.deadline_ns, self._clock() + self._limits.wait_ns), error)

    def _restart(self, request: Request, error: WorkerLost, reported_by: str = "") -> None:
        """Cancel a request on its workers and place it anew; end it with `error` if its restarts are used up."""
        log.info("restarting: %s", error.message, extra={"request": request.id})
        self._cancel_on_workers(request, reported_by)
        self._unassign(request)
        limit = self._limits.times
        if request.attempts >= limit:
            if limit:
                error = WorkerLost(f"{error.message}; the limit of {limit} restarts is reached")
            self._fail(request, error)
            return
        self.requests.start_attempt(request)
        self._wait(request, error)
        # Prefill reports decode workers that it cannot reach before this end detects their loss.
        self._place_waiting(request, avoid=request.placement.decode if reported_by else "")

    def _place_waiting(self, request: Request, avoid: str = "") -> None:
        """Place a waiting request; end it if it has waited too long."""
        until_ns, error = self._waiting[request]
        try:
            self._place(request, avoid)
        except (Unavailable, Overloaded) as reason:
            if self._clock() >= until_ns:
                lost = WorkerLost(f"{error.message}, and no other worker accepted it: {reason.message}")
                self._fail(request, lost if request.attempts else reason)
        except TrinityError as reason:
            self._fail(request, reason)
        else:
            del self._waiting[request]
            if request.attempts:
                self._restarts += 1
                log.info("request %s restarts after %d tokens", request.id, request.delivered.count)

    def _unassign(self, request: Request) -> None:
        """Take a request off its workers and out of the queue."""
        self._waiting.pop(request, None)
        if request.placed:
            request.placed = False
            self.router.finished(request.placement, prefilled=request.prefilled)

    def _cancel_on_workers(self, request: Request, reported_by: str) -> None:
        if request.placed:
            for name in {request.placement.prefill, request.placement.decode} - {reported_by}:
                self._send(name, Cancel(request.attempt_id))

    def _fail(self, request: Request, error: TrinityError, reported_by: str = "") -> None:
        self._cancel_on_workers(request, reported_by)
        self.requests.fail(request, error)

    def _ended(self, outcome: RequestOutcome, request: Request) -> None:
        self._unassign(request)
        super()._ended(outcome, request)

    # ---- the loop

    async def run(self) -> None:
        """Receive until cancelled; requests still in flight then end with WorkerLost."""
        ticking = asyncio.create_task(self._tick_forever())
        try:
            while True:
                for _ in range(BURST):
                    self.handle(await self._socket.recv_multipart())
                await asyncio.sleep(0)  # receiving queued messages does not yield: let the responses be sent
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            self.end_all(WorkerLost("the frontend is stopping"))

    def tick(self) -> None:
        """Detect silent workers, place waiting requests, and end those whose deadline has passed."""
        now, limit_ns = self._clock(), self._lost_after_ns
        for name, peer in list(self._peers.items()):
            silent_ns = now - peer.heard_ns
            if not peer.lost and silent_ns > limit_ns:
                self.worker_lost(name, f"silent for {silent_ns / 1e9:.1f} s, the limit is {limit_ns / 1e9:.1f} s")
            elif not peer.lost and silent_ns > _PROBE_AFTER_NS and not self._send(name, Welcome(self.epoch)):
                self.worker_lost(name, "its connection is gone")
        for request in list(self._waiting):
            if request in self._waiting:
                self._place_waiting(request)
        for request in self.requests.expired(now):
            stage, tokens = "decode" if request.prefilled else "prefill", request.delivered.count
            error = DeadlineExceeded(f"the request's deadline passed in {stage}, after {tokens} tokens")
            self._fail(request, error)

    def close(self) -> None:
        """Close the socket without waiting."""
        self._socket.close()
        self._zmq_socket.close()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick()

    # ---- messages from workers

    def handle(self, frames: list[bytes]) -> None:
        """Process one message of a worker."""
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
        elif isinstance(message, Cached):
            self.router.cached(message)
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
                self._sender(identity), f"a Hello with {hello.slots} slots from worker {hello.worker[:40]!r}"
            )
            return
        if known is not None and known.hello == hello and known.identity == identity and not known.lost:
            known.heard_ns = self._clock()  # the same process repeats it after its first Welcome
        else:
            if known is not None:
                # Another process or connection: what the previous one held or sent may be lost.
                renewed = "its connection was renewed" if hello.epoch == known.hello.epoch else "it was restarted"
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
            self._hello(identity, peer.hello)  # ZeroMQ has reconnected without the worker noticing
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
        if self.router.should_list(report.worker):
            self._send(report.worker, ListCached())
        if report.draining and not self.router.assigned(report.worker):
            peer.released = self._send(report.worker, Release())

    def _answer(self, identity: bytes, message: Retrieved | Tokens | Taken | Failed) -> None:
        name = self._names.get(identity)
        if name is None:
            self._welcome_unknown(identity)
            return
        peer = self._peers[name]
        peer.heard_ns = self._clock()
        request = self.requests.get(message.request_id)
        if request is None or not request.placed or name not in (request.placement.prefill, request.placement.decode):
            if not isinstance(message, Failed) and not (isinstance(message, Tokens) and message.finish_reason):
                self._send(name, Cancel(message.request_id))  # it still works on an ended request
        elif isinstance(message, Failed):
            error = error_from_code(message.code, message.message, message.param)
            if isinstance(error, WorkerLost):
                self._restart(request, error, reported_by=name)
            else:
                self._fail(request, error, reported_by=name)
        else:
            if isinstance(message, Tokens | Taken) and not request.prefilled:
                request.prefilled = True
                self.router.prefilled(request.placement)
            if isinstance(message, Taken):
                return
            if isinstance(message, Tokens):
                request.first_token_ns = request.first_token_ns or self._clock()
            self.traces.record(request, message)
            try:
                self.requests.deliver(message)
            except ResponseTooLarge as error:
                self._fail(request, error)
            if (computed := request.computed_prefix()) is not None:
                self.router.learn(*computed)

    def _evict_lost(self) -> None:
        for name, peer in list(self._peers.items()):
            if peer.lost:
                del self._peers[name]
                self._names.pop(peer.identity, None)

    def _welcome_unknown(self, identity: bytes) -> None:
        """Welcome a worker of an earlier frontend, which then sends its Hello to this one."""
        self._send_to(identity, Welcome(self.epoch))

    # ---- messages to workers

    def _send(self, name: str, message: ToWorker) -> bool:
        peer = self._peers.get(name)
        return peer is not None and self._send_to(peer.identity, message)

    def _send_to(self, identity: bytes, message: ToWorker) -> bool:
        """Send without waiting. Return False if the worker is not connected or its queue is full."""
        if self._socket.closed:
            return False
        sending = self._socket.send_multipart([identity, encode(message)], flags=zmq.DONTWAIT)
        sent = cast("asyncio.Future[object]", sending)  # already done because of DONTWAIT
        return sent.exception() is None
