"""Decode's end of the KV hand-over: receives offers, maps their arenas read-only, and answers each offer once."""

import os
import select
import time
from collections import defaultdict
from collections.abc import Callable

import msgspec
import zmq

from ipc.endpoints import bind, connect, receive_all, send_now
from ipc.errors import MALFORMED, InvalidArgument, IpcError, MemoryRefused, PeerLost, ProtocolViolation, StaleEpoch
from ipc.handover.arena import MappedArena, OpenDevice
from ipc.handover.messages import (
    MAX_HELD,
    MAX_PAYLOAD_BYTES,
    MAX_PEERS,
    MAX_REASON,
    Ended,
    Held,
    Offer,
    Seen,
    Withdrawn,
    decode_at_sink,
    encode,
)
from ipc.memory.device import DeviceMemory
from ipc.memory.shared import MemoryReference

RENEW_NS = 5_000_000_000  # between two words that offers are held: a sixth of the default lease


class SinkStatistics(msgspec.Struct, frozen=True):
    """Counters of a sink: offers received, how they were answered, and messages that were malformed or refused."""

    received: int
    accepted: int
    rejected: int
    refused: int
    malformed: int
    arenas: int


class HandoverSink:
    """Receives offers at `endpoint` and answers each once, with `acknowledge` or `reject`. One thread; never blocks.

    `socket` (ZeroMQ, bound) is readable when offers came. `open_device` opens payloads in a GPU's memory; without it
    offers of such arenas are refused.
    """

    def __init__(
        self,
        endpoint: str,
        open_device: OpenDevice | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.endpoint, self._clock = endpoint, clock
        self._renewed_ns = clock()
        self.socket = bind(zmq.PULL, endpoint, max_message_bytes=MAX_PAYLOAD_BYTES + 4096)
        self._open_device = open_device
        self._replies: dict[str, zmq.Socket[bytes]] = {}
        self._arenas: dict[MemoryReference, MappedArena] = {}
        self._deaths = select.epoll()
        self._open: dict[tuple[str, int], Offer] = {}
        self._counts = dict.fromkeys(SinkStatistics.__struct_fields__, 0)

    def receive(self) -> list[Offer]:
        """Offers since the last call, withdrawn ones left out. Never blocks.

        It is also how sources hear that this process lives, and still has what it has not answered: their leases are
        renewed. An offer whose arena cannot be opened, or that names a slot, epoch or generation that is not there, is
        rejected here and not returned.
        """
        self._drop_dead()
        self._renew()
        offers: list[Offer] = []
        while messages := receive_all(self.socket):
            for frames in messages:
                try:
                    message = decode_at_sink(frames[0])
                except MALFORMED:
                    self._counts["malformed"] += 1
                    continue
                if isinstance(message, Withdrawn):
                    self._open.pop((message.reply, message.offer_id), None)
                elif self._take(message):
                    offers.append(message)
        return [offer for offer in offers if self._is_open(offer)]

    def _renew(self) -> None:
        now = self._clock()
        if now - self._renewed_ns < RENEW_NS:
            return
        self._renewed_ns = now
        held: defaultdict[str, list[int]] = defaultdict(list)
        for reply, offer_id in self._open:
            held[reply].append(offer_id)
        for reply, ids in held.items():
            for begin in range(0, len(ids), MAX_HELD):
                send_now(self._reply(reply), encode(Held(tuple(ids[begin : begin + MAX_HELD]))))

    def _take(self, offer: Offer) -> bool:
        try:
            reply = self._reply(offer.reply)
        except InvalidArgument:
            self._counts["malformed"] += 1
            return False
        if not offer.watched:
            send_now(reply, encode(Seen(offer.offer_id, os.getpid())))
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
            return False
        self._counts["received"] += 1
        return True

    def _arena(self, offer: Offer) -> MappedArena:
        arena = self._arenas.get(offer.arena)
        if arena is None:
            if len(self._arenas) >= MAX_PEERS:
                raise MemoryRefused(f"{MAX_PEERS} arenas are mapped already")
            arena = MappedArena(offer.arena, offer.epoch, offer.device, self._open_device)
            self._arenas[offer.arena] = arena
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
        return self._arena_of(offer).payload

    def device_memory(self, offer: Offer) -> DeviceMemory:
        """The GPU memory that the payload is; opened once per arena, and only to read from. Raises `PeerLost`.

        Unlike host memory it does not outlive its owner: what was not pulled by then is not current any more.
        """
        arena = self._arena_of(offer)
        if arena.device is None:
            raise ProtocolViolation(f"the arena of process {offer.arena.pid} is in host memory")
        return arena.device

    def _arena_of(self, offer: Offer) -> MappedArena:
        arena = self._arenas.get(offer.arena)
        if arena is None:
            raise PeerLost(f"the owner of the arena (process {offer.arena.pid}) is gone")
        return arena

    def current(self, offer: Offer) -> bool:
        """Ask after copying: False means that the slot was begun anew or the offer withdrawn, and the copy is void.

        So is a copy out of a GPU's memory whose owner has died: CUDA says nothing of what it holds then.
        """
        arena = self._arenas.get(offer.arena)
        if arena is None or not self._is_open(offer) or arena.generation(offer.slot) != offer.generation:
            return False
        return arena.device is None or arena.pidfd not in self._dead()

    def acknowledge(self, offer: Offer) -> bool:
        """The content is pulled, the source may begin the slot. False: the offer was answered or withdrawn before."""
        return self._answer(offer, True, "")

    def reject(self, offer: Offer, reason: str) -> bool:
        """The content is not wanted; `reason` goes to the source. False: the offer was answered or withdrawn before."""
        return self._answer(offer, False, reason[:MAX_REASON] or "rejected")

    def _answer(self, offer: Offer, accepted: bool, reason: str) -> bool:
        if not self._is_open(offer):
            return False
        del self._open[(offer.reply, offer.offer_id)]
        self._counts["accepted" if accepted else "rejected"] += 1
        # Nobody there, or nobody reads: the lease ends the offer at the source.
        send_now(self._reply(offer.reply), encode(Ended(offer.offer_id, accepted, reason)))
        return True

    def _reply(self, reply: str) -> "zmq.Socket[bytes]":
        socket = self._replies.get(reply)
        if socket is None:
            if len(self._replies) >= MAX_PEERS:
                raise InvalidArgument(f"{MAX_PEERS} sources are known already")
            socket = self._replies[reply] = connect(zmq.PUSH, reply, max_message_bytes=4096, queue=10_000)
        return socket

    def _drop_dead(self) -> None:
        """Forget arenas whose owner died, unless an offer of theirs is still open."""
        dead = self._dead()
        if not dead:
            return
        used = {offer.arena for offer in self._open.values()}
        for reference, arena in list(self._arenas.items()):
            if arena.pidfd in dead and reference not in used:
                self._deaths.unregister(arena.pidfd)
                del self._arenas[reference]
                arena.close()

    def _dead(self) -> set[int]:
        return {fd for fd, _ in self._deaths.poll(0)}

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
