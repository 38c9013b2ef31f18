"""What a pool keeps for one attached client."""

import os

import numpy as np

from ipc.doorbell import Ringer
from ipc.memory import SharedMemory
from ipc.ring import RingConsumer, RingLayout, RingProducer, format_ring
from ipc.session import result_offset


class ClientPlace:
    """One attached client: its rings, its doorbell, its pidfd, and the requests it waits for."""

    def __init__(
        self,
        handle: int,
        name: str,
        pidfd: int,
        bell: Ringer,
        memory: SharedMemory,
        layouts: tuple[RingLayout, RingLayout],
        epoch: int,
        max_dim: int,
        max_k: int,
    ) -> None:
        self.handle = handle
        self.name = name
        self.pidfd = pidfd
        self.bell = bell
        self.memory = memory
        split = result_offset(layouts[0])
        requests, results = memory.view[: layouts[0].size], memory.view[split : split + layouts[1].size]
        format_ring(requests, layouts[0], epoch)
        format_ring(results, layouts[1], epoch)
        self.requests = RingConsumer(requests, layouts[0], epoch)
        self.results = RingProducer(results, layouts[1], epoch)
        # One view per slot: making a view costs as much as copying 1.5 KB.
        self.vectors = list(self.requests.payload(np.float32, 0, max_dim))
        self.ids = list(self.results.payload(np.int64, 0, max_k))
        self.distances = list(self.results.payload(np.float32, 8 * max_k, max_k))
        self.outstanding: dict[int, int] = {}  # request id → receive_ns
        self.cancelled: set[int] = set()  # those of them that the client does not want any more
        self.last_id = 0

    def close(self) -> None:
        self.bell.close()
        os.close(self.pidfd)
        self.memory.close()
