"""A client's session with a pool: attached, looked after, slept in, lost."""

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
from ipc.session.messages import DOORBELLS, EVENTFD, ClientStatistics
from ipc.session.parameters import Limits, Packed, pack, pack_cancel

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """memo[key] is `work_out(key)`, done once; after `most` different keys all are forgotten and worked out anew."""

    def __init__(self, work_out: Callable[[K], V], most: int = 4096) -> None:
        super().__init__()
        self._work_out = work_out
        self._most = most

    def __missing__(self, key: K) -> V:
        if len(self) >= self._most:
            self.clear()
        value = self[key] = self._work_out(key)
        return value


# ---- what a client has asked and was not told yet: its requests, results not yet returned, cancellations not yet sent


_NO_IDS, _NO_DISTANCES = np.empty(0, np.int64), np.empty(0, np.float32)


class Outstanding(dict[int, int]):
    """Request id → enqueue_ns, from submission to result."""

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 1
        self.ended: list[Result] = []
        """Read or lost, not yet returned."""
        self.unsent: deque[int] = deque()
        """Cancellations for which the ring has had no room yet."""

    def withdraw(self, ids: range) -> None:
        """They were not sent."""
        for request_id in ids:
            del self[request_id]
        self.next_id = ids.start

    def send_cancellations(self, ring: RingProducer, epoch: int) -> bool:
        """As many of those unsent as there is room for; whether the pool must be rung."""
        ring_it = False
        while self.unsent:
            request_id = self.unsent[0]
            if request_id in self:
                if ring.free() < 1:
                    break
                offset = ring.header_offsets[ring.loan()]
                REQUEST_HEADER.pack_into(ring.view, offset, request_id, 0, 0, pack_cancel(epoch))
                ring_it |= ring.send()
            self.unsent.popleft()
        return ring_it

    def lose(self) -> int:
        """All of them end with status 'lost'; how many."""
        now, count = time.monotonic_ns(), len(self)
        for request_id, enqueue_ns in self.items():
            self.ended.append(Result(request_id, LOST, _NO_IDS, _NO_DISTANCES, 0, enqueue_ns, 0, 0, now))
        self.clear()
        self.unsent.clear()
        return count


_ENDS = {CLOSED: "the pool closed the session", EVICTED: "the pool evicted this client: it broke the protocol"}


class ClientSession:
    """What of a `RingClient` is not about requests and results; see there.

    Its parts, for those who look into it: `attachment`, the rings and doorbells of this session; `pending`, what is
    outstanding; `arena`, its slots of the pool's arena or None; `spin`, how long `wait` looks at the ring.
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
        self.pending = Outstanding()
        self._lost: str | None = None
        self._next_peer_check = self._cold_ns = 0
        self._returned = 0
        self._counts = dict.fromkeys(ClientStatistics.__struct_fields__, 0)
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
        fits = self.attachment.requests.layout.payload_bytes >= 8  # what stands for a vector in the arena
        self.arena = None if answer.arena is None or not fits else ClientArena(answer.arena)

    def _read_ring(self) -> None:
        """Move what the pool has published from the ring to what has ended."""
        raise NotImplementedError

    def _check_peer(self) -> None:
        if self._lost is not None:
            return
        try:
            state = self.attachment.requests.consumer_state
        except ProtocolViolation as error:
            self._lose(str(error))
            return
        if state >= CLOSED:
            self._lose(_ENDS[state])
        elif self.attachment.pool_died():
            self._lose(f"the pool (process {self.attachment.answer.pid}) died")

    def _lose(self, reason: str, *, read: bool = True) -> None:
        if read:  # what it managed to publish still counts
            with contextlib.suppress(IpcError):
                self._read_ring()
        if self._lost is not None:
            return
        self._lost = reason
        self._counts["rung"] += self.attachment.requests.rung
        self._counts["lost"] += self.pending.lose()
        self.attachment.ignore_death()

    # ---- sleeping

    def _sleep(self, left_ns: int) -> bool:
        """Spin, then sleep, both bounded. True: there is news in the ring."""
        if self.attachment.watch.spin(min(self.spin.ns, left_ns)) >= 0:
            return True
        begin = time.monotonic_ns() - self.spin.ns
        self._check_peer()
        news = not self.pending.ended and self.attachment.sleep(left_ns)
        self.spin.learn(time.monotonic_ns() - begin)
        return news

    def fileno(self) -> int:
        """Readable when armed and results came, or when the pool died; level-triggered."""
        return self.attachment.fileno()

    def arm(self) -> bool:
        """Ask to be rung when a result comes. False: `poll` has something to return already, do not sleep."""
        self._check_peer()
        if self.pending.ended:
            return False
        return self._lost is not None or self.attachment.arm()

    def disarm(self) -> None:
        """Awake again: no need to ring. Call it before polling after each sleep."""
        if self._open:
            self.attachment.disarm()

    # ---- the session

    @property
    def lost(self) -> str | None:
        """Why the session is over, or None while it lasts (as far as was noticed)."""
        return self._lost

    @property
    def draining(self) -> bool:
        """Whether the pool has asked this client to leave: it takes nothing more here, and may let it attach anew."""
        return self._lost is None and self.attachment.requests.consumer_state == DRAINING

    @property
    def outstanding(self) -> int:
        """Requests submitted and not yet read back."""
        return len(self.pending)

    def close(self) -> None:
        """End the session. Idempotent."""
        if self._open:
            self._open = False
            if self._lost is None:
                self._lose("the client was closed")
            if self.arena is not None:  # before the pool can free it: it does so when the session is over
                self.arena.close()
                self.arena = None
            self.attachment.close()

    @property
    def has_arena(self) -> bool:
        """Whether the pool has granted slots of its arena, and they can be reached as far as is known."""
        return self.arena is not None and not self.arena.disabled

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
