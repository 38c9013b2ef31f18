"""Leases of a pool's arena: slots granted with a session, vectors copied out of them, slots released at its end."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ipc.errors import InvalidArgument, MemoryRefused, ProtocolViolation, RingFull
from ipc.memory.shared import MemoryReference
from ipc.ring import exchange
from ipc.ring.descriptors import Float32s
from ipc.server.client_table import AttachedClient
from ipc.session.device_arena import DeviceArena, SlotHandle
from ipc.session.messages import Grant


class _PendingCopy(NamedTuple):
    """A request whose vector is being copied, with the client table's words that describe the request."""

    client: AttachedClient
    handle: SlotHandle
    words: tuple[int, ...]


class ArenaGrants:
    """Leases `slots` slots of `arena` (None: no arena) to each client that requests them, while enough are free.

    Vectors are copied out in batches: one batch is in flight, later requests go into the next. Nothing here blocks.
    """

    def __init__(self, arena: DeviceArena | None, slots: int) -> None:
        self._arena = arena
        self._slots = slots
        self._queued: list[_PendingCopy] = []  # for the next batch
        self._in_flight: list[_PendingCopy] = []
        self._reference = None if arena is None else arena.memory.reference  # exported once

    def grant(self, client: AttachedClient) -> Grant | None:
        """Lease slots to a client. None without an arena, with too few free slots, or with slots too small."""
        reference = self._reference
        if self._arena is None or reference is None or 4 * client.terms.max_dim > self._arena.payload_bytes:
            return None
        try:
            client.lease, lease = self._arena.lease(self._slots)
        except (RingFull, InvalidArgument):
            return None
        if isinstance(reference, MemoryReference):
            return Grant(lease, host=reference)
        return Grant(lease, gpu=reference)

    def enqueue(self, client: AttachedClient, words: memoryview) -> None:
        """Queue the copy of the current request's vector for the next batch. Raises ProtocolViolation.

        `words`: the client table's, which describe the request.
        """
        if self._arena is None:
            raise ProtocolViolation("a vector in the arena of a pool that has none")
        handle = _slot_handle(client, words[exchange.SLOT])
        self._arena.claim(client.lease, handle)
        self._queued.append(_PendingCopy(client, handle, tuple(words[exchange.REQUEST :])))

    @property
    def copying(self) -> bool:
        """Whether any copy is queued or in flight."""
        return bool(self._in_flight or self._queued)

    @property
    def copying_clients(self) -> list[AttachedClient]:
        """Clients of the copies that are queued or in flight."""
        return [copy.client for copy in (*self._in_flight, *self._queued)]

    def completed(self, words: memoryview) -> Iterator[Float32s]:
        """Yield the vectors copied by now, each with its request restored in the client table's `words`. Never blocks.

        Starts a batch if none is in flight. A vector is valid until the next one. Raises MemoryRefused if the device
        fails.
        """
        if self._arena is None or not self.copying:
            return
        if not self._in_flight:
            self._in_flight, self._queued = self._queued, []
            for copy in self._in_flight:
                self._arena.copy_out(copy.handle)
        if not self._arena.memory.idle():
            return
        for copy in self._in_flight:
            payload = self._arena.copied(copy.handle)
            if payload is None:
                self._queued.append(copy)  # the client's device had not written it yet: copy again
            else:
                for word, value in enumerate(copy.words, exchange.REQUEST):
                    words[word] = value
                yield payload.view(np.float32)[: words[exchange.DIM]]
        self._in_flight = []  # only now: if the device fails before, `copying_clients` must still list all clients

    def release(self, client: AttachedClient) -> None:
        """Release a client's slots and drop its copies."""
        self._queued = [copy for copy in self._queued if copy.client is not client]
        self._in_flight = [copy for copy in self._in_flight if copy.client is not client]
        if self._arena is not None and client.lease:
            with contextlib.suppress(MemoryRefused):  # a failed device must not keep the session
                self._arena.end_lease(client.lease)


def _slot_handle(client: AttachedClient, slot: int) -> SlotHandle:
    """Return the arena slot of a request's vector, which the request carries in its slot of the ring."""
    words = client.vectors[slot, :2].view(np.uint32).tolist()
    if len(words) != 2:
        raise ProtocolViolation("a slot of the arena where a vector is too short for its handle")
    return SlotHandle(*words)
