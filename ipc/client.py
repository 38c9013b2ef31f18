"""A client's side of a session: submit vectors to a pool, poll results."""

import contextlib
import time
from collections import deque

import msgspec
import numpy as np
import numpy.typing as npt

from ipc.attachment import Attachment
from ipc.descriptors import (
    CANCEL,
    LOST,
    MAX_PARAMETERS,
    MAX_U16,
    PARAMETERS,
    REQUEST_HEADER,
    RESULT_HEADER,
    SEARCH,
    STAGE_CODES,
    STAGES,
    STATUS_CODES,
    STATUSES,
    Result,
)
from ipc.errors import (
    Draining,
    InvalidArgument,
    IpcError,
    PeerLost,
    ProtocolViolation,
    RingFull,
    StaleEpoch,
)
from ipc.ring import CLOSED, EVICTED, OPEN
from ipc.session import (
    DOORBELLS,
    EVENTFD,
)
from ipc.spin import SpinBudget

_STATE_REASONS = {
    CLOSED: "the pool closed the session",
    EVICTED: "the pool evicted this client: it broke the protocol",
}
PEER_CHECK_NS = 1_000_000  # how often an empty poll looks whether the pool lives
SLEEP_MS = 100.0  # no sleep is longer, whatever the doorbells do


class ClientStatistics(msgspec.Struct, frozen=True):
    """Counters of a client since it was made, over all its sessions.

    `submitted` requests; `returned` results (of them `lost`); `outstanding` now; submissions refused because the ring
    was `full`; doorbells `rung`; `cancelled` requests; results of a `stale` epoch; sessions `attached`.
    """

    submitted: int
    returned: int
    lost: int
    outstanding: int
    full: int
    rung: int
    cancelled: int
    stale: int
    attached: int


