"""Client end of a session: submits vectors to a pool and polls their results."""

import time
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ipc.client.session import ClientSession
from ipc.errors import (
    Draining,
    InvalidArgument,
    MemoryRefused,
    PeerLost,
    ProtocolViolation,
    RingFull,
    StaleEpoch,
)
from ipc.memory.device import DeviceSpan
from ipc.ring.descriptors import (
    LOST,
    MAX_I64,
    RESULT_HEADER,
    STATUS_CODES,
    STATUSES,
    WRITTEN,
    Float32s,
    Result,
    SearchSpec,
)
from ipc.ring.ring import RingConsumer

FLOAT32 = np.dtype(np.float32)
PEER_CHECK_NS = 1_000_000  # how often an empty poll checks that the pool is alive
COLD_NS = 1_000_000  # a pause after which the CPU's caches may be cold


class RingClient(ClientSession):
    """Submits searches to the pool at `endpoint` and polls their results. One thread; only `wait` sleeps.

    The constructor attaches: it raises `AttachTimeout` (no answer within `timeout_ms`), `AttachRefused`, or another
    `IpcError`. `name` appears in the pool's statistics; `doorbell` is 'eventfd' or 'zeromq'; `spin_us` is the longest
    spin of `wait` before it sleeps: longer than most queries take, because a wake-up takes as long again. It yields the
    core while it spins, and `SpinBudget` adapts it. `arena`: request slots of the pool's arena, into which `submit`
    writes vectors in a GPU's memory; all others go into the ring. `top_m`: default of specs without one.

    `poll` returns every submitted request exactly once. When the pool dies, closes, or evicts this client, it returns
    the results published before, then the remaining requests with status 'lost'; `submit` raises `PeerLost` then.

    asyncio: `loop.add_reader(client.fileno(), wake)`, and when there is nothing left to do: `if client.arm():` return
    to the loop, else poll again; on wake-up `client.disarm()` and poll. `zmq.Poller` accepts `fileno()` too.
    """

    # ---- requests

    def submit(self, vector: npt.ArrayLike | DeviceSpan, spec: SearchSpec) -> int:
        """Submit a search for `vector` [dim] (copied as float32). Return the request id, rising from 1.

        A `DeviceSpan` is dim float32 in a GPU's memory, which must not change until the request has ended. Raises
        `RingFull` with as many outstanding requests as the ring has slots, `InvalidArgument` (unknown collection, wrong
        dimension, a value out of range), `Draining`, `PeerLost`; `MemoryRefused` for a `DeviceSpan` that cannot be
        written to the pool's arena now: copy it to the host.
        """
        deadline_ns = spec.deadline_ns
        key = replace(spec, deadline_ns=0) if deadline_ns else spec
        packed = self._packed[key]
        words, dim = packed
        row: DeviceSpan | Float32s
        if isinstance(vector, DeviceSpan) or (
            type(vector) is np.ndarray and vector.dtype is FLOAT32 and vector.flags.carray
        ):
            row = vector
        else:
            row = np.require(vector, FLOAT32, ["C", "A"])
        if row.shape != (dim,):
            raise InvalidArgument(f"a vector of {spec.collection!r} has shape ({dim},), got {row.shape}")
        if deadline_ns:
            check_deadline(deadline_ns)
        if self._lost is not None:
            raise PeerLost(self._lost)
        ring, outstanding = self.attachment.requests, self.pending
        if outstanding.unsent_cancels or len(outstanding) >= self.slots or ring.room() <= 0:
            self._make_room()
        request_id = outstanding.next_id
        if isinstance(row, DeviceSpan):
            words, row = self._packed_in_arena[key].words, self._write(row, spec)
        if spec.filter:
            words = packed.with_filter(self._filter_slot(spec.filter))
        now = time.monotonic_ns()
        outstanding.next_id = request_id + 1
        outstanding[request_id] = now
        try:
            sent = ring.send_row(row, request_id, deadline_ns, now, *words)
        except BaseException:
            self._withdraw(request_id)
            raise
        if sent:
            self._check_sent(sent, request_id)
        return request_id

    def _write(self, row: DeviceSpan, spec: SearchSpec) -> Float32s:
        """Write the next request's vector to the arena. Return the request's payload. Raises `MemoryRefused`."""
        arena, ring = self.arena, self.attachment.requests
        if arena is None:
            raise MemoryRefused("a vector in a GPU's memory needs a slot of the pool's arena: this client has none")
        if spec.filter or spec.collection not in self.in_place:
            raise MemoryRefused(
                "the pool's host reads the vectors of filtered requests and of collections with several segments"
            )
        if arena.is_full and self._lost is None:
            self._read_ring()  # ended requests free their slots
        word = ring.header_offsets[ring.position % ring.layout.slots] + WRITTEN
        return arena.write(row, self.pending.next_id, word)

    def _withdraw(self, request_id: int) -> None:
        self.pending.withdraw(request_id)
        if self.arena is not None:
            self.arena.end((request_id,))

    def _filter_slot(self, encoded: bytes) -> int:
        """Return the slot of a filter for the next request. Raises `InvalidArgument`, `RingFull`."""
        ring = self.attachment.requests
        read = ring.position - ring.layout.slots + ring.free()
        return self.attachment.filters.slot_of(encoded, ring.position + 1, read)

    def _check_sent(self, sent: int, request_id: int) -> None:
        """Ring a doorbell that is not an eventfd, or raise the error if nothing was sent."""
        if sent < 0:
            self._withdraw(request_id)
            self._raise_send_error(sent)
        self.attachment.ringer.ring()

    def cancel(self, request_id: int) -> bool:
        """Cancel a request. It still ends exactly once, as 'cancelled' or otherwise.

        False: it is not outstanding. If the ring is full, the next submit, poll or wait sends the cancellation.
        """
        if request_id not in self.pending:
            return False
        self.pending.unsent_cancels.append(request_id)
        self._send_cancellations()
        return True

    def _send_cancellations(self) -> None:
        if self._lost is not None:
            return
        if self.pending.send_cancellations(self.attachment.requests, self.epoch):
            self.attachment.ringer.ring()

    def _make_room(self) -> None:
        """Send cancellations first. Raises `RingFull` without a free request slot and one for its result."""
        if self.pending.unsent_cancels:
            self._send_cancellations()
        if len(self.pending) >= self.slots or self.attachment.requests.free() <= 0:
            raise RingFull(f"{len(self.pending)} requests are outstanding, the ring has {self.slots} slots")

    def _raise_send_error(self, code: int) -> NoReturn:
        """Raise the error of a request that was not sent: the pool is gone, drains, or has violated the protocol."""
        error = self.attachment.requests.send_error(code)
        if isinstance(error, ProtocolViolation):
            self._end_session(str(error))
        self._check_peer()
        if self._lost is not None:
            raise PeerLost(self._lost)
        raise Draining("the pool is draining and takes no new requests") if isinstance(error, Draining) else error

    # ---- results

    def _read_ring(self) -> None:
        """Move published results from the ring to `pending.results`."""
        results = self.pending.results
        known = len(results)
        try:
            read_results(self.attachment.results, self.epoch, self.max_k, self.pending, results)
        except ProtocolViolation as error:
            self._end_session(str(error), read=False)
            raise
        finally:
            if self.arena is not None and self.arena.slots is not None:
                self.arena.end(result.request_id for result in results[known:])

    def poll(self) -> list[Result]:
        """Return the available results in the order of their publication. Never blocks.

        Raises `StaleEpoch` for a result of another epoch (it is skipped; poll again) and `ProtocolViolation` for an
        invalid one (the session has ended then, outstanding requests are 'lost').
        """
        if self.pending.unsent_cancels:
            self._send_cancellations()
        if self._lost is None:
            self._read_ring()
        outstanding = self.pending
        results = outstanding.results
        if not results:
            now = time.monotonic_ns()
            if now >= self._next_peer_check:
                self._next_peer_check = now + PEER_CHECK_NS
                self._check_peer()
                results = outstanding.results
        outstanding.results = []
        return results

    def wait(self, timeout_ms: float) -> bool:
        """Sleep until `poll` has a result to return (True) or until the timeout (False)."""
        begin = time.monotonic_ns()
        if begin >= self._cold_ns and self.pending and not self.attachment.results.ready(1):
            prefetch_result(self.attachment.results)
        self._cold_ns = begin + COLD_NS
        while self.pending and not self.pending.results:
            if self.pending.unsent_cancels:
                self._send_cancellations()
            left = max(begin + int(timeout_ms * 1e6) - time.monotonic_ns(), 0)
            if self._sleep(left):
                return True
            self._check_peer()
            if left == 0:
                break
        if not self.pending:
            self._check_peer()
        return bool(self.pending.results)


