"""Decode's end of the KV hand-over: receives offers, maps their arenas read-only, and answers each offer once."""

import contextlib
import os
import select
import time
from collections import defaultdict
from collections.abc import Callable

import zmq

from ipc.endpoints import bind, connect, receive_all, send_now
from ipc.errors import MALFORMED, InvalidArgument, IpcError, MemoryRefused, PeerLost, ProtocolViolation, StaleEpoch
from ipc.handover.messages import (
    HEADER_BYTES,
    MAGIC,
    MAX_ARENA_BYTES,
    MAX_HELD,
    MAX_PAYLOAD_BYTES,
    MAX_PEERS,
    MAX_REASON,
    MAX_SLOTS,
    VERSION,
    Ended,
    Held,
    Offer,
    Seen,
    Withdrawn,
    decode_at_sink,
    encode,
)
from ipc.memory.device import CudaReference, DeviceMemory
from ipc.memory.shared import MemoryReference, SharedMemory
from ipc.native import atomics

# ---- mapped arenas

OpenDevice = Callable[[CudaReference], DeviceMemory]
"""Opens another process's GPU memory for reading. Raises `MemoryRefused`."""


class MappedArena:
    """A source's arena, mapped by a sink: validated header, read-only `payload` or `device` memory."""

    def __init__(
        self,
        reference: MemoryReference,
        epoch: int,
        device: CudaReference | None = None,
        open_device: OpenDevice | None = None,
    ) -> None:
        self.device: DeviceMemory | None = None
        self._map(reference, epoch, device)
        if device is None:
            return
        try:
            if open_device is None:
                raise MemoryRefused(f"the payload is on {device.device} of process {device.pid}; this one has no GPU")
            self.device = open_device(device)
        except BaseException:
            self.close()
            raise

    def _map(self, reference: MemoryReference, epoch: int, device: CudaReference | None) -> None:
        self.memory = SharedMemory.open(reference, max_size=MAX_ARENA_BYTES)
        try:
            if self.memory.size < HEADER_BYTES:
                raise ProtocolViolation(f"an arena has at least {HEADER_BYTES} bytes, got {self.memory.size}")
            magic, version, slots, offset, length, announced_epoch, *_ = (
                self.memory.view[:HEADER_BYTES].cast("q").tolist()
            )
            if (magic, version) != (MAGIC, VERSION):
                raise ProtocolViolation(f"not an arena of version {VERSION}: magic {magic:#x}, version {version}")
            if announced_epoch != epoch:
                raise StaleEpoch(f"the offer is of epoch {epoch}, the arena of epoch {announced_epoch}")
            begin = HEADER_BYTES + 16 * slots
            if not 1 <= slots <= MAX_SLOTS or length < 1 or self.memory.size < begin or (offset and offset < begin):
                raise ProtocolViolation(f"impossible arena: {slots} slots, payload of {length} bytes at {offset}")
            if offset and offset + length != self.memory.size:
                raise ProtocolViolation(f"payload of {length} bytes at {offset} in a memory of {self.memory.size}")
            announced = 0 if device is None else device.size
            if announced != (0 if offset else length):
                raise ProtocolViolation(f"payload of {length} bytes at {offset}, {announced} bytes of GPU memory")
            self.slots = slots
            self.epoch = epoch
            self.payload = self.memory.view[offset : offset + length] if offset else self.memory.view[:0]
            self.pidfd = os.pidfd_open(reference.pid)
        except OSError as error:
            self.memory.close()
            raise MemoryRefused(f"the arena's owner (process {reference.pid}) is gone: {error.strerror}") from error
        except BaseException:
            self.memory.close()
            raise

    def generation(self, slot: int) -> int:
        # SYNC POINT: generation, see `KvArena.begin`.
        atomics.fence()
        return atomics.load_acquire(self.memory.address + HEADER_BYTES + 8 * slot)

    def written(self, slot: int) -> int:
        # SYNC POINT: written, see `KvArena.set_written`.
        return atomics.load_acquire(self.memory.address + HEADER_BYTES + 8 * (self.slots + slot))

    def close(self) -> None:
        os.close(self.pidfd)
        if self.device is not None:
            self.device.close()
        with contextlib.suppress(BufferError):
            self.payload.release()
        self.memory.close()


# ---- offers

RENEW_NS = 5_000_000_000  # interval of `Held` messages: a sixth of the default lease


