"""Session of a client with a pool: attachment, pending requests, liveness checks and sleeping."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Self, TypeVar

import numpy as np

from ipc.client.arena import ClientArena
from ipc.client.attachment import Attachment
from ipc.errors import InvalidArgument, IpcError, ProtocolViolation
from ipc.ring.descriptors import (
    LOST,
    REQUEST_HEADER,
    SEARCH,
    SEARCH_ARENA,
    Result,
    SearchSpec,
)
from ipc.ring.doorbell import SpinBudget
from ipc.ring.ring import CLOSED, DRAINING, EVICTED, RingProducer
from ipc.session.messages import DOORBELLS, EVENTFD, result_offset
from ipc.session.parameters import Limits, Packed, pack, pack_cancel

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """Cache of a function: memo[key] is `compute(key)`. After `most` different keys the cache is cleared."""

    def __init__(self, compute: Callable[[K], V], most: int = 4096) -> None:
        super().__init__()
        self._compute = compute
        self._most = most

    def __missing__(self, key: K) -> V:
        if len(self) >= self._most:
            self.clear()
        value = self[key] = self._compute(key)
        return value


# ---- pending requests

_NO_IDS, _NO_DISTANCES = np.empty(0, np.int64), np.empty(0, np.float32)


class PendingRequests(dict[int, int]):
    """Request id → enqueue_ns of requests without a result; with results not yet returned and cancels not yet sent."""

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 1
        self.results: list[Result] = []
        """Results that `poll` has not returned yet."""
        self.unsent_cancels: deque[int] = deque()
        """Cancellations that did not fit into the ring yet."""

    def withdraw(self, request_id: int) -> None:
        """Remove a request that could not be sent."""
        del self[request_id]
        self.next_id = request_id

    def send_cancellations(self, ring: RingProducer, epoch: int) -> bool:
        """Send the unsent cancellations that fit into the ring. Return whether the pool must be rung."""
        ring_it = False
        while self.unsent_cancels:
            request_id = self.unsent_cancels[0]
            if request_id in self:
                if ring.free() < 1:
                    break
                offset = ring.header_offsets[ring.loan()]
                REQUEST_HEADER.pack_into(ring.view, offset, request_id, 0, 0, pack_cancel(epoch))
                ring_it |= ring.send()
            self.unsent_cancels.popleft()
        return ring_it

    def fail_all(self) -> None:
        """End all requests with status 'lost'."""
        now = time.monotonic_ns()
        for request_id, enqueue_ns in self.items():
            self.results.append(Result(request_id, LOST, _NO_IDS, _NO_DISTANCES, 0, enqueue_ns, 0, 0, now))
        self.clear()
        self.unsent_cancels.clear()


_END_REASONS = {
    CLOSED: "the pool closed the session",
    EVICTED: "the pool evicted this client for a protocol violation",
}


class ClientSession:
    """Base of `RingClient`: everything but requests and results.

    `attachment`: rings and doorbells of this session; `pending`: requests without a result; `arena`: leased slots of
    the pool's arena, or None; `spin`: the spin budget of `wait`.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        doorbell: str = EVENTFD,
        spin_us: float = 1000.0,
        timeout_ms: float = 5000.0,
        arena: bool = False,
        top_m: int = 64,
    ) -> None:
        if doorbell not in DOORBELLS:
            raise InvalidArgument(f"doorbell must be one of {DOORBELLS}, got {doorbell!r}")
        self.endpoint = endpoint
        self.name = name
        self.spin = SpinBudget(int(spin_us * 1000))
        self.pending = PendingRequests()
        self._lost: str | None = None
        self._next_peer_check = self._cold_ns = 0
        self._open = True
        self.attachment = Attachment(endpoint, name, doorbell, timeout_ms, arena)
        answer = self.attachment.answer
        self.epoch = answer.epoch
        self.catalogue = answer.catalogue
        self.max_k = answer.max_k
        self.max_top_m = answer.max_top_m
        limits = Limits(self.catalogue, self.max_k, self.max_top_m)
        self.slots = answer.results.slots

        def packed(kind: int) -> Memo[SearchSpec, Packed]:
            return Memo(lambda spec: pack(spec, answer.epoch, limits, top_m, kind))

        self._packed, self._packed_in_arena = packed(SEARCH), packed(SEARCH_ARENA)
        self.in_place = {served.name for served in self.catalogue.served if served.in_place}
        """Collections whose pool reads vectors in its arena."""
        requests = (self.attachment.memory.address, result_offset(answer.requests))
        self.arena = None if answer.arena is None else ClientArena(answer.arena, requests)

    def _read_ring(self) -> None:
        """Move published results from the ring to `pending.results`."""
        raise NotImplementedError

    def _check_peer(self) -> None:
        if self._lost is not None:
            return
        try:
            state = self.attachment.requests.consumer_state
        except ProtocolViolation as error:
            self._end_session(str(error))
            return
        if state >= CLOSED:
            self._end_session(_END_REASONS[state])
        elif self.attachment.pool_died():
            self._end_session(f"the pool (process {self.attachment.answer.pid}) died")

    def _end_session(self, reason: str, *, read: bool = True) -> None:
        if read:  # results published before the end are still valid
            with contextlib.suppress(IpcError):
                self._read_ring()
        if self._lost is not None:
            return
        self._lost = reason
        self.pending.fail_all()
        self.attachment.ignore_death()

    # ---- sleeping

    def _sleep(self, left_ns: int) -> bool:
        """Spin, then sleep, both bounded. Return whether a result is in the ring."""
        if self.attachment.watch.spin(min(self.spin.ns, left_ns)) >= 0:
            return True
        begin = time.monotonic_ns() - self.spin.ns
        self._check_peer()
        ready = not self.pending.results and self.attachment.sleep(left_ns)
        self.spin.learn(time.monotonic_ns() - begin)
        return ready

    def fileno(self) -> int:
        """Readable when armed and a result has arrived, or when the pool has died; level-triggered."""
        return self.attachment.fileno()

    def arm(self) -> bool:
        """Request a doorbell for the next result. False: `poll` already has something to return, do not sleep."""
        self._check_peer()
        if self.pending.results:
            return False
        return self._lost is not None or self.attachment.arm()

    def disarm(self) -> None:
        """Cancel the doorbell request. Call this after each sleep, before polling."""
        if self._open:
            self.attachment.disarm()

    # ---- the session

    @property
    def lost(self) -> str | None:
        """Why the session has ended, or None while it is open (as far as known)."""
        return self._lost

    @property
    def draining(self) -> bool:
        """Whether the pool drains this session: it accepts no requests here, but possibly in a new session."""
        return self._lost is None and self.attachment.requests.consumer_state == DRAINING

    @property
    def outstanding(self) -> int:
        """Number of requests without a result."""
        return len(self.pending)

    def close(self) -> None:
        """End the session. Idempotent."""
        if self._open:
            self._open = False
            if self._lost is None:
                self._end_session("the client was closed")
            if self.arena is not None:  # before the end of the session, at which the pool may free it
                self.arena.close()
                self.arena = None
            self.attachment.close()

    @property
    def has_arena(self) -> bool:
        """Whether the pool has granted slots of its arena, and they are reachable as far as known."""
        return self.arena is not None and not self.arena.error

    def takes_in_place(self, spec: SearchSpec) -> bool:
        """Whether vectors of such requests may go through the arena: the host reads those of filtered requests."""
        return self.has_arena and not spec.filter and spec.collection in self.in_place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
