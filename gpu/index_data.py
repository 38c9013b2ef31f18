"""What an index is made of."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu.neighbor_codes import NeighborCodes
from gpu.rows import Rows


@dataclass(frozen=True)
class IndexData:
    """Encoded vectors, the graph over them, where searches begin, and the caller's ids.

    graph: uint32 [N, degree], C order. seeds: uint32 [S], distinct rows. ids: int64 [N], or None for row numbers.
    codes: RaBitQ codes of every node's neighbours, or None; only a CPU's search reads them.
    """

    rows: Rows
    graph: npt.NDArray[np.uint32]
    seeds: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.int64] | None
    codes: NeighborCodes | None = None

    def ids_of(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The caller's ids of row numbers; -1 stays -1."""
        if self.ids is None:
            return nodes
        if len(nodes) and nodes.min() >= 0:
            return self.ids[nodes]
        return np.where(nodes >= 0, self.ids[np.maximum(nodes, 0)], -1)
