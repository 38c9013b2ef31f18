"""KV hand-over through shared memory: prefill owns an arena of slots, decode pulls, and its word frees the slot.

The memory, and how a torn copy is noticed, are `arena.py`'s. Offers travel prefill → decode and outcomes decode →
prefill, over one-way ZeroMQ sockets. Each offer ends exactly once at its source: accepted, rejected (with a reason),
withdrawn, 'lost' (the decode process died), or 'expired' (no word within the lease; safe, because a late puller meets
another generation).
"""

import os
import select
import time

import msgspec
import zmq

from ipc.arena import KvArena, MappedArena
from ipc.endpoints import bind, check_endpoint, connect, new_token, private_endpoint, receive_all, send_now
from ipc.errors import InvalidArgument, IpcError, MemoryRefused, PeerLost, ProtocolViolation, StaleEpoch
from ipc.memory import MemoryReference, Pid

MAX_PAYLOAD_BYTES = 1 << 22  # of an offer's message, not of the arena
LEASE_MS = 30_000.0
MAX_PEERS = 1024
_MAX_REASON = 500


# ---- messages


class _Offered(msgspec.Struct, frozen=True, tag=True):
    offer_id: int
    source: str
    reply: str
    epoch: int
    slot: int
    generation: int
    arena: MemoryReference
    payload: bytes


class _Withdrawn(msgspec.Struct, frozen=True, tag=True):
    offer_id: int
    reply: str


class _Seen(msgspec.Struct, frozen=True, tag=True):
    offer_id: int
    pid: Pid


class _Ended(msgspec.Struct, frozen=True, tag=True):
    offer_id: int
    accepted: bool
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_decode_at_sink = msgspec.msgpack.Decoder(_Offered | _Withdrawn).decode
_decode_at_source = msgspec.msgpack.Decoder(_Seen | _Ended).decode


class Outcome(msgspec.Struct, frozen=True):
    """How an offer ended. `reason` is '' when accepted, else the sink's, 'withdrawn', 'lost' or 'expired'."""

    offer_id: int
    slot: int
    accepted: bool
    reason: str


class Offer(msgspec.Struct, frozen=True):
    """A slot to pull: `payload` is the source's message, `source` its name. (`reply`, `offer_id`) identifies it."""

    offer_id: int
    source: str
    reply: str
    epoch: int
    slot: int
    generation: int
    arena: MemoryReference
    payload: bytes


class SourceStatistics(msgspec.Struct, frozen=True):
    """Counters of a source: offers made, and how they ended; messages that were malformed."""

    offered: int
    outstanding: int
    accepted: int
    rejected: int
    withdrawn: int
    lost: int
    expired: int
    malformed: int


class SinkStatistics(msgspec.Struct, frozen=True):
    """Counters of a sink: offers received, how they were answered, and messages that were malformed or refused."""

    received: int
    accepted: int
    rejected: int
    refused: int
    malformed: int
    arenas: int


# ---- prefill's end


class _Pending:
    __slots__ = ("endpoint", "expires_ns", "slot")

    def __init__(self, endpoint: str, slot: int, expires_ns: int) -> None:
        self.endpoint = endpoint
        self.slot = slot
        self.expires_ns = expires_ns


