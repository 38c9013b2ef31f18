"""Leases of a pool's arena: slots granted with a session, released at its end."""

from ipc.errors import InvalidArgument, RingFull
from ipc.server.client_table import AttachedClient
from ipc.session.device_arena import DeviceArena
from ipc.session.messages import Grant


class ArenaGrants:
    """Leases `slots` slots of `arena` (None: no arena) to each client that requests them, while enough are free."""

    def __init__(self, arena: DeviceArena | None, slots: int) -> None:
        self._arena = arena
        self._slots = slots
        self._reference = None if arena is None else arena.memory.reference  # exported once

    def grant(self, client: AttachedClient) -> Grant | None:
        """Lease slots to a client. None without an arena, with too few free slots, or with slots too small."""
        arena, reference = self._arena, self._reference
        if arena is None or reference is None or 4 * client.terms.max_dim > arena.payload_bytes:
            return None
        try:
            client.lease, lease = arena.lease(self._slots)
        except (RingFull, InvalidArgument):
            return None
        fields = client.fields
        fields.arena, fields.arena_stride, fields.arena_slots = arena.address_of(lease.first), arena.stride, lease.count
        return Grant(lease, reference)

    def release(self, client: AttachedClient) -> None:
        """Release a client's slots."""
        if self._arena is not None and client.lease:
            self._arena.end_lease(client.lease)