class RingClient:
    """Submits searches to the pool at `endpoint` and polls their results. One thread; only `wait` sleeps.

    Attaches at once: raises `AttachTimeout` (nobody there within `timeout_ms`), `AttachRefused`, or another `IpcError`.
    `name` appears in the pool's statistics; `doorbell` is 'eventfd' or 'zeromq'; `spin_us` is how long `wait` looks at
    the ring, at most, before it sleeps (`SpinBudget` learns how long it is worth).

    Every submitted request comes back from `poll` exactly once. When the pool dies, closes, or evicts this client, what
    was already published is returned first, then the rest with status 'lost'; from then on `submit` raises `PeerLost`
    until `reconnect` succeeds.

    asyncio: `loop.add_reader(client.fileno(), wake)`, and whenever there is nothing left to do: `if client.arm():` go
    back to the loop, else poll again; on wake-up `client.disarm()` and poll. `zmq.Poller` takes `fileno()` too.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        doorbell: str = EVENTFD,
        spin_us: float = 200.0,
        timeout_ms: float = 5000.0,
    ) -> None:
        if doorbell not in DOORBELLS:
            raise InvalidArgument(f"doorbell must be one of {DOORBELLS}, got {doorbell!r}")
        self.endpoint = endpoint
        self.name = name
        self._doorbell = doorbell
        self._spin = SpinBudget(int(spin_us * 1000))
        self._outstanding: dict[int, int] = {}  # request id → enqueue_ns
        self._ended: deque[Result] = deque()  # read or lost, not yet returned
        self._unsent_cancels: deque[int] = deque()
        self._next_id = 1
        self._lost: str | None = None
        self._next_peer_check = 0
        self._counts = dict.fromkeys(ClientStatistics.__struct_fields__, 0)
        self._open = True
        self._attach(timeout_ms)

    def _attach(self, timeout_ms: float) -> None:
        self._session = Attachment(self.endpoint, self.name, self._doorbell, timeout_ms)
        answer = self._session.answer
        self.epoch = answer.epoch
        self.collections = dict(answer.collections)
        self.max_k = answer.max_k
        self.max_top_m = answer.max_top_m
        self._parameters: dict[tuple[str, str, int, int, int, int | None], tuple[bytes, int]] = {}
        self._slots = answer.results.slots
        self._lost = None
        self._counts["attached"] += 1

    # ---- requests

    def submit(
        self,
        vector: npt.ArrayLike,
        *,
        collection: str,
        stage: str,
        k: int,
        top_m: int = 64,
        search_width: int = 1,
        patience: int | None = None,
        deadline_ns: int = 0,
        block_ms: float = 0.0,
    ) -> int:
        """Ask for the `k` nearest of `vector` [dim] (copied as float32); returns the request id, rising from 1.

        `stage` 'prefill' or 'decode'; `deadline_ns` in `time.monotonic_ns()`, 0 for none. When as many requests are
        outstanding as the ring has slots: waits up to `block_ms` for one to end, then raises `RingFull`; nothing was
        accepted. Raises `InvalidArgument` (unknown collection, wrong dimension, a value out of range), `Draining`,
        `PeerLost`.
        """
        if self._lost is not None:
            raise PeerLost(self._lost)
        session = self._session
        choice = (collection, stage, k, top_m, search_width, patience)
        packed, dim = self._parameters.get(choice) or self._learn(choice)
        array = np.asarray(vector)
        if array.shape != (dim,) or deadline_ns < 0:
            raise InvalidArgument(
                f"a vector of {collection!r} has shape ({dim},), got {array.shape}; deadline_ns >= 0, got {deadline_ns}"
            )
        ring = session.requests
        if ring.consumer_state_hint != OPEN:
            self._refuse_state()
        slot = self._loan(block_ms)
        place = session.vectors[slot]
        (place if dim == len(place) else place[:dim])[...] = array
        request_id, now = self._next_id, time.monotonic_ns()
        REQUEST_HEADER.pack_into(ring.view, ring.header_offsets[slot], request_id, deadline_ns, now, packed)
        self._next_id = request_id + 1
        self._outstanding[request_id] = now
        self._send()
        return request_id

    def _learn(self, choice: tuple[str, str, int, int, int, int | None]) -> tuple[bytes, int]:
        """Check and pack parameters that are used for the first time in this session."""
        collection, stage, k, top_m, search_width, patience = choice
        if collection not in self.collections:
            raise InvalidArgument(f"no collection {collection!r}; there are {sorted(self.collections)}")
        if stage not in STAGE_CODES:
            raise InvalidArgument(f"stage must be one of {STAGES}, got {stage!r}")
        if (
            not 1 <= k <= self.max_k
            or not 1 <= top_m <= self.max_top_m
            or not 1 <= search_width <= MAX_U16
            or not (patience is None or 1 <= patience <= MAX_U16)
        ):
            raise InvalidArgument(
                f"k {k} must be within 1..{self.max_k}, top_m {top_m} within 1..{self.max_top_m}, search_width "
                f"{search_width} and patience {patience} within 1..{MAX_U16}"
            )
        if len(self._parameters) >= MAX_PARAMETERS:
            self._parameters.clear()
        dim = self.collections[collection]
        code = list(self.collections).index(collection)
        packed = PARAMETERS.pack(
            self.epoch, SEARCH, STAGE_CODES[stage], code, k, top_m, search_width, patience or 0, dim
        )
        self._parameters[choice] = packed, dim
        return packed, dim

    def cancel(self, request_id: int) -> bool:
        """Tell the pool that this result is not wanted any more. The request still ends once, as 'cancelled' or not.

        False: it is not outstanding. If the ring is full, the word goes out with the next submit, poll or wait.
        """
        if request_id not in self._outstanding:
            return False
        self._counts["cancelled"] += 1
        self._unsent_cancels.append(request_id)
        self._flush_cancels()
        return True

    def _flush_cancels(self) -> None:
        ring = self._session.requests
        while self._unsent_cancels and self._lost is None:
            request_id = self._unsent_cancels[0]
            if request_id in self._outstanding:
                if ring.free() < 1:
                    return
                offset = ring.header_offsets[ring.loan()]
                packed = PARAMETERS.pack(self.epoch, CANCEL, 0, 0, 0, 0, 0, 0, 0)
                REQUEST_HEADER.pack_into(ring.view, offset, request_id, 0, 0, packed)
                self._send()
            self._unsent_cancels.popleft()

    def _send(self) -> None:
        if self._session.requests.send():
            self._counts["rung"] += 1
            self._session.ringer.ring()

    def _loan(self, block_ms: float) -> int:
        """A free request slot, with the promise that its result will have one too."""
        if self._unsent_cancels:
            self._flush_cancels()
        if len(self._outstanding) < self._slots:
            with contextlib.suppress(RingFull):
                return self._session.requests.loan()
        end = time.monotonic_ns() + int(block_ms * 1e6)
        while (left := end - time.monotonic_ns()) > 0:
            self._sleep(min(left, 1_000_000))  # the request ring's reader does not ring for freed slots: look often
            self._absorb()
            if self._lost is not None:
                raise PeerLost(self._lost)
            if len(self._outstanding) < self._slots and self._session.requests.free() > 0:
                return self._session.requests.loan()
        self._counts["full"] += 1
        raise RingFull(f"{len(self._outstanding)} requests are outstanding, the ring has {self._slots} slots")

    def _refuse_state(self) -> None:
        self._check_peer()
        if self._lost is not None:
            raise PeerLost(self._lost)
        raise Draining("the pool is draining and takes no new requests")

    # ---- results

    def poll(self) -> list[Result]:
        """All results that are there, in the order in which the pool published them. Never blocks.

        Raises `StaleEpoch` for a result of another epoch (it is skipped; poll again) and `ProtocolViolation` for one no
        correct pool writes (the session is over then, outstanding requests are 'lost').
        """
        self._absorb()
        if not self._ended and self._outstanding:
            now = time.monotonic_ns()
            if now >= self._next_peer_check:
                self._next_peer_check = now + PEER_CHECK_NS
                self._check_peer()
        results = list(self._ended)
        self._ended.clear()
        self._counts["returned"] += len(results)
        return results

    def _absorb(self) -> None:
        """Move what the pool has published from the ring to `_ended`."""
        if self._unsent_cancels:
            self._flush_cancels()
        if self._lost is None:
            self._read_ring()

    def _read_ring(self) -> None:
        session = self._session
        ring = session.results
        while count := ring.ready(self._slots):
            done = 0
            try:
                for slot in range(ring.first, ring.first + count):
                    done += 1
                    self._ended.append(self._read(session, slot))
            finally:
                ring.release(done)

    def _read(self, session: Attachment, slot: int) -> Result:
        fields = RESULT_HEADER.unpack_from(session.results.view, session.results.header_offsets[slot])
        request_id, epoch, status, found, extends, receive_ns, begin_ns, end_ns = fields
        if epoch != self.epoch:
            self._counts["stale"] += 1
            raise StaleEpoch(f"a result of epoch {epoch} in a session of epoch {self.epoch}")
        enqueue_ns = self._outstanding.get(request_id)
        if enqueue_ns is None or status >= STATUS_CODES[LOST] or found > self.max_k:
            reason = f"the pool wrote result {request_id}, status {status}, {found} ids: not what was asked"
            self._lose(reason, read=False)
            raise ProtocolViolation(reason)
        del self._outstanding[request_id]
        ids, distances = session.ids[slot][:found].copy(), session.distances[slot][:found].copy()
        return Result(request_id, STATUSES[status], ids, distances, extends, enqueue_ns, receive_ns, begin_ns, end_ns)

    def _check_peer(self) -> None:
        if self._lost is not None:
            return
        try:
            state = self._session.requests.consumer_state
        except ProtocolViolation as error:
            self._lose(str(error))
            return
        if state >= CLOSED:
            self._lose(_STATE_REASONS[state])
        elif self._session.pool_died():
            self._lose(f"the pool (process {self._session.answer.pid}) died")

    def _lose(self, reason: str, *, read: bool = True) -> None:
        if read:  # what it managed to publish still counts
            with contextlib.suppress(IpcError):
                self._read_ring()
        if self._lost is not None:
            return
        self._lost = reason
        now = time.monotonic_ns()
        for request_id, enqueue_ns in self._outstanding.items():
            nothing = np.empty(0, np.int64), np.empty(0, np.float32)
            self._ended.append(Result(request_id, LOST, *nothing, 0, enqueue_ns, 0, 0, now))
        self._counts["lost"] += len(self._outstanding)
        self._outstanding.clear()
        self._unsent_cancels.clear()
        with contextlib.suppress(OSError):  # a dead process would keep fileno() readable for ever
            self._session.epoll.unregister(self._session.pidfd)

    # ---- sleeping

    def wait(self, timeout_ms: float) -> bool:
        """Sleep until `poll` has something to return, or the time is over. True in the former case."""
        end = time.monotonic_ns() + int(timeout_ms * 1e6)
        while self._outstanding and not self._ended:
            if self._unsent_cancels:
                self._flush_cancels()
            left = end - time.monotonic_ns()
            if self._sleep(max(left, 0)):
                return True
            self._check_peer()
            if left <= 0:
                break
        if not self._outstanding:
            self._check_peer()
        return bool(self._ended)

    def _sleep(self, left_ns: int) -> bool:
        """Spin, then sleep, both bounded. True: there is news in the ring."""
        watch = self._session.watch
        if watch.spin(min(self._spin.ns, left_ns)) >= 0:
            return True
        begin = time.monotonic_ns() - self._spin.ns
        if self.arm():
            self._session.epoll.poll(min(left_ns / 1e9, SLEEP_MS / 1e3))
        self.disarm()
        self._spin.learn(time.monotonic_ns() - begin)
        return watch.look() >= 0

    def fileno(self) -> int:
        """Readable when armed and results came, or when the pool died; level-triggered. Changes with `reconnect`."""
        return self._session.epoll.fileno()

    def arm(self) -> bool:
        """Ask to be rung when a result comes. False: `poll` has something to return already, do not sleep."""
        self._check_peer()
        if self._ended:
            return False
        if self._lost is None and not self._session.watch.arm():
            self._session.watch.disarm()
            return False
        return True

    def disarm(self) -> None:
        """Awake again: no need to ring. Call it before polling after each sleep."""
        if self._open:
            self._session.watch.disarm()
            self._session.sleeper.silence()

    # ---- the session

    @property
    def lost(self) -> str | None:
        """Why the session is over, or None while it lasts (as far as was noticed)."""
        return self._lost

    @property
    def outstanding(self) -> int:
        """Requests submitted and not yet read back."""
        return len(self._outstanding)

    @property
    def heartbeat_age_ns(self) -> int:
        """Nanoseconds since the pool last looked after its rings; a live pool does so at least every 100 ms."""
        if not self._open:
            raise PeerLost("the client was closed")
        return max(time.monotonic_ns() - self._session.requests.heartbeat_ns, 0)

    def reconnect(self, timeout_ms: float = 5000.0) -> None:
        """Attach anew. What was outstanding ends with status 'lost', `epoch`, `fileno()` and the limits may change.

        Raises what the constructor raises; the client stays lost then, and may try again.
        """
        if not self._open:
            raise PeerLost("the client was closed")
        if self._lost is None:
            self._lose("the client reconnected")
        old = self._session
        self._attach(timeout_ms)
        old.close()

    def close(self) -> None:
        """End the session. Idempotent."""
        if self._open:
            self._open = False
            if self._lost is None:
                self._lose("the client was closed")
            self._session.close()

    def __enter__(self) -> "RingClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> ClientStatistics:
        """Counters; cheap."""
        changing = {"submitted": self._next_id - 1, "outstanding": len(self._outstanding)}
        return ClientStatistics(**{**self._counts, **changing})
