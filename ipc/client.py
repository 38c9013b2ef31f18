"""A client's side of a session: submit vectors to a pool, poll results."""

import contextlib
import time
from collections import deque
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ipc.attachment import Attachment
from ipc.descriptors import LOST, REQUEST_HEADER, SEARCH_ARENA, Result
from ipc.device_arena import LeasedSlots, open_memory
from ipc.device_memory import DeviceSpan
from ipc.errors import Draining, InvalidArgument, IpcError, PeerLost, ProtocolViolation, RingFull, StaleEpoch
from ipc.memo import Memo
from ipc.parameters import Choice, Limits, Packed, check_deadline, pack, pack_cancel
from ipc.payloads import as_float32, read_results
from ipc.ring import CLOSED, EVICTED
from ipc.session import DOORBELLS, EVENTFD
from ipc.spin import SpinBudget
from ipc.statistics import ClientStatistics

_ENDS = {CLOSED: "the pool closed the session", EVICTED: "the pool evicted this client: it broke the protocol"}
PEER_CHECK_NS = 1_000_000  # how often an empty poll looks whether the pool lives
_NO_IDS, _NO_VECTOR = np.empty(0, np.int64), np.empty(0, np.float32)


class RingClient:
    """Submits searches to the pool at `endpoint` and polls their results. One thread; only `wait` sleeps.

    Attaches at once: raises `AttachTimeout` (nobody there within `timeout_ms`), `AttachRefused`, or another `IpcError`.
    `name` appears in the pool's statistics; `doorbell` is 'eventfd' or 'zeromq'; `spin_us` is how long `wait` looks at
    the ring, at most, before it sleeps (`SpinBudget` learns how long it is worth). `device`: from there ("cuda:N", or
    "cpu" for an arena in host memory) the vectors of `submit` go into the pool's arena, if it has slots for us; else,
    and without `device`, they go into the ring.

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
        device: str | None = None,
    ) -> None:
        if doorbell not in DOORBELLS:
            raise InvalidArgument(f"doorbell must be one of {DOORBELLS}, got {doorbell!r}")
        self.endpoint = endpoint
        self.name = name
        self._doorbell = doorbell
        self._device = device
        self._arena: LeasedSlots | None = None
        self._spin = SpinBudget(int(spin_us * 1000))
        self._outstanding: dict[int, int] = {}  # request id → enqueue_ns
        self._ended: list[Result] = []  # read or lost, not yet returned
        self._unsent_cancels: deque[int] = deque()
        self._next_id = 1
        self._lost: str | None = None
        self._next_peer_check = 0
        self._returned = 0
        self._counts = dict.fromkeys(ClientStatistics.__struct_fields__, 0)
        self._open = True
        self._attach(timeout_ms)

    def _attach(self, timeout_ms: float) -> None:
        self._session = Attachment(self.endpoint, self.name, self._doorbell, timeout_ms, self._device is not None)
        answer = self._session.answer
        self.epoch = answer.epoch
        self.collections = {served.name: served.dim for served in answer.collections}
        self.shards = {served.name: (served.shard, served.shards) for served in answer.collections}
        self.max_k = answer.max_k
        self.max_top_m = answer.max_top_m
        limits = Limits(self.collections, self.max_k, self.max_top_m)
        self._packed: Memo[Choice, Packed] = Memo(lambda choice: pack(choice, answer.epoch, limits))
        self.slots = answer.results.slots
        if self._device is not None and answer.arena is not None and self._session.requests.layout.payload_bytes >= 8:
            self._arena = LeasedSlots(open_memory(answer.arena.memory, self._device), answer.arena.lease)
            self._places: Memo[Choice, Packed] = Memo(lambda choice: pack(choice, answer.epoch, limits, SEARCH_ARENA))
        self._lost = None
        self._counts["attached"] += 1

    # ---- requests

    def submit(
        self,
        vector: npt.ArrayLike | DeviceSpan,
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

        A `DeviceSpan` is dim float32 in the memory of `device`; it must stay as it is until the request has ended.
        `stage` 'prefill' or 'decode'; `deadline_ns` in `time.monotonic_ns()`, 0 for none. When as many requests are
        outstanding as the ring has slots: waits up to `block_ms` for one to end, then raises `RingFull`; nothing was
        accepted. Raises `InvalidArgument` (unknown collection, wrong dimension, a value out of range), `Draining`,
        `PeerLost`.
        """
        choice = (collection, stage, k, top_m, search_width, patience)
        words, dim = self._packed[choice]
        row = vector if isinstance(vector, DeviceSpan) else as_float32(vector)
        if row.shape != (dim,):
            raise InvalidArgument(f"a vector of {collection!r} has shape ({dim},), got {row.shape}")
        check_deadline(deadline_ns)
        if self._lost is not None:
            raise PeerLost(self._lost)
        ring = self._session.requests
        if self._unsent_cancels or len(self._outstanding) >= self.slots or ring.room <= 0:
            self._make_room(block_ms)
        if self._arena is not None:
            words = self._places[choice].words
            row = np.array(self._arena.write(row), np.uint32).view(np.float32)
        elif isinstance(row, DeviceSpan):
            raise InvalidArgument("a vector in a GPU's memory needs a slot of the pool's arena: this client has none")
        request_id, now = self._next_id, time.monotonic_ns()
        self._next_id = request_id + 1
        self._outstanding[request_id] = now
        sent = -1
        try:
            sent = ring.send_row(row, request_id, deadline_ns, now, *words)
        finally:
            if sent < 0:
                self._unregister(range(request_id, request_id + 1))
        if sent < 0:
            self._refuse(sent)
        elif sent:
            self._ring_bell()
        return request_id

    def submit_many(
        self,
        vectors: npt.ArrayLike,
        *,
        collection: str,
        stage: str,
        k: int,
        top_m: int = 64,
        search_width: int = 1,
        patience: int | None = None,
        deadline_ns: int = 0,
    ) -> range:
        """`submit` for as many of `vectors` [n, dim] as there is room for, from the first on, published together.

        Returns their request ids. Raises as `submit` does; `RingFull` only if there is no room for the first.
        """
        choice = (collection, stage, k, top_m, search_width, patience)
        words, dim = self._packed[choice]
        rows = as_float32(vectors)
        if rows.ndim != 2 or rows.shape[1] != dim:
            raise InvalidArgument(f"vectors of {collection!r} have shape (n, {dim}), got {rows.shape}")
        check_deadline(deadline_ns)
        if self._lost is not None:
            raise PeerLost(self._lost)
        if len(rows):
            self._make_room(0.0)
        ring = self._session.requests
        count = min(len(rows), self.slots - len(self._outstanding), ring.free())
        first, now = self._next_id, time.monotonic_ns()
        ids = range(first, first + count)
        self._next_id = first + count
        self._outstanding.update(dict.fromkeys(ids, now))
        sent = -1
        try:
            sent = ring.send_rows(rows[:count], first, deadline_ns, now, *words)
        finally:
            if sent < 0:
                self._unregister(ids)
        if sent < 0:
            self._refuse(sent)
        elif sent:
            self._ring_bell()
        return ids

    def _unregister(self, ids: range) -> None:
        """They were not sent."""
        for request_id in ids:
            del self._outstanding[request_id]
        self._next_id = ids.start

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
                REQUEST_HEADER.pack_into(ring.view, offset, request_id, 0, 0, pack_cancel(self.epoch))
                if ring.send():
                    self._ring_bell()
            self._unsent_cancels.popleft()

    def _ring_bell(self) -> None:
        self._counts["rung"] += 1
        self._session.ringer.ring()

    def _make_room(self, block_ms: float) -> None:
        """Have a free request slot, with the promise that its result will have one too."""
        if self._unsent_cancels:
            self._flush_cancels()
        if self._has_room():
            return
        end = time.monotonic_ns() + int(block_ms * 1e6)
        while (left := end - time.monotonic_ns()) > 0:
            self._sleep(min(left, 1_000_000))  # the request ring's reader does not ring for freed slots: look often
            if self._lost is None:
                self._read_ring()
            if self._lost is not None:
                raise PeerLost(self._lost)
            if self._has_room():
                return
        self._counts["full"] += 1
        raise RingFull(f"{len(self._outstanding)} requests are outstanding, the ring has {self.slots} slots")

    def _has_room(self) -> bool:
        return len(self._outstanding) < self.slots and self._session.requests.free() > 0

    def _refuse(self, code: int) -> NoReturn:
        """Nothing was sent: the pool is gone, or drains, or wrote what it must not."""
        refusal = self._session.requests.refused(code)
        if isinstance(refusal, ProtocolViolation):
            self._lose(str(refusal))
        self._check_peer()
        if self._lost is not None:
            raise PeerLost(self._lost)
        raise Draining("the pool is draining and takes no new requests") if isinstance(refusal, Draining) else refusal

    # ---- results

    def poll(self) -> list[Result]:
        """All results that are there, in the order in which the pool published them. Never blocks.

        Raises `StaleEpoch` for a result of another epoch (it is skipped; poll again) and `ProtocolViolation` for one no
        correct pool writes (the session is over then, outstanding requests are 'lost').
        """
        if self._unsent_cancels:
            self._flush_cancels()
        if self._lost is None:
            self._read_ring()
        results = self._ended
        if not results:
            now = time.monotonic_ns()
            if now >= self._next_peer_check:
                self._next_peer_check = now + PEER_CHECK_NS
                self._check_peer()
                results = self._ended
        self._ended = []
        self._returned += len(results)
        return results

    def _read_ring(self) -> None:
        """Move what the pool has published from the ring to `_ended`."""
        try:
            read_results(self._session.results, self.epoch, self.max_k, self._outstanding, self._ended)
        except StaleEpoch:
            self._counts["stale"] += 1
            raise
        except ProtocolViolation as error:
            self._lose(str(error), read=False)
            raise

    def _check_peer(self) -> None:
        if self._lost is not None:
            return
        try:
            state = self._session.requests.consumer_state
        except ProtocolViolation as error:
            self._lose(str(error))
            return
        if state >= CLOSED:
            self._lose(_ENDS[state])
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
            self._ended.append(Result(request_id, LOST, _NO_IDS, _NO_VECTOR, 0, enqueue_ns, 0, 0, now))
        self._counts["lost"] += len(self._outstanding)
        self._outstanding.clear()
        self._unsent_cancels.clear()
        self._session.ignore_death()

    # ---- sleeping

    def wait(self, timeout_ms: float) -> bool:
        """Sleep until `poll` has something to return, or the time is over. True in the former case."""
        begin = time.monotonic_ns()
        while self._outstanding and not self._ended:
            if self._unsent_cancels:
                self._flush_cancels()
            left = max(begin + int(timeout_ms * 1e6) - time.monotonic_ns(), 0)
            if self._sleep(left):
                return True
            self._check_peer()
            if left == 0:
                break
        if not self._outstanding:
            self._check_peer()
        return bool(self._ended)

    def _sleep(self, left_ns: int) -> bool:
        """Spin, then sleep, both bounded. True: there is news in the ring."""
        if self._session.watch.spin(min(self._spin.ns, left_ns)) >= 0:
            return True
        begin = time.monotonic_ns() - self._spin.ns
        if self.arm():
            self._session.sleep(left_ns)
        self.disarm()
        self._spin.learn(time.monotonic_ns() - begin)
        return self._session.watch.look(0) >= 0

    def fileno(self) -> int:
        """Readable when armed and results came, or when the pool died; level-triggered. Changes with `reconnect`."""
        return self._session.fileno()

    def arm(self) -> bool:
        """Ask to be rung when a result comes. False: `poll` has something to return already, do not sleep."""
        self._check_peer()
        if self._ended:
            return False
        return self._lost is not None or self._session.arm()

    def disarm(self) -> None:
        """Awake again: no need to ring. Call it before polling after each sleep."""
        if self._open:
            self._session.disarm()

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
        self._leave_arena()
        self._attach(timeout_ms)
        old.close()

    def close(self) -> None:
        """End the session. Idempotent."""
        if self._open:
            self._open = False
            if self._lost is None:
                self._lose("the client was closed")
            self._leave_arena()
            self._session.close()

    def _leave_arena(self) -> None:
        """Before the pool can free it: it does so when the session is over."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    @property
    def uses_arena(self) -> bool:
        """Whether vectors go through the pool's arena."""
        return self._arena is not None

    def __enter__(self) -> "RingClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> ClientStatistics:
        """Counters; cheap."""
        changing = {
            "submitted": self._next_id - 1, "returned": self._returned, "outstanding": len(self._outstanding),
        }  # fmt: skip
        return ClientStatistics(**{**self._counts, **changing})
