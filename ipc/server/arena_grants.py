"""A pool's arena as its clients use it: slots granted with a session, vectors taken out, slots back at its end."""

import numpy as np

from ipc.errors import InvalidArgument, ProtocolViolation, RingFull
from ipc.memory.shared import MemoryReference
from ipc.ring.descriptors import Float32s
from ipc.server.places import ClientPlace
from ipc.session.device_arena import DeviceArena, Place
from ipc.session.messages import Grant


class ArenaGrants:
    """Of `arena`, or of none: `slots` of it for each client that asks, as long as there are so many."""

    def __init__(self, arena: DeviceArena | None, slots: int) -> None:
        self._arena = arena
        self._slots = slots
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

    def is_written(self, client: ClientPlace, slot: int) -> bool:
        """Whether the vector of a request is there by now: the queue of a dead client's device must hold nobody up.

        Raises ProtocolViolation.
        """
        if self._arena is None:
            raise ProtocolViolation("a vector in the arena of a pool that has none")
        return self._arena.is_written(client.lease, _place(client, slot))

    def take(self, client: ClientPlace, slot: int, dim: int) -> Float32s:
        """A request's vector that is written, out of the arena."""
        assert self._arena is not None
        vector = np.empty(dim, np.float32)
        self._arena.take(client.lease, _place(client, slot), vector)
        self._arena.memory.flush()
        return vector

    def end(self, client: ClientPlace) -> None:
        """Its slots are free for others."""
        if self._arena is not None and client.lease:
            self._arena.end_lease(client.lease)


def _place(client: ClientPlace, slot: int) -> Place:
    """Where a request's vector lies, as its slot says."""
    words = client.vectors[slot, :2].view(np.uint32).tolist()
    if len(words) != 2:
        raise ProtocolViolation("a place in the arena where a vector is too short for it")
    return Place(*words)