class _Target:
    """A sink we offer to: the socket there and, once it has spoken, its pidfd."""

    def __init__(self, endpoint: str) -> None:
        self.socket = connect(zmq.PUSH, endpoint, max_message_bytes=MAX_PAYLOAD_BYTES + 4096)
        self.pid = 0
        self.pidfd = -1

    def watch(self, pid: int) -> None:
        """Raises `OSError` if there is no such process (any more)."""
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

    `socket` (ZeroMQ, bound) is readable when outcomes came; deaths and leases are noticed by `poll`, so call it at
    least every few 100 ms while offers are outstanding.
    """

    def __init__(self, name: str, arena: KvArena, *, lease_ms: float = LEASE_MS) -> None:
        if not 0 < lease_ms < 1e9:
            raise InvalidArgument(f"lease_ms must be within 0..1e9, got {lease_ms}")
        self.name = name
        self._arena = arena
        self._lease_ns = int(lease_ms * 1e6)
        self.endpoint = private_endpoint(new_token(), "outcomes")
        self.socket = bind(zmq.PULL, self.endpoint, max_message_bytes=4096, queue=10_000)
        self._targets: dict[str, _Target] = {}
        self._pending: dict[int, _Pending] = {}
        self._buried: list[Outcome] = []  # ended between two polls
        self._next_id = 1
        self._counts = dict.fromkeys(SourceStatistics.__struct_fields__, 0)

    def offer(self, endpoint: str, slot: int, payload: bytes) -> int:
        """Offer the slot's content to the sink at `endpoint`, with a message of at most 4 MiB; returns the offer's id.

        Do not `begin` the slot before the offer's outcome. Raises `InvalidArgument`, `PeerLost` (1,000 messages wait
        there already).
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidArgument(f"an offer's payload has at most {MAX_PAYLOAD_BYTES} bytes, got {len(payload)}")
        if not 0 <= slot < self._arena.slots:
            raise InvalidArgument(f"slot must be within 0..{self._arena.slots - 1}, got {slot}")
        target = self._target(endpoint)
        offer_id = self._next_id
        message = _Offered(
            offer_id,
            self.name,
            self.endpoint,
            self._arena.epoch,
            slot,
            self._arena.generation(slot),
            self._arena.memory.reference,
            payload,
        )
        if not send_now(target.socket, _encode(message)):
            raise PeerLost(f"the sink at {endpoint} does not read: too many messages wait")
        self._next_id += 1
        self._pending[offer_id] = _Pending(endpoint, slot, time.monotonic_ns() + self._lease_ns)
        self._counts["offered"] += 1
        return offer_id

    def _target(self, endpoint: str) -> _Target:
        target = self._targets.get(endpoint)
        if target is not None and target.died():
            self._bury({endpoint}, self._buried)  # a sink that was started again must not inherit the last one's death
            target = None
        if target is None:
            self._drop_idle_targets()
            target = self._targets[endpoint] = _Target(check_endpoint(endpoint))
        return target

    def _drop_idle_targets(self) -> None:
        """Sinks come and go; keep their sockets bounded."""
        if len(self._targets) >= MAX_PEERS:
            used = {pending.endpoint for pending in self._pending.values()}
            for endpoint in [e for e in self._targets if e not in used]:
                self._targets.pop(endpoint).close()

    def withdraw(self, offer_id: int) -> bool:
        """Take an offer back. True: it ends now, without an outcome from `poll`; False: it has ended already."""
        pending = self._pending.pop(offer_id, None)
        if pending is None:
            return False
        self._counts["withdrawn"] += 1
        send_now(self._targets[pending.endpoint].socket, _encode(_Withdrawn(offer_id, self.endpoint)))
        return True

    def poll(self) -> list[Outcome]:
        """Outcomes since the last call. Never blocks."""
        outcomes, self._buried = self._buried, []
        while messages := receive_all(self.socket):
            for frames in messages:
                try:
                    message = _decode_at_source(frames[0])
                except msgspec.MsgspecError:
                    self._counts["malformed"] += 1
                    continue
                if isinstance(message, _Seen):
                    self._seen(message, outcomes)
                else:
                    reason = message.reason[:_MAX_REASON] or "rejected"
                    kind = "accepted" if message.accepted else "rejected"
                    self._end(message.offer_id, message.accepted, "" if message.accepted else reason, kind, outcomes)
        if self._pending:
            self._end_lost_and_expired(outcomes)
        return outcomes

    def _seen(self, message: _Seen, outcomes: list[Outcome]) -> None:
        pending = self._pending.get(message.offer_id)
        if pending is None:
            return
        try:
            self._targets[pending.endpoint].watch(message.pid)
        except OSError:
            self._end(message.offer_id, False, "lost", "lost", outcomes)

    def _end_lost_and_expired(self, outcomes: list[Outcome]) -> None:
        now = time.monotonic_ns()
        used = {pending.endpoint for pending in self._pending.values()}
        dead = {endpoint for endpoint in used if self._targets[endpoint].died()}
        self._bury(dead, outcomes)
        for offer_id in [offer_id for offer_id, pending in self._pending.items() if now >= pending.expires_ns]:
            self._end(offer_id, False, "expired", "expired", outcomes)

    def _bury(self, dead: set[str], outcomes: list[Outcome]) -> None:
        """End what was offered to sinks that died, and forget them."""
        for offer_id in [offer_id for offer_id, pending in self._pending.items() if pending.endpoint in dead]:
            self._end(offer_id, False, "lost", "lost", outcomes)
        for endpoint in dead:
            self._targets.pop(endpoint).close()

    def _end(self, offer_id: int, accepted: bool, reason: str, kind: str, outcomes: list[Outcome]) -> None:
        pending = self._pending.pop(offer_id, None)
        if pending is not None:
            self._counts[kind] += 1
            outcomes.append(Outcome(offer_id, pending.slot, accepted, reason))

    def close(self) -> None:
        """Close the sockets; the arena stays the caller's. Idempotent."""
        for target in self._targets.values():
            target.close()
        self._targets.clear()
        self.socket.close()

    def __enter__(self) -> "HandoverSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> SourceStatistics:
        """Counters; cheap."""
        return SourceStatistics(**{**self._counts, "outstanding": len(self._pending)})


# ---- decode's end


