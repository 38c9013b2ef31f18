"""Prefill's end of the KV hand-over: owns an arena, offers its slots, and receives the outcome of each offer."""

import contextlib
import os
import select
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from ipc.endpoints import bind, check_endpoint, connect, new_token, private_endpoint, receive_all, send_now
from ipc.errors import MALFORMED, InvalidArgument, PeerLost
from ipc.handover.messages import (
    HEADER_BYTES,
    MAGIC,
    MAX_ARENA_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PEERS,
    MAX_REASON,
    MAX_SLOTS,
    PAGE,
    VERSION,
    Held,
    Offer,
    Outcome,
    Seen,
    Withdrawn,
    decode_at_source,
    encode,
)
from ipc.memory.device import CudaReference, DeviceMemory
from ipc.memory.shared import SharedMemory
from ipc.native import atomics
from ipc.ring.ring import MAX_EPOCH


class KvArena:
    """Owner's end of an arena: the generation and written amount of each of `slots`, and the payload.

    `payload` is a writable memoryview, empty if the payload is in `device`'s memory (shared by `device_reference`).
    """

    def __init__(self, memory: SharedMemory, slots: int, epoch: int, payload: memoryview) -> None:
        self.memory = memory
        self.slots = slots
        self.epoch = epoch
        self.payload = payload
        self.device: DeviceMemory | None = None
        self.device_reference: CudaReference | None = None
        self._generations = [0] * slots

    @classmethod
    def create(cls, slots: int, payload_bytes: int, epoch: int) -> "KvArena":
        """Create an arena of zeros. `epoch` differs for each start of the owner. Raises `InvalidArgument`."""
        offset = _payload_offset(slots, epoch)
        if not 1 <= payload_bytes <= MAX_ARENA_BYTES - offset:
            raise InvalidArgument(f"payload must be within 1..{MAX_ARENA_BYTES - offset} bytes, got {payload_bytes}")
        memory = _format(slots, offset, payload_bytes, epoch, offset + payload_bytes)
        return cls(memory, slots, epoch, memory.view[offset:])

    @classmethod
    def create_on(cls, device: DeviceMemory, slots: int, epoch: int) -> "KvArena":
        """Create an arena whose payload is all of `device`, a GPU's memory, which `close` frees.

        Raises `InvalidArgument`, and `MemoryRefused` if the memory cannot be shared (on a MIG device).
        """
        reference = device.reference
        memory = _format(slots, 0, device.size, epoch, _payload_offset(slots, epoch))
        arena = cls(memory, slots, epoch, memory.view[:0])
        arena.device, arena.device_reference = device, reference
        return arena

    def begin(self, slot: int) -> int:
        """Start to rewrite a slot, which makes all offers of its old content stale. Return the new generation."""
        if not 0 <= slot < self.slots:
            raise InvalidArgument(f"slot must be within 0..{self.slots - 1}, got {slot}")
        self._generations[slot] += 1
        # SYNC POINT: generation. The fence orders later writes after the store; it pairs with the fence in
        # `MappedArena.generation`, which orders the reads of the copy before its load.
        atomics.store_release(self.memory.address + HEADER_BYTES + 8 * slot, self._generations[slot])
        atomics.fence()
        self.set_written(slot, 0)
        return self._generations[slot]

    def set_written(self, slot: int, amount: int) -> None:
        """Set the amount of the slot's content written so far, in the users' unit."""
        # SYNC POINT: written. The content is stored before; it pairs with the acquire in `MappedArena.written`.
        atomics.store_release(self.memory.address + HEADER_BYTES + 8 * (self.slots + slot), amount)

    def generation(self, slot: int) -> int:
        return self._generations[slot]

    def close(self) -> None:
        """Free the memory; other processes' mappings stay valid. Idempotent."""
        with contextlib.suppress(BufferError):
            self.payload.release()
        if self.device is not None:
            self.device.close()
        self.memory.close()


