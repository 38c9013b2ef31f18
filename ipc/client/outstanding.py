"""What a client has asked and was not told yet: its requests, results not yet returned, cancellations not yet sent."""

import time
from collections import deque

import numpy as np

from ipc.ring.descriptors import LOST, REQUEST_HEADER, Result
from ipc.ring.ring import RingProducer
from ipc.session.parameters import pack_cancel

_NO_IDS, _NO_DISTANCES = np.empty(0, np.int64), np.empty(0, np.float32)


class Outstanding(dict[int, int]):
    """Request id → enqueue_ns, from submission to result; over all sessions of a client."""

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 1
        self.ended: list[Result] = []
        """Read or lost, not yet returned."""
        self.unsent: deque[int] = deque()
        """Cancellations for which the ring has had no room yet."""

    def withdraw(self, ids: range) -> None:
        """They were not sent."""
        for request_id in ids:
            del self[request_id]
        self.next_id = ids.start

    def send_cancellations(self, ring: RingProducer, epoch: int) -> bool:
        """As many of those unsent as there is room for; whether the pool must be rung."""
        ring_it = False
        while self.unsent:
            request_id = self.unsent[0]
            if request_id in self:
                if ring.free() < 1:
                    break
                offset = ring.header_offsets[ring.loan()]
                REQUEST_HEADER.pack_into(ring.view, offset, request_id, 0, 0, pack_cancel(epoch))
                ring_it |= ring.send()
            self.unsent.popleft()
        return ring_it

    def lose(self) -> int:
        """All of them end with status 'lost'; how many."""
        now, count = time.monotonic_ns(), len(self)
        for request_id, enqueue_ns in self.items():
            self.ended.append(Result(request_id, LOST, _NO_IDS, _NO_DISTANCES, 0, enqueue_ns, 0, 0, now))
        self.clear()
        self.unsent.clear()
        return count
