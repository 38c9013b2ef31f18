"""On what a pool opens sessions. They change when its catalogue does; a session keeps those it was opened with."""

from collections.abc import Callable

import numpy as np

from ipc.ring.ring import RingLayout
from ipc.session.messages import Catalogue, Served
from ipc.session.parameters import Limits

Number = Callable[[Served], int]
"""The pool's own number for a collection, for its compiled loop; below 0 for one that it has not."""


class Terms:
    """The catalogue and the limits of a session's requests, and the layouts of its request and result ring.

    ring_slots: of either ring. table: int64 [codes, 2], the number and the dimension of each collection. Raises
    `InvalidArgument`.
    """

    def __init__(
        self, catalogue: Catalogue, epoch: int, ring_slots: int, max_k: int, max_top_m: int, number: Number
    ) -> None:
        self.limits = Limits.checked(catalogue, max_k, max_top_m)
        self.catalogue, self.epoch, self.max_dim = catalogue, epoch, catalogue.max_dim
        self.layouts = (RingLayout(ring_slots, 4 * self.max_dim), RingLayout(ring_slots, 12 * max_k))
        rows = [(number(served), served.dim) for served in catalogue.served]
        self.table = np.array(rows, np.int64).reshape(-1, 2)