def _payload_offset(slots: int, epoch: int) -> int:
    if not 1 <= slots <= MAX_SLOTS or not 0 <= epoch <= MAX_EPOCH:
        raise InvalidArgument(f"slots {slots} must be within 1..{MAX_SLOTS}, epoch {epoch} within 0..{MAX_EPOCH}")
    return -(-(HEADER_BYTES + 16 * slots) // PAGE) * PAGE


def _format(slots: int, offset: int, payload_bytes: int, epoch: int, size: int) -> SharedMemory:
    memory = SharedMemory.create("trinity-kv", size, peers_write=False)
    header = memory.view[:HEADER_BYTES].cast("q")
    for i, word in enumerate((MAGIC, VERSION, slots, offset, payload_bytes, epoch)):
        header[i] = word
    return memory


# ---- offers

LEASE_MS = 30_000.0


@dataclass(slots=True)
class _Pending:
    endpoint: str
    slot: int
    expires_ns: int


class _Target:
    """A sink: the socket to it and, once it has sent `Seen`, its pidfd."""

    def __init__(self, endpoint: str) -> None:
        self.socket = connect(zmq.PUSH, endpoint, max_message_bytes=MAX_PAYLOAD_BYTES + 4096)
        self.pid = 0
        self.pidfd = -1

    @property
    def watched(self) -> bool:
        return self.pidfd >= 0

    def watch(self, pid: int) -> None:
        """Watch the sink's process. Raises `OSError` if it does not exist."""
        if pid != self.pid:
            pidfd = os.pidfd_open(pid)
            if self.pidfd >= 0:
                os.close(self.pidfd)
            self.pid, self.pidfd = pid, pidfd

    def died(self) -> bool:
        if self.pidfd < 0:
            return False
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


class HandoverSource:
    """Offers slots of one arena to sinks. One thread; nothing here blocks.

    A slot is leased for one content at a time; the last slot is reserved for announcements. `socket` (ZeroMQ, bound) is
    readable when outcomes have arrived; `poll` also detects deaths and expired leases, so call it at least every few
    100 ms while offers are outstanding. An offer expires when its sink sends nothing for `lease_ms`, which should be
    several times `sink.RENEW_NS`, the interval at which a live sink renews leases.
    """

    def __init__(
        self,
        name: str,
        arena: KvArena,
        *,
        lease_ms: float = LEASE_MS,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if not 0 < lease_ms < 1e9:
            raise InvalidArgument(f"lease_ms must be within 0..1e9, got {lease_ms}")
        self.name = name
        self._arena, self._reference = arena, arena.memory.reference
        self.memory: Any = arena.payload if arena.device is None else arena.device
        """The arena's payload: a memoryview, or memory of a GPU."""
        self._lease_ns, self._clock = int(lease_ms * 1e6), clock
        self.endpoint = private_endpoint(new_token(), "outcomes")
        self.socket = bind(zmq.PULL, self.endpoint, max_message_bytes=4096, queue=10_000)
        self._targets: dict[str, _Target] = {}
        self._pending: dict[int, _Pending] = {}
        self._ended: list[Outcome] = []  # outcomes since the last poll
        self._next_id = 1
        self._announcing = arena.slots - 1  # never rewritten
        self._free = list(range(self._announcing))
        self.counts: Counter[str] = Counter()
        """Offers: `offered`, and by outcome `accepted`, `rejected`, `withdrawn`, `lost`, `expired`. And `malformed`
        messages."""

    @property
    def free_leases(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def lease(self) -> int | None:
        """Lease a slot of the arena; None if none is free."""
        return self._free.pop() if self._free else None

    def release(self, lease: int) -> None:
        """Free a slot for other content; a pull in progress detects this."""
        self._arena.begin(lease)
        self._free.append(lease)

    def set_written(self, lease: int, amount: int) -> None:
        """Set the amount of a slot's content that sinks may pull, in the users' unit."""
        self._arena.set_written(lease, amount)

    def announce(self, endpoint: str, payload: bytes) -> int:
        """Send a message that requests a reservation from the sink at `endpoint`. Returns and raises as `offer`."""
        return self.offer(endpoint, self._announcing, payload)

    def offer(self, endpoint: str, slot: int, payload: bytes) -> int:
        """Offer a slot's content to the sink at `endpoint`, with a message of at most 4 MiB. Return the offer's id.

        Do not `begin` the slot before the offer's outcome. Raises `InvalidArgument`, `PeerLost` (1,000 messages are
        already queued for the sink).
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidArgument(f"an offer's payload has at most {MAX_PAYLOAD_BYTES} bytes, got {len(payload)}")
        if not 0 <= slot < self._arena.slots:
            raise InvalidArgument(f"slot must be within 0..{self._arena.slots - 1}, got {slot}")
        target = self._target(endpoint)
        offer_id = self._next_id
        message = Offer(
            offer_id,
            self.name,
            self.endpoint,
            self._arena.epoch,
            slot,
            self._arena.generation(slot),
            self._reference,
            payload,
            self._arena.device_reference,
            watched=target.watched,
        )
        if not send_now(target.socket, encode(message)):
            raise PeerLost(f"the sink at {endpoint} does not read: its queue is full")
        self._next_id += 1
        self._pending[offer_id] = _Pending(endpoint, slot, self._clock() + self._lease_ns)
        self.counts["offered"] += 1
        return offer_id

    def _target(self, endpoint: str) -> _Target:
        target = self._targets.get(endpoint)
        if target is not None and target.died():
            self._drop_targets({endpoint}, self._ended)  # a restarted sink needs a new pidfd
            target = None
        if target is None:
            self._drop_idle_targets()
            target = self._targets[endpoint] = _Target(check_endpoint(endpoint))
        return target

    def _drop_idle_targets(self) -> None:
        """Bound the number of sockets to sinks."""
        if len(self._targets) >= MAX_PEERS:
            used = {pending.endpoint for pending in self._pending.values()}
            for endpoint in [e for e in self._targets if e not in used]:
                self._targets.pop(endpoint).close()

    def withdraw(self, offer_id: int) -> bool:
        """Withdraw an offer. True: it ends now, without an outcome from `poll`; False: it has already ended."""
        pending = self._pending.pop(offer_id, None)
        if pending is None:
            return False
        self.counts["withdrawn"] += 1
        send_now(self._targets[pending.endpoint].socket, encode(Withdrawn(offer_id, self.endpoint)))
        return True

    def poll(self) -> list[Outcome]:
        """Return the outcomes since the last call. Never blocks."""
        outcomes, self._ended = self._ended, []
        while messages := receive_all(self.socket):
            for frames in messages:
                try:
                    message = decode_at_source(frames[0])
                except MALFORMED:
                    self.counts["malformed"] += 1
                    continue
                if isinstance(message, Seen):
                    self._seen(message, outcomes)
                elif isinstance(message, Held):
                    self._renew(message)
                else:
                    reason = message.reason[:MAX_REASON] or "rejected"
                    counter = "accepted" if message.accepted else "rejected"
                    self._end(message.offer_id, message.accepted, "" if message.accepted else reason, counter, outcomes)
        if self._pending:
            self._end_lost_and_expired(outcomes)
        return outcomes

    def _seen(self, message: Seen, outcomes: list[Outcome]) -> None:
        pending = self._pending.get(message.offer_id)
        if pending is None:
            return
        try:
            self._targets[pending.endpoint].watch(message.pid)
        except OSError:
            self._end(message.offer_id, False, "lost", "lost", outcomes)

    def _renew(self, held: Held) -> None:
        expires_ns = self._clock() + self._lease_ns
        for offer_id in held.offer_ids:
            if offer_id in self._pending:
                self._pending[offer_id].expires_ns = expires_ns

    def _end_lost_and_expired(self, outcomes: list[Outcome]) -> None:
        now = self._clock()
        used = {pending.endpoint for pending in self._pending.values()}
        dead = {endpoint for endpoint in used if self._targets[endpoint].died()}
        self._drop_targets(dead, outcomes)
        for offer_id in [offer_id for offer_id, pending in self._pending.items() if now >= pending.expires_ns]:
            self._end(offer_id, False, "expired", "expired", outcomes)

    def _drop_targets(self, dead: set[str], outcomes: list[Outcome]) -> None:
        """End all offers to sinks that have died, and close their sockets."""
        for offer_id in [offer_id for offer_id, pending in self._pending.items() if pending.endpoint in dead]:
            self._end(offer_id, False, "lost", "lost", outcomes)
        for endpoint in dead:
            self._targets.pop(endpoint).close()

    def _end(self, offer_id: int, accepted: bool, reason: str, counter: str, outcomes: list[Outcome]) -> None:
        pending = self._pending.pop(offer_id, None)
        if pending is not None:
            self.counts[counter] += 1
            outcomes.append(Outcome(offer_id, pending.slot, accepted, reason))

    def close(self) -> None:
        """Close the sockets, but not the arena. Idempotent."""
        for target in self._targets.values():
            target.close()
        self._targets.clear()
        self.socket.close()

    def __enter__(self) -> "HandoverSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