class HandoverSink:
    """Receives offers at `endpoint` and answers each once, with `acknowledge` or `reject`. One thread; never blocks.

    `socket` (ZeroMQ, bound) is readable when offers have arrived. `open_device` opens payloads in a GPU's memory;
    without it offers of such arenas are rejected. `malformed` messages and the offers `refused` here are counted.
    """

    def __init__(
        self,
        endpoint: str,
        open_device: OpenDevice | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.endpoint, self._clock = endpoint, clock
        self.malformed = self.refused = 0
        self._renewed_ns = clock()
        self.socket = bind(zmq.PULL, endpoint, max_message_bytes=MAX_PAYLOAD_BYTES + 4096)
        self._open_device = open_device
        self._replies: dict[str, zmq.Socket[bytes]] = {}
        self.arenas: dict[MemoryReference, MappedArena] = {}
        self._deaths = select.epoll()
        self._open: dict[tuple[str, int], Offer] = {}

    def receive(self) -> list[Offer]:
        """Return the offers since the last call, without withdrawn ones. Never blocks.

        This also renews the leases of offers that are not answered yet. An offer whose arena cannot be opened, or with
        an invalid slot, epoch or generation, is rejected here and not returned.
        """
        self._drop_dead()
        self._renew()
        offers: list[Offer] = []
        while messages := receive_all(self.socket):
            for frames in messages:
                try:
                    message = decode_at_sink(frames[0])
                except MALFORMED:
                    self.malformed += 1
                    continue
                if isinstance(message, Withdrawn):
                    self._open.pop((message.reply, message.offer_id), None)
                elif self._open_offer(message):
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

    def _open_offer(self, offer: Offer) -> bool:
        try:
            reply = self._reply(offer.reply)
        except InvalidArgument:
            self.malformed += 1
            return False
        if not offer.watched:
            send_now(reply, encode(Seen(offer.offer_id, os.getpid())))
        self._open[(offer.reply, offer.offer_id)] = offer
        try:
            arena = self._arena(offer)
            if not 0 <= offer.slot < arena.slots:
                raise ProtocolViolation(f"slot {offer.slot} is not within 0..{arena.slots - 1}")
            if arena.generation(offer.slot) != offer.generation:
                raise StaleEpoch(f"slot {offer.slot} was rewritten after the offer")
        except IpcError as error:
            self.refused += 1
            self.reject(offer, str(error))
            return False
        return True

    def _arena(self, offer: Offer) -> MappedArena:
        arena = self.arenas.get(offer.arena)
        if arena is None:
            if len(self.arenas) >= MAX_PEERS:
                raise MemoryRefused(f"{MAX_PEERS} arenas are already mapped")
            arena = MappedArena(offer.arena, offer.epoch, offer.device, self._open_device)
            self.arenas[offer.arena] = arena
            self._deaths.register(arena.pidfd, select.EPOLLIN)
        elif arena.epoch != offer.epoch:
            raise StaleEpoch(f"the offer is of epoch {offer.epoch}, the arena of epoch {arena.epoch}")
        return arena

    def _is_open(self, offer: Offer) -> bool:
        return self._open.get((offer.reply, offer.offer_id)) is offer

    @property
    def on_device(self) -> bool:
        """Whether payloads in a GPU's memory can be opened."""
        return self._open_device is not None

    def memory(self, offer: Offer) -> memoryview:
        """Return the arena's whole payload, read-only; mapped once per arena. Raises `PeerLost` if its owner is gone.

        A mapping in use outlives its owner, so offered content can still be pulled after the owner's death.
        """
        return self._arena_of(offer).payload

    def device_memory(self, offer: Offer) -> DeviceMemory:
        """Return the payload's GPU memory, for reading; opened once per arena. Raises `PeerLost`.

        Unlike host memory it does not outlive its owner: content not pulled by then is not current any more.
        """
        arena = self._arena_of(offer)
        if arena.device is None:
            raise ProtocolViolation(f"the arena of process {offer.arena.pid} is in host memory")
        return arena.device

    def _arena_of(self, offer: Offer) -> MappedArena:
        arena = self.arenas.get(offer.arena)
        if arena is None:
            raise PeerLost(f"the owner of the arena (process {offer.arena.pid}) is gone")
        return arena

    def is_current(self, offer: Offer) -> bool:
        """Return whether a copy made before this call is valid: the slot was not rewritten, the offer not withdrawn.

        A copy out of a GPU's memory is also invalid if its owner has died: CUDA leaves the content undefined then.
        """
        arena = self.arenas.get(offer.arena)
        if arena is None or not self._is_open(offer) or arena.generation(offer.slot) != offer.generation:
            return False
        return arena.device is None or arena.pidfd not in self._dead()

    def written(self, offer: Offer) -> int:
        """Return the written amount of an offer's slot; 0 if its owner is gone."""
        arena = self.arenas.get(offer.arena)
        return arena.written(offer.slot) if arena is not None else 0

    def acknowledge(self, offer: Offer) -> bool:
        """Report that the content is pulled: the source may reuse the slot. False: already answered or withdrawn."""
        return self._answer(offer, True, "")

    def reject(self, offer: Offer, reason: str) -> bool:
        """Reject an offer; the source receives `reason`. False: already answered or withdrawn."""
        return self._answer(offer, False, reason[:MAX_REASON] or "rejected")

    def _answer(self, offer: Offer, accepted: bool, reason: str) -> bool:
        if not self._is_open(offer):
            return False
        del self._open[(offer.reply, offer.offer_id)]
        # If the source does not receive this, the lease ends the offer.
        send_now(self._reply(offer.reply), encode(Ended(offer.offer_id, accepted, reason)))
        return True

    def _reply(self, reply: str) -> "zmq.Socket[bytes]":
        socket = self._replies.get(reply)
        if socket is None:
            if len(self._replies) >= MAX_PEERS:
                raise InvalidArgument(f"{MAX_PEERS} sources are already connected")
            socket = self._replies[reply] = connect(zmq.PUSH, reply, max_message_bytes=4096, queue=10_000)
        return socket

    def _drop_dead(self) -> None:
        """Unmap arenas whose owners have died, unless they have an open offer."""
        dead = self._dead()
        if not dead:
            return
        used = {offer.arena for offer in self._open.values()}
        for reference, arena in list(self.arenas.items()):
            if arena.pidfd in dead and reference not in used:
                self._deaths.unregister(arena.pidfd)
                del self.arenas[reference]
                arena.close()

    def _dead(self) -> set[int]:
        return {fd for fd, _ in self._deaths.poll(0)}

    def close(self) -> None:
        """Unmap arenas and close sockets. Open offers end at their source as 'lost' or 'expired'. Idempotent."""
        if self.socket.closed:
            return
        self.socket.close()
        for socket in self._replies.values():
            socket.close()
        for arena in self.arenas.values():
            arena.close()
        self.arenas.clear()
        self._deaths.close()

    def __enter__(self) -> "HandoverSink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
