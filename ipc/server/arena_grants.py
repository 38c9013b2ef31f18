"""A pool's arena as its clients use it: slots granted with a session, vectors taken out, slots back at its end."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ipc.errors import InvalidArgument, MemoryRefused, ProtocolViolation, RingFull
from ipc.memory.shared import MemoryReference
from ipc.ring import exchange
from ipc.ring.descriptors import Float32s
from ipc.server.places import ClientPlace
from ipc.session.device_arena import DeviceArena, Place
from ipc.session.messages import Grant


class _Reading(NamedTuple):
    """A request whose vector is on its way, and the desk's words that describe it."""

    client: ClientPlace
    place: Place
    words: tuple[int, ...]


class ArenaGrants:
    """Of `arena`, or of none: `slots` of it for each client that asks, as long as there are so many.

    Vectors are copied out in batches: one is under way, what comes meanwhile is in the next. Nothing here waits.
    """

    def __init__(self, arena: DeviceArena | None, slots: int) -> None:
        self._arena = arena
        self._slots = slots
        self._next: list[_Reading] = []  # claimed; to be copied out together, when the last ones are
        self._under_way: list[_Reading] = []
        self._reference = None if arena is None else arena.memory.reference  # exported once

    def grant(self, client: ClientPlace) -> Grant | None:
        """None where there is no arena, too few of its slots are left, or they are too small for the vectors."""
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

    def put(self, client: ClientPlace, words: memoryview) -> None:
        """The request that a desk's words describe has its vector in the arena: it is in the next batch.

        Raises ProtocolViolation.
        """
        if self._arena is None:
            raise ProtocolViolation("a vector in the arena of a pool that has none")
        place = _place(client, words[exchange.SLOT])
        self._arena.claim(client.lease, place)
        self._next.append(_Reading(client, place, tuple(words[exchange.FOUND :])))

    @property
    def reading(self) -> bool:
        """Whether vectors are on their way."""
        return bool(self._under_way or self._next)

    @property
    def readers(self) -> list[ClientPlace]:
        """Whose."""
        return [reading.client for reading in (*self._under_way, *self._next)]

    def arrived(self, words: memoryview) -> Iterator[Float32s]:
        """The vectors that are there by now, each with its request's words in those of the desk. Never waits.

        Begins a batch if none is under way. A vector is good until the next. Raises MemoryRefused if the device fails.
        """
        if self._arena is None or not self.reading:
            return
        if not self._under_way:
            self._under_way, self._next = self._next, []
            for reading in self._under_way:
                self._arena.copy_out(reading.place)
        if not self._arena.memory.idle():
            return
        for reading in self._under_way:
            payload = self._arena.taken_out(reading.place)
            if payload is None:
                self._next.append(reading)  # its client's device is still at it
            else:
                for word, value in enumerate(reading.words, exchange.FOUND):
                    words[word] = value
                yield payload.view(np.float32)[: words[exchange.DIM]]
        self._under_way = []  # not before: a device that fails on the way leaves nobody without an end

    def end(self, client: ClientPlace) -> None:
        """Its slots are free for others, and what it has on the way is dropped."""
        self._next = [reading for reading in self._next if reading.client is not client]
        self._under_way = [reading for reading in self._under_way if reading.client is not client]
        if self._arena is not None and client.lease:
            with contextlib.suppress(MemoryRefused):  # a device that has failed must not keep the session
                self._arena.end_lease(client.lease)


def _place(client: ClientPlace, slot: int) -> Place:
    """Where a request's vector lies, as its slot says."""
    words = client.vectors[slot, :2].view(np.uint32).tolist()
    if len(words) != 2:
        raise ProtocolViolation("a place in the arena where a vector is too short for it")
    return Place(*words)
