"""On what a pool opens sessions. They change when its catalogue does; a session keeps those it was opened with."""

from ipc.memo import Memo
from ipc.parameters import Limits, Unpacked, unpack
from ipc.ring import RingLayout
from ipc.session import Catalogue


class Terms:
    """The catalogue and the limits of a session's requests, and the layouts of its request and result ring.

    ring_slots: of either ring. Raises `InvalidArgument`.
    """

    def __init__(self, catalogue: Catalogue, epoch: int, ring_slots: int, max_k: int, max_top_m: int) -> None:
        self.limits = limits = Limits.checked(catalogue, max_k, max_top_m)
        self.catalogue, self.epoch, self.max_dim = catalogue, epoch, catalogue.max_dim
        self.layouts = (RingLayout(ring_slots, 4 * self.max_dim), RingLayout(ring_slots, 12 * max_k))
        self.unpacked: Memo[bytes, Unpacked] = Memo(lambda packed: unpack(packed, epoch, limits))