class HandoverSink:
    """Receives offers at `endpoint` and answers each once, with `acknowledge` or `reject`. One thread; never blocks.

    `socket` (ZeroMQ, bound) is readable when offers came.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.socket = bind(zmq.PULL, endpoint, max_message_bytes=MAX_PAYLOAD_BYTES + 4096)
        self._replies: dict[str, zmq.Socket[bytes]] = {}
        self._arenas: dict[MemoryReference, MappedArena] = {}
        self._deaths = select.epoll()
        self._open: dict[tuple[str, int], Offer] = {}
        self._counts = dict.fromkeys(SinkStatistics.__struct_fields__, 0)

    def receive(self) -> list[Offer]:
        """Offers since the last call, withdrawn ones left out. Never blocks.

        An offer whose arena cannot be opened, or that names a slot, epoch or generation that is not there, is rejected
        here and not returned.
        """
        self._drop_dead()
        offers: list[Offer] = []
        while messages := receive_all(self.socket):
            for frames in messages:
                try:
                    message = _decode_at_sink(frames[0])
                except msgspec.MsgspecError:
                    self._counts["malformed"] += 1
                    continue
                if isinstance(message, _Withdrawn):
                    self._open.pop((message.reply, message.offer_id), None)
                elif (offer := self._take(message)) is not None:
                    offers.append(offer)
        return [offer for offer in offers if self._is_open(offer)]

    def _take(self, message: _Offered) -> Offer | None:
        try:
            self._send(message.reply, _Seen(message.offer_id, os.getpid()))
        except InvalidArgument:
            self._counts["malformed"] += 1
            return None
        offer = Offer(**msgspec.structs.asdict(message))
        self._open[(offer.reply, offer.offer_id)] = offer
        try:
            arena = self._arena(offer)
            if not 0 <= offer.slot < arena.slots:
                raise ProtocolViolation(f"slot {offer.slot} is not within 0..{arena.slots - 1}")
            if arena.generation(offer.slot) != offer.generation:
                raise StaleEpoch(f"slot {offer.slot} was begun anew after the offer")
        except IpcError as error:
            self._counts["refused"] += 1
            self.reject(offer, str(error))
            return None
        self._counts["received"] += 1
        return offer

    def _arena(self, offer: Offer) -> MappedArena:
        arena = self._arenas.get(offer.arena)
        if arena is None:
            if len(self._arenas) >= MAX_PEERS:
                raise MemoryRefused(f"{MAX_PEERS} arenas are mapped already")
            arena = self._arenas[offer.arena] = MappedArena(offer.arena, offer.epoch)
            self._deaths.register(arena.pidfd, select.EPOLLIN)
        elif arena.epoch != offer.epoch:
            raise StaleEpoch(f"the offer is of epoch {offer.epoch}, the arena of epoch {arena.epoch}")
        return arena

    def _is_open(self, offer: Offer) -> bool:
        return self._open.get((offer.reply, offer.offer_id)) is offer

    def memory(self, offer: Offer) -> memoryview:
        """The arena's whole payload, read-only; mapped once per arena. Raises `PeerLost` if its owner is gone.

        A mapping that is in use outlives its owner, so what was offered can still be pulled after the owner's death.
        """
        arena = self._arenas.get(offer.arena)
        if arena is None:
            raise PeerLost(f"the owner of the arena (process {offer.arena.pid}) is gone")
        return arena.payload

    def current(self, offer: Offer) -> bool:
        """Ask after copying: False means that the slot was begun anew or the offer withdrawn, and the copy is void."""
        arena = self._arenas.get(offer.arena)
        return arena is not None and self._is_open(offer) and arena.generation(offer.slot) == offer.generation

    def acknowledge(self, offer: Offer) -> bool:
        """The content is pulled, the source may begin the slot. False: the offer was answered or withdrawn before."""
        return self._answer(offer, True, "")

    def reject(self, offer: Offer, reason: str) -> bool:
        """The content is not wanted; `reason` goes to the source. False: the offer was answered or withdrawn before."""
        return self._answer(offer, False, reason[:_MAX_REASON] or "rejected")

    def _answer(self, offer: Offer, accepted: bool, reason: str) -> bool:
        if not self._is_open(offer):
            return False
        del self._open[(offer.reply, offer.offer_id)]
        self._counts["accepted" if accepted else "rejected"] += 1
        self._send(offer.reply, _Ended(offer.offer_id, accepted, reason))
        return True

    def _send(self, reply: str, message: _Seen | _Ended) -> None:
        socket = self._replies.get(reply)
        if socket is None:
            if len(self._replies) >= MAX_PEERS:
                raise InvalidArgument(f"{MAX_PEERS} sources are known already")
            socket = self._replies[reply] = connect(zmq.PUSH, reply, max_message_bytes=4096, queue=10_000)
        # Nobody there, or nobody reads: the lease ends the offer at the source.
        send_now(socket, _encode(message))

    def _drop_dead(self) -> None:
        """Forget arenas whose owner died, unless an offer of theirs is still open."""
        dead = {fd for fd, _ in self._deaths.poll(0)}
        if not dead:
            return
        used = {offer.arena for offer in self._open.values()}
        for reference, arena in list(self._arenas.items()):
            if arena.pidfd in dead and reference not in used:
                self._deaths.unregister(arena.pidfd)
                del self._arenas[reference]
                arena.close()

    def close(self) -> None:
        """Unmap and close. Offers left open end at their source with 'lost' or 'expired'. Idempotent."""
        if self.socket.closed:
            return
        self.socket.close()
        for socket in self._replies.values():
            socket.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self._deaths.close()

    def __enter__(self) -> "HandoverSink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> SinkStatistics:
        """Counters; cheap."""
        return SinkStatistics(**{**self._counts, "arenas": len(self._arenas)})