def check_deadline(deadline_ns: int) -> None:
    """Raise `InvalidArgument` for a deadline that does not fit a request's header."""
    if type(deadline_ns) is not int or not 0 <= deadline_ns <= MAX_I64:
        raise InvalidArgument(f"deadline_ns must be an integer within 0..{MAX_I64}, got {deadline_ns!r}")


# ---- reading results

_LOST_CODE = STATUS_CODES[LOST]


def read_results(
    ring: RingConsumer, epoch: int, max_k: int, outstanding: dict[int, int], results: list[Result]
) -> None:
    """Append all results in the ring to `results`, and remove their requests from `outstanding` (id → enqueue_ns).

    Nothing in a slot is trusted. Raises `StaleEpoch`, or `ProtocolViolation` for an invalid result; its slot is
    released and ends no request, earlier results are kept.
    """
    slots = ring.layout.slots
    while count := ring.ready(slots):
        first, done = ring.first, 0
        try:
            for slot in range(first, first + count):
                done += 1
                results.append(_read(ring, slot, epoch, max_k, outstanding))
        finally:
            ring.release(done)
        if first + count < slots:  # otherwise the ready slots may continue at the ring's start
            return


def _read(ring: RingConsumer, slot: int, epoch: int, max_k: int, outstanding: dict[int, int]) -> Result:
    fields = RESULT_HEADER.unpack_from(ring.view, ring.header_offsets[slot])
    request_id, found_epoch, status, count, extends, receive_ns, begin_ns, end_ns = fields
    if found_epoch != epoch:
        raise StaleEpoch(f"a result of epoch {found_epoch} in a session of epoch {epoch}")
    if request_id not in outstanding or status >= _LOST_CODE or count > max_k:
        raise ProtocolViolation(f"the pool wrote an invalid result: request {request_id}, status {status}, {count} ids")
    ids, distances = np.empty(count, np.int64), np.empty(count, np.float32)
    ring.take_pairs(slot, ids, distances)
    enqueue_ns = outstanding.pop(request_id)
    return Result(request_id, STATUSES[status], ids, distances, extends, enqueue_ns, receive_ns, begin_ns, end_ns)


def prefetch_result(ring: RingConsumer) -> None:
    """Read the next result's slot before the result arrives, to warm the caches.

    After a pause this halves the time of reading the actual result.
    """
    slot = ring.first
    RESULT_HEADER.unpack_from(ring.view, ring.header_offsets[slot])
    ids, distances = np.empty(1, np.int64), np.empty(1, np.float32)
    ring.take_pairs(slot, ids, distances)
    Result(0, LOST, ids, distances, 0, 0, 0, 0, 0)
